"""Calls written into a TorchScript graph as they stand, one node each, with the very overload that they asked for."""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runtime.binding.blueprint import Blueprint, CallDraft, View
from runtime.binding.calls import Form
from runtime.binding.slots import Slot
from runtime.lowering.rewrite import getitem

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""As TorchScript numbers them."""
_ITEM_OF = (operator.getitem, getitem)
_BY_SCALAR = frozenset(
    {"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div", "aten::div_"}
)
"""Operators whose `Scalar` overload makes a tensor of the number, as Python does for their `Tensor` overload."""

_Value = Any
"""A value of a TorchScript graph, or what an operator with several results gave: a list of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """A tensor that a stretch knows before it runs: a static of the blueprint, a table of the store, or a constant."""

    static: int | None = None
    table: str | None = None
    constant: torch.Tensor | None = None


class UnscriptableError(Exception):
    """A call that has to be left to Python."""


@dataclass(frozen=True, slots=True)
class NotTensors:
    """Slots and statics that are no tensors, or of which that is not known."""

    slots: frozenset[int]
    statics: frozenset[int]


def not_tensors_of(blueprint: Blueprint) -> NotTensors:
    return NotTensors(
        slots=frozenset(i.out for i in blueprint.trace.instructions if not _makes_one(i.target)),
        statics=frozenset(
            n for n, s in enumerate(blueprint.statics) if isinstance(s, View) and not _makes_one(s.form.target)
        ),
    )


def _makes_one(target: Callable[..., Any]) -> bool:
    """Whether a call gives one tensor. What is taken out of several results is one."""
    if target in _ITEM_OF or target is torch.embedding:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and [str(r.type) for r in schema.returns] == ["Tensor"]


def _is_for(chosen: str, schema: Any) -> bool:
    """Whether the overload that TorchScript chose by the arguments' types computes what the call asked for."""
    if chosen == str(schema):
        return True
    by_scalar = schema.overload_name == "Tensor" and schema.name in _BY_SCALAR
    return by_scalar and chosen.startswith(f"{schema.name}.Scalar(")


class Writer:
    """Writes calls into a graph of two arguments: a list of values of the frame, which it empties, and known ones."""

    def __init__(self, not_tensors: NotTensors) -> None:
        self.entering: dict[int, _Value] = {}
        self.known: list[Known] = []
        self._not_tensors = not_tensors
        self._made: dict[int, _Value] = {}
        self._known_values: dict[tuple[int | None, str | None, int], _Value] = {}
        self._graph: Any = torch._C.Graph()
        entering, known = (self._graph.addInput() for _ in range(2))
        for argument in (entering, known):
            argument.setType(torch._C.ListType.ofTensors())
        self._enter = self._node("prim::ListUnpack", [entering], 0)
        self._node("aten::clear", [entering], 0)
        self._know = self._node("prim::ListUnpack", [known], 0)

    def write(self, call: CallDraft) -> None:
        """Raises UnscriptableError; the graph is of no use then."""
        form = call.form
        statics = dict(call.statics)
        if form.target in _ITEM_OF:
            self._made[form.out] = self._item(form)
        elif form.target is torch.ops.aten.alias.default and form.flat and not statics:
            self._made[form.out] = self._leaf(form.args[0], statics)
        else:
            self._made[form.out] = self._result(form, statics)

    def function(self, leaving: Sequence[int]) -> Callable[[Any, Any], tuple[Any, ...]]:
        """The graph as a function that returns these slots."""
        results = [self._made[slot] for slot in leaving]
        values = [self._tuple(value) if isinstance(value, list) else value for value in results]
        self._graph.registerOutput(self._tuple(values))
        function: Callable[[Any, Any], tuple[Any, ...]] = torch._C._create_function_from_graph(
            "stretch", self._graph
        )
        return function

    def _tuple(self, values: Sequence[_Value]) -> _Value:
        node = self._node("prim::TupleConstruct", values, 1)
        node.output().setType(torch._C.TupleType([value.type() for value in values]))
        return node.output()

    def _result(self, form: Form, statics: dict[int, int]) -> _Value:
        target: Any = torch.ops.aten.embedding.default if form.target is torch.embedding else form.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            raise UnscriptableError
        schema: Any = target._schema
        types = [str(r.type) for r in schema.returns]
        if types not in (["Tensor"], ["List[Tensor]"]) and (len(types) < 2 or {*types} != {"Tensor"}):
            raise UnscriptableError
        node = self._node(schema.name, self._arguments(form, schema, statics), len(types))
        for output, returned in zip(node.outputs(), schema.returns, strict=True):
            output.setType(returned.type)
        if not _is_for(node.schema(), schema):
            raise UnscriptableError
        return node.output() if len(types) == 1 else list(node.outputs())

    def _arguments(self, form: Form, schema: Any, statics: dict[int, int]) -> list[_Value]:
        values = []
        for position, argument in enumerate(schema.arguments):
            of_type = str(argument.type)
            if position == 0 and form.table is not None:
                values.append(self._known(Known(table=form.table)))
            elif position < len(form.args) and not argument.kwarg_only:
                values.append(self._value(form.args[position], statics, of_type))
            elif argument.name in form.kwargs:
                values.append(self._value(form.kwargs[argument.name], statics, of_type))
            elif argument.has_default_value():
                values.append(self._value(argument.default_value, statics, of_type))
            else:
                raise UnscriptableError
        return values

    def _value(self, value: Any, statics: dict[int, int], of_type: str) -> _Value:
        if isinstance(value, Slot | torch.Tensor):
            return self._leaf(value, statics)
        if isinstance(value, list | tuple) and "Tensor" in of_type:
            optional = "Optional[Tensor]" in of_type and of_type.startswith("List")
            leaves = [self._leaf(leaf, statics) for leaf in value]
            node = self._node("prim::ListConstruct", leaves, 1)
            tensor = torch._C.TensorType.get()
            node.output().setType(torch._C.ListType(torch._C.OptionalType(tensor) if optional else tensor))
            return node.output()
        return self._constant(value, of_type)

    def _leaf(self, leaf: Any, statics: dict[int, int]) -> _Value:
        """A value of the frame, or a known one; in a list also None."""
        if leaf is None:
            return self._constant(None, "")
        if isinstance(leaf, torch.Tensor):
            return self._known(Known(constant=leaf))
        if not isinstance(leaf, Slot):
            raise UnscriptableError
        if leaf.index in statics:
            return self._known(Known(static=statics[leaf.index]))
        if leaf.index not in self._made and leaf.index not in self.entering:
            if leaf.index in self._not_tensors.slots:
                raise UnscriptableError
            self.entering[leaf.index] = self._enter.addOutput()
        value = self._made.get(leaf.index, self.entering.get(leaf.index))
        if isinstance(value, list):
            raise UnscriptableError
        return value

    def _known(self, known: Known) -> _Value:
        if known.static in self._not_tensors.statics:
            raise UnscriptableError
        key = (known.static, known.table, id(known.constant))
        if key not in self._known_values:
            self.known.append(known)
            self._known_values[key] = self._know.addOutput()
        return self._known_values[key]

    def _item(self, form: Form) -> _Value:
        """One of an operator's results, which this graph has made."""
        source, index = form.args
        made = self._made.get(source.index) if isinstance(source, Slot) else None
        if made is None or not isinstance(index, int):
            raise UnscriptableError
        if isinstance(made, list):
            return made[index]
        return self._typed("aten::__getitem__", [made, self._constant(index, "int")])

    def _typed(self, name: str, arguments: Sequence[_Value]) -> _Value:
        node = self._node(name, arguments, 1)
        node.output().setType(torch._C.TensorType.get())
        return node.output()

    def _constant(self, value: Any, of_type: str) -> _Value:
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        elif "float" in of_type and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        elif isinstance(value, list | tuple):
            value = list(value)
            if not value:
                return self._empty(of_type)
        try:
            return self._graph.insertConstant(value)
        except TypeError as error:
            raise UnscriptableError from error

    def _empty(self, of_type: str) -> _Value:
        node = self._node("prim::ListConstruct", [], 1)
        lists = torch._C.ListType
        node.output().setType(lists.ofFloats() if "float" in of_type else lists.ofInts())
        return node.output()

    def _node(self, kind: str, inputs: Sequence[_Value], outputs: int) -> Any:
        node = self._graph.create(kind, list(inputs), outputs)
        return self._graph.insertNode(node)
