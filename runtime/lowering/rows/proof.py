"""Shows that the rows of a batch do not influence one another: follows the batch through a program, op by op.

What no rule shows to be independent counts as mixing. An op without a rule is decomposed, that op alone.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch._decomp import decomposition_table
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cohabit.runtime.lowering.allowed_ops import draws, is_assertion
from cohabit.runtime.lowering.model import FxModel
from cohabit.runtime.lowering.rows.layouts import (
    BATCH,
    CONSTANT,
    Constant,
    Layout,
    Mixed,
    Mixing,
    NoRule,
    Repeated,
    Rows,
    Sizes,
    Value,
    checked,
)
from cohabit.runtime.lowering.rows.rules import SIZE_ARGUMENTS, OpCall, rule_of

LAYOUT = "rows"
"""Key in the `meta` of nodes: the layout of their result, or a list of layouts."""

_UNREAD = frozenset(
    {"copy", "fill", "zero", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
)
"""Operators that do not read the values of their first operand."""
_SOURCE = re.compile(r'File "([^"]+)", line (\d+), in \S+\n\s+([^\n]+)')
_MOST_PASSES = 4
"""Maximum number of passes over a loop's body until its layouts no longer change."""
_MOST_DEPTH = 8
"""Maximum depth of decompositions."""


def find_mixing(model: FxModel, symbols: Sequence[Mapping[str, int]]) -> str | None:
    """Return the op that mixes rows and how; None if the rows of a batch are shown to be independent.

    `symbols` are values of the dynamic sizes other than the batch, at each of which rows must be independent. Leaves
    layouts in the `meta` of nodes. The model has a batch dimension.
    """
    assert model.batch_symbol is not None
    for others in symbols:
        reason = BatchFollower(model.root, Sizes(model.batch_symbol, others)).mixing(model)
        if reason is not None:
            return reason
    return None


class BatchFollower:
    """Follows the batch through a graph and its branches, loops and regions."""

    def __init__(self, root: torch.nn.Module, sizes: Sizes) -> None:
        self._root, self._sizes = root, sizes

    def mixing(self, model: FxModel) -> str | None:
        inputs = set(model.input_nodes)
        given = []
        for node in model.graph.nodes:
            if node.op == "placeholder":
                if node not in inputs:
                    weight = model.weights[node.name]
                    given.append(Value(CONSTANT, tuple(weight.shape), weight.dtype))
                    continue
                try:
                    shape = self._sizes.shape(node.meta["val"])
                except Mixing as error:
                    return f"input {node.name}: {error}"
                layout = checked(Rows(0), shape)
                if isinstance(layout, Mixed):
                    return f"input {node.name} has the batch in several dimensions"
                given.append(Value(layout, shape, node.meta["val"].dtype))
        results = self.run(self._root, model.graph, given)
        for port, value in zip(model.outputs, results, strict=True):
            layout = value.layout
            if isinstance(layout, Mixed):
                return str(layout)
            if layout not in (Rows(0), Repeated(0)):
                return f"output {port.name} does not have one row per row of the inputs"
        return None

    def run(self, root: torch.nn.Module, graph: fx.Graph, given: Sequence[Any]) -> list[Any]:
        """Return the flattened results of a graph for the values of its placeholders."""
        values: dict[fx.Node, Any] = {}
        entering = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = next(entering)
            elif node.op == "get_attr":
                values[node] = self._attribute(root, str(node.target))
            elif node.op == "output":
                return pytree.tree_leaves(fx.node.map_arg(node.args[0], values.__getitem__))
            else:
                values[node] = self._call(root, node, values)
                node.meta[LAYOUT] = pytree.tree_map(lambda v: getattr(v, "layout", None), values[node])
        raise AssertionError("a graph has an output")

    def _attribute(self, root: torch.nn.Module, name: str) -> Any:
        found: Any = root
        for part in name.split("."):
            found = getattr(found, part)
        return Value(CONSTANT, tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else found

    def _call(self, root: torch.nn.Module, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Return the values of a call's results; what mixes is named by the first op that does."""
        result = node.meta.get("val")
        args: Any
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target: Any = node.target
        if getattr(target, "__name__", "") == "getitem" and isinstance(args[0], list | tuple):
            return args[0][args[1]]
        if is_assertion(target):
            return None
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return self._number(args, result)
        try:
            shapes = [self._sizes.shape(tensor) for tensor in tensors]
            layouts = self._layouts(target, args, kwargs, shapes)
        except Mixing as error:
            shapes = [self._known_shape(tensor) for tensor in tensors]
            layouts = [Mixed(str(error))] * len(tensors)
        named = [replace(v, at=_place(node)) if isinstance(v, Mixed) and not v.at else v for v in layouts]
        found = [Value(v, s, t.dtype) for v, s, t in zip(named, shapes, tensors, strict=True)]
        return found[0] if isinstance(result, torch.Tensor) else found

    def _layouts(self, op: Any, args: Any, kwargs: Any, shapes: Sequence[tuple[int, ...]]) -> list[Layout]:
        """Return the layouts of a call's results: by rule, or by the rules of the ops that it is composed of."""
        if isinstance(op, HigherOrderOperator):
            found = self._control(str(op), args)
            return [checked(layout, shape) for layout, shape in zip(found, shapes, strict=True)]
        if not isinstance(op, OpOverload) or op._schema.is_mutable:
            raise NoRule("no rule describes it")
        try:
            return layouts_of(op, args, kwargs, shapes, self._sizes)
        except NoRule as error:
            args, kwargs = pytree.tree_map(self._sizes.number, (args, kwargs))
            try:
                return _Decomposing().results(op, args, kwargs, shapes)
            except NoRule:
                raise error from None

    def _known_shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        try:
            return self._sizes.shape(tensor)
        except Mixing:
            return ()

    def _number(self, args: Any, result: Any) -> Any:
        """Return a number, and note its symbols if it was read from rows."""
        operands = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Value)]
        read_rows = any(not isinstance(value.layout, Constant) for value in operands)
        numbers = [leaf for leaf in pytree.tree_leaves(args) if not isinstance(leaf, Value)]
        for leaf in pytree.tree_leaves(result):
            symbols = getattr(getattr(leaf, "node", None), "expr", None)
            if symbols is not None and (read_rows or any(map(self._sizes.has_rows, numbers))):
                self._sizes.mixed.update(str(s) for s in symbols.free_symbols if str(s).startswith(("u", "zu")))
        return result

    def _control(self, name: str, args: Sequence[Any]) -> list[Layout]:
        """Return the layouts of the results of a branch, a loop or a region."""
        match name:
            case "wrap_with_set_grad_enabled":
                results = self._body(args[1], args[2:])
            case "wrap_with_autocast":
                results = self._body(args[4], args[5:])
            case "cond":
                chosen, if_true, if_false, operands = args
                self._require_constant(chosen, "rows choose its branch")
                branches = self._body(if_true, operands), self._body(if_false, operands)
                return [_either(a.layout, b.layout) for a, b in zip(*branches, strict=True)]
            case "while_loop":
                goes_on, body, carried, more = (*args, ())[:4]
                carried = self._settled(lambda own: self._body(body, [*own, *more]), list(carried))
                self._require_constant(
                    self._body(goes_on, [*carried, *more])[0], "rows choose its number of passes"
                )
                results = carried
            case _:
                raise NoRule("no rule describes it")
        return [value.layout for value in results]

    def _body(self, body: Any, operands: Sequence[Any]) -> list[Any]:
        if not isinstance(body, fx.GraphModule):
            raise NoRule("its body is not a graph")
        results = self.run(body, body.graph, operands)
        if any(not isinstance(value, Value) for value in results):
            raise NoRule("its body returns numbers")
        return results

    def _settled(self, passes: Callable[[list[Any]], list[Any]], carried: list[Any]) -> list[Any]:
        """Return carried values whose layouts a pass through a loop's body keeps."""
        for _ in range(_MOST_PASSES):
            results = passes(carried)
            new = [replace(a, layout=_either(a.layout, b.layout)) for a, b in zip(carried, results, strict=True)]
            if new == carried:
                return carried
            carried = new
        raise NoRule("its layouts change with every pass")

    def _require_constant(self, condition: Any, why: str) -> None:
        if isinstance(condition, Value):
            if isinstance(condition.layout, Mixed):
                raise Mixing(str(condition.layout))
            if not isinstance(condition.layout, Constant):
                raise Mixing(why)
        elif self._sizes.has_batch(condition) or self._sizes.has_rows(condition):
            raise Mixing(why)


def layouts_of(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]], sizes: Sizes
) -> list[Layout]:
    """Return the layouts of a call's results by the operator's rule. Raises Mixing."""
    if draws(op, args, kwargs):
        raise Mixing("it draws random numbers")
    name = op._schema.name.split("::")[1]
    given = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given |= dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | dict(kwargs)
    arguments = {a.name: given[a.name] for a in op._schema.arguments}
    # Numbers: sizes may have the batch, other numbers may not.
    for argument, value in arguments.items():
        for leaf in pytree.tree_leaves(value):
            if sizes.has_rows(leaf):
                raise Mixing("a number that was read from rows is used")
            if sizes.has_batch(leaf) and argument not in SIZE_ARGUMENTS.get(name, ()):
                raise Mixing("the batch size is used as a number")
    call = OpCall(op, {k: pytree.tree_map(sizes.number, v) for k, v in arguments.items()}, tuple(shapes))
    # Operands that mix.
    read = call.operands[1:] if name in _UNREAD else call.operands
    for operand in read:
        if isinstance(operand.layout, Mixed):
            return [operand.layout] * len(shapes)
    with_batch = any(size and size % BATCH == 0 for shape in shapes for size in shape)
    if all(isinstance(value.layout, Constant) for value in read) and not with_batch:
        return [CONSTANT] * len(shapes)
    rule = rule_of(op)
    if rule is None:
        raise NoRule("no rule describes it")
    try:
        found = rule(call)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise NoRule(f"its rule does not describe this call: {error}") from error
    layouts = found if isinstance(found, list) else [found] * len(shapes)
    return [checked(layout, shape) for layout, shape in zip(layouts, shapes, strict=True)]


class _Decomposing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the batch through the ops that an op without a rule is composed of.

    They run on fake tensors, in which the batch is the only symbol.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = ShapeEnv()
        self.fake = FakeTensorMode(shape_env=self._shapes)
        context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
        seed = self.fake.from_tensor(torch.empty(BATCH, device="meta"), symbolic_context=context)
        self._batch: Any = seed.shape[0]
        self._sizes = Sizes(str(self._batch), {})
        self._depth = 0
        self._layouts: dict[int, tuple[torch.Tensor, Layout]] = {}
        """By the id of a tensor, which is kept alive."""

    def results(self, op: OpOverload, args: Any, kwargs: Any, shapes: Sequence[tuple[int, ...]]) -> list[Layout]:
        """Return the layouts of a call's results. Raises NoRule."""
        args, kwargs = pytree.tree_map(self._entered, (args, kwargs))
        try:
            with self.fake, self:
                result = op(*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            found = [(self._sizes.shape(tensor), self._layout(tensor)) for tensor in tensors]
        except Exception as error:  # kernels and torch's decompositions raise any type
            raise NoRule(f"no rule describes it ({type(error).__name__})") from error
        if (
            self._shapes.replacements
            or [shape for shape, _ in found] != list(shapes)
            or not self._holds_at_all_sizes()
        ):
            raise NoRule("no rule describes it")
        return [layout for _, layout in found]

    def _holds_at_all_sizes(self) -> bool:
        """Whether the conditions on the batch that the decomposition took for granted hold for all batches."""
        small = (2, 3, 8)
        symbol = self._batch.node.expr
        return all(
            bool(guard.expr.xreplace({symbol: sympy.Integer(n)})) for guard in self._shapes.guards for n in small
        )

    def _entered(self, leaf: Any) -> Any:
        if isinstance(leaf, Value):
            shape = [self._at_batch(size) for size in leaf.shape]
            with self.fake:
                tensor = torch.empty(shape, dtype=leaf.dtype)
            self._layouts[id(tensor)] = tensor, leaf.layout
            return tensor
        return self._at_batch(leaf) if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf

    def _at_batch(self, size: int) -> Any:
        return size // BATCH * self._batch if size and size % BATCH == 0 else size

    def _layout(self, tensor: torch.Tensor) -> Layout:
        if id(tensor) in self._layouts:
            return self._layouts[id(tensor)][1]
        return checked(CONSTANT, self._sizes.shape(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands, options = pytree.tree_map(self._value, (args, kwargs))
        try:
            if func._schema.is_mutable:
                raise NoRule("it changes a tensor in place")
            result = func(*args, **kwargs)
            tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            shapes = [self._sizes.shape(t) for t in tensors]
            layouts = layouts_of(func, operands, options, shapes, self._sizes)
        except NoRule:
            if func._schema.is_mutable or func not in decomposition_table or self._depth == _MOST_DEPTH:
                raise
            self._depth += 1
            with self:
                result = decomposition_table[func](*args, **kwargs)
            self._depth -= 1
            return result
        except Mixing as mixing:
            layouts = [Mixed(str(mixing))] * len(tensors)
        for tensor, layout in zip(tensors, layouts, strict=True):
            self._layouts[id(tensor)] = tensor, layout
        return result

    def _value(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return Value(self._layout(leaf), self._sizes.shape(leaf), leaf.dtype)


def _either(a: Layout, b: Layout) -> Layout:
    """Return the layout of a value that is one of two, as the same condition for all rows says."""
    if isinstance(a, Mixed) or a == b:
        return a
    match a, b:
        case _, Mixed():
            return b
        case Repeated(), Rows():
            return b if a.dim == b.dim else Mixed("branches have the rows in other places")
        case Rows(), Repeated():
            return _either(b, a)
    return Mixed("branches have the rows in other places")


def _place(node: fx.Node) -> str:
    """Return an op's name, its operator, and the source line that called it, if the archive has it."""
    lines = _SOURCE.findall(node.meta.get("stack_trace") or "")
    where = f' at {PurePath(lines[-1][0]).name}:{lines[-1][1]} "{lines[-1][2].strip()[:100]}"' if lines else ""
    return f"op {node.name} ({node.target}){where}"
