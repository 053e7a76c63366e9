"""Script segments: consecutive ops as one call of TorchScript's interpreter, outside of Python's.

Python's cost between two ops is large alongside a busy thread: each op releases the interpreter lock and waits to get
it back. A segment is a TorchScript graph with the calls as they stand, one node each, with the overload asked for.
Nothing is optimised, so bits and memory are those of the single calls: no pass joins or reorders ops, parameters are
arguments (TorchScript would look at the bytes of constants, which may not be there yet), and a value that dies in a
segment is held by TorchScript alone, which releases it with its last reader.
"""

import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch

from runtime.binding.calls import Call, CallTemplate
from runtime.binding.draft import Draft, DraftCall, StaticView
from runtime.lowering.slots import Frame, Slot

FEWEST_CALLS = 5
"""Shorter segments cost more on the way in and out than Python does."""

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""TorchScript's numbers."""
_ITEM_OF = (operator.getitem,)
_BY_SCALAR = frozenset(
    {"aten::add", "aten::add_", "aten::sub", "aten::sub_", "aten::mul", "aten::mul_", "aten::div", "aten::div_"}
)
"""Operators whose `Scalar` overload makes a tensor of the number, as Python does for their `Tensor` overload."""
_OPERATORS_OWN_WORDS = "\nRuntimeError: "
_REFUSAL = "elements in a list but found 0"
"""In TorchScript's message for an empty list of values, which it refuses before any op runs."""

Known = int | str | torch.Tensor
"""A tensor known before the run: a static of the draft (by index), a table of the store (by name), or a constant."""

_Value = Any
"""A value of a TorchScript graph; for an operator with several results a list of them."""

_log = logging.getLogger("cohabit.runtime")


@dataclass(frozen=True, slots=True)
class ScriptSegment:
    """One compiled segment, valid at all addresses of the model."""

    steps: range
    """The compute steps that it stands for."""
    function: Callable[[Any, Any], tuple[Any, ...]]
    known: tuple[Known, ...]
    entering: tuple[int, ...]
    """Slots that it reads."""
    dying: tuple[int, ...]
    """Those of them that nothing reads afterwards."""
    leaving: tuple[int, ...]
    """Slots that it writes to the frame."""

    def bind(self, static: Callable[[int], Any], table: Callable[[str], torch.Tensor]) -> Call:
        """Return the call, given the values of the draft's statics and the store's tables."""
        function, entering, dying, leaving = self.function, self.entering, self.dying, self.leaving
        values, known = _tensor_list(), _tensor_list()
        known.extend(
            [static(k) if isinstance(k, int) else table(k) if isinstance(k, str) else k for k in self.known]
        )

        def call(frame: Frame) -> None:
            values.extend([frame[slot] for slot in entering])
            for slot in dying:
                frame[slot] = None
            for slot, result in zip(leaving, _run(function, values, known), strict=True):
                frame[slot] = result

        return call


class ScriptSegmenter:
    """Compiles segments, and keeps those of each draft for as long as the draft is in use. Any thread."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Draft, Sequence[ScriptSegment]] = WeakKeyDictionary()

    def at_waits(self, draft: Draft) -> Sequence[ScriptSegment]:
        """Return the segments of a plan: each starts where a step may wait, or after one that is waited for."""
        if draft not in self._known:
            self._known[draft] = compiled(draft, segment_ranges(draft))
        return self._known[draft]

    def cut_before(self, draft: Draft, steps: Sequence[int]) -> Sequence[ScriptSegment]:
        """Return segments that start at each of these compute steps."""
        ends = sorted({0, *steps, len(draft.computes)})
        return compiled(draft, (range(*pair) for pair in pairwise(ends)))


@cache
def unavailable() -> str | None:
    """Return why this torch runs no segments, or None if it does: they use a private interface of torch."""
    template = CallTemplate(torch.ops.aten.neg.default, (Slot(0),), {}, 1, ((0, 0),), (), False, None)
    try:
        writer = TorchScriptWriter(frozenset(), frozenset())
        writer.write(DraftCall(template, (), ()))
        function, values = _compiled(writer, [1]), _tensor_list()
        values.append(torch.ones(1))
        (result,) = _run(function, values, _tensor_list())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if torch.equal(result, -torch.ones(1)) else f"the opposite of 1 is {result.item()}"


def segment_ranges(draft: Draft) -> Iterator[range]:
    """Yield ranges of compute steps of which only the first may wait and only the last is waited for.

    They cover all compute steps. A plan that spills activations, between any two ops, has none.
    """
    if draft.spills:
        return
    restored = draft.restored.keys()
    waited_for = {s.computes_before for s in draft.swap_ins}
    first = swap_ins = 0
    for n, step in enumerate(draft.computes):
        waits = (
            step.swap_ins_before > swap_ins or step.swap_outs_before or not restored.isdisjoint(step.first_reads)
        )
        if n > first and (waits or n in waited_for):
            yield range(first, n)
            first = n
        swap_ins = max(swap_ins, step.swap_ins_before)
    if draft.computes:
        yield range(first, len(draft.computes))


def compiled(draft: Draft, ranges: Iterable[range]) -> tuple[ScriptSegment, ...]:
    """Compile every segment that is worth it, as far as its calls can be written as TorchScript.

    If compiling fails, the model has no segments, and a warning is logged.
    """
    try:
        return tuple(segment for steps in ranges for segment in _segments(draft, steps))
    except Exception as error:
        graph = draft.graph
        fields = {"model": graph.name, "batch": graph.batch, "error": f"{type(error).__name__}: {error}"}
        _log.warning("a model runs op by op, because its segments cannot be compiled", extra={"fields": fields})
        return ()


def _segments(draft: Draft, steps: range) -> Iterator[ScriptSegment]:
    """Yield a range as one segment, or the parts that are left without steps that TorchScript cannot do."""
    slots = frozenset(i.out for i in draft.trace.instructions if not _makes_one(i.target))
    statics = frozenset(
        n for n, s in enumerate(draft.statics) if isinstance(s, StaticView) and not _makes_one(s.template.target)
    )
    first = steps.start
    while first < steps.stop:
        writer, end = TorchScriptWriter(slots, statics), first
        while end < steps.stop and _is_written(writer, draft, end):
            end += 1
        if end == first:
            first += 1
            continue
        if end < steps.stop:  # the step that cannot be written has left parts of it in the graph
            writer = TorchScriptWriter(slots, statics)
            for n in range(first, end):
                _is_written(writer, draft, n)
        segment = _segment(writer, draft, range(first, end))
        if segment is not None:
            yield segment
        first = end


def _is_written(writer: "TorchScriptWriter", draft: Draft, step: int) -> bool:
    try:
        for call in draft.computes[step].calls:
            writer.write(call)
    except UnscriptableError:
        return False
    return True


def _segment(writer: "TorchScriptWriter", draft: Draft, steps: range) -> ScriptSegment | None:
    """Compile what was written of these steps, if that is worth it."""
    calls = [call for n in steps for call in draft.computes[n].calls]
    if len(calls) < FEWEST_CALLS or not writer.entering:  # without values it cannot be compiled without being run
        return None
    freed = {slot for call in calls for slot in call.frees}
    leaving = tuple(call.template.out for call in calls if call.template.out not in freed)
    return ScriptSegment(
        steps=steps,
        function=_compiled(writer, leaving),
        known=tuple(writer.known),
        entering=tuple(writer.entering),
        dying=tuple(slot for slot in writer.entering if slot in freed),
        leaving=leaving,
    )


def _compiled(writer: "TorchScriptWriter", leaving: Sequence[int]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """Return the function of what was written; its first call compiles it. Raises RuntimeError if that fails."""
    function = writer.function(leaving)
    try:
        _run(function, _tensor_list(), _tensor_list())
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
    return function


def _run(function: Callable[[Any, Any], tuple[Any, ...]], values: Any, known: Any) -> tuple[Any, ...]:
    """Run a graph as it was written. Raises RuntimeError with the operator's own message."""
    optimizes = torch._C._get_graph_executor_optimize()  # the calling thread's own
    torch._C._set_graph_executor_optimize(False)
    try:
        return function(values, known)
    except RuntimeError as error:
        raise RuntimeError(str(error).partition(_OPERATORS_OWN_WORDS)[2].strip() or str(error)) from None
    finally:
        torch._C._set_graph_executor_optimize(optimizes)
        values.clear()


def _tensor_list() -> Any:
    """Return an empty list that Python and TorchScript share."""
    values = torch._C.ScriptList([torch.empty(0)])
    values.clear()
    return values


def _makes_one(target: Callable[..., Any]) -> bool:
    """Whether a call returns one tensor, as an item of several results is."""
    if target in _ITEM_OF or target is torch.embedding:
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and [str(r.type) for r in schema.returns] == ["Tensor"]


def _is_overload_of(chosen: str, schema: Any) -> bool:
    """Whether the overload that TorchScript chose by the arguments' types computes what the call asked for."""
    if chosen == str(schema):
        return True
    by_scalar = schema.overload_name == "Tensor" and schema.name in _BY_SCALAR
    return by_scalar and chosen.startswith(f"{schema.name}.Scalar(")


class UnscriptableError(Exception):
    """A call that cannot be written as TorchScript."""


class TorchScriptWriter:
    """Writes calls into a graph of two arguments: a list of values of the frame, which it empties, and a known list."""

    def __init__(self, other_slots: frozenset[int], other_statics: frozenset[int]) -> None:
        """`other_slots` and `other_statics` are those that may not be tensors."""
        self.entering: dict[int, _Value] = {}
        self.known: list[Known] = []
        self._other_slots, self._other_statics = other_slots, other_statics
        self._made: dict[int, _Value] = {}
        self._known_values: dict[int | str, _Value] = {}
        self._graph: Any = torch._C.Graph()
        entering, known = (self._graph.addInput() for _ in range(2))
        for argument in (entering, known):
            argument.setType(torch._C.ListType.ofTensors())
        self._enter = self._node("prim::ListUnpack", [entering], 0)
        self._node("aten::clear", [entering], 0)
        self._know = self._node("prim::ListUnpack", [known], 0)

    def write(self, call: DraftCall) -> None:
        """Append a call. Raises UnscriptableError; the graph is of no use then."""
        template, statics = call.template, dict(call.statics)
        if template.target in _ITEM_OF:
            value = self._item(template)
        elif template.target is torch.ops.aten.alias.default and template.flat and not statics:
            value = self._leaf(template.args[0], statics)
        else:
            value = self._result(template, statics)
        self._made[template.out] = value

    def function(self, leaving: Sequence[int]) -> Callable[[Any, Any], tuple[Any, ...]]:
        """Return the graph as a function that returns these slots."""
        results = [self._made[slot] for slot in leaving]
        values = [self._tuple(value) if isinstance(value, list) else value for value in results]
        self._graph.registerOutput(self._tuple(values))
        function: Callable[[Any, Any], tuple[Any, ...]] = torch._C._create_function_from_graph(
            "segment", self._graph
        )
        return function

    def _tuple(self, values: Sequence[_Value]) -> _Value:
        node = self._node("prim::TupleConstruct", values, 1)
        node.output().setType(torch._C.TupleType([value.type() for value in values]))
        return node.output()

    def _result(self, template: CallTemplate, statics: dict[int, int]) -> _Value:
        target: Any = torch.ops.aten.embedding.default if template.target is torch.embedding else template.target
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
            raise UnscriptableError
        schema: Any = target._schema
        types = [str(r.type) for r in schema.returns]
        if types not in (["Tensor"], ["List[Tensor]"]) and (len(types) < 2 or {*types} != {"Tensor"}):
            raise UnscriptableError
        node = self._node(schema.name, self._arguments(template, schema, statics), len(types))
        for output, returned in zip(node.outputs(), schema.returns, strict=True):
            output.setType(returned.type)
        if not _is_overload_of(node.schema(), schema):
            raise UnscriptableError
        return node.output() if len(types) == 1 else list(node.outputs())

    def _arguments(self, template: CallTemplate, schema: Any, statics: dict[int, int]) -> list[_Value]:
        values = []
        for position, argument in enumerate(schema.arguments):
            of_type = str(argument.type)
            if position == 0 and template.table is not None:
                values.append(self._known_value(template.table))
            elif position < len(template.args) and not argument.kwarg_only:
                values.append(self._value(template.args[position], statics, of_type))
            elif argument.name in template.kwargs:
                values.append(self._value(template.kwargs[argument.name], statics, of_type))
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
        """Return a value of the frame, or a known one; in a list also None."""
        if leaf is None:
            return self._constant(None, "")
        if isinstance(leaf, torch.Tensor):
            return self._known_value(leaf)
        if not isinstance(leaf, Slot):
            raise UnscriptableError
        if leaf.index in statics:
            return self._known_value(statics[leaf.index])
        if leaf.index not in self._made and leaf.index not in self.entering:
            if leaf.index in self._other_slots:
                raise UnscriptableError
            self.entering[leaf.index] = self._enter.addOutput()
        value = self._made.get(leaf.index, self.entering.get(leaf.index))
        if isinstance(value, list):
            raise UnscriptableError
        return value

    def _known_value(self, known: Known) -> _Value:
        if isinstance(known, int) and known in self._other_statics:
            raise UnscriptableError
        key = f"constant {id(known)}" if isinstance(known, torch.Tensor) else known
        if key not in self._known_values:
            self.known.append(known)
            self._known_values[key] = self._know.addOutput()
        return self._known_values[key]

    def _item(self, template: CallTemplate) -> _Value:
        """Return one of an operator's results, which this graph has made."""
        source, index = template.args
        made = self._made.get(source.index) if isinstance(source, Slot) else None
        if made is None or not isinstance(index, int):
            raise UnscriptableError
        if isinstance(made, list):
            return made[index]
        node = self._node("aten::__getitem__", [made, self._constant(index, "int")], 1)
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
                node, lists = self._node("prim::ListConstruct", [], 1), torch._C.ListType
                node.output().setType(lists.ofFloats() if "float" in of_type else lists.ofInts())
                return node.output()
        try:
            return self._graph.insertConstant(value)
        except TypeError as error:
            raise UnscriptableError from error

    def _node(self, kind: str, inputs: Sequence[_Value], outputs: int) -> Any:
        node = self._graph.create(kind, list(inputs), outputs)
        return self._graph.insertNode(node)
