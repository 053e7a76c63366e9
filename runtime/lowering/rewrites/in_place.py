"""In-place ops: an op overwrites an operand that nothing else reads afterwards.

Runs after the rewrites that assume that each value is written once. It restores the in-place ops that the model had
itself.
"""

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx

from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.model import FxModel, same_shape_and_dtype
from cohabit.runtime.lowering.rewrites.functional import in_place_form, makes_new_bytes

aten = torch.ops.aten

_WHOLE_VIEWS = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
        *(aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        *(aten.transpose.int, aten.permute.default, aten.t.default, aten.mT.default, aten.alias.default),
        *(aten.detach.default, aten.contiguous.default),
    }
)
"""Operators whose result has all bytes of their first operand, or a copy of them."""
_OTHER_VIEWS = frozenset(
    {
        *(aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.diagonal.default, aten.expand.default),
        *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, operator.getitem),
    }
)
"""Operators whose result has some bytes of their first operand, or has a byte several times."""
_PLACES = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
"""Operators that return their first operand with a part replaced by the second, and the view of that part."""

_Place = tuple[tuple[Any, tuple[Any, ...]], ...]
"""Nested views of a value: operators, and their arguments after the operand."""


def work_in_place(model: FxModel) -> None:
    """Let ops overwrite an operand that nothing else reads: fewer activations, the same bits."""
    names = _Names(model.graph)
    for node in list(model.graph.nodes):
        if node.op != "call_function" or not node.args:
            continue
        operand: Any = node.args[0]
        if node.target is packing.CONVOLUTION_SUM and names.last_read(node.args[1], node):
            x, residual, *rest = node.args
            node.target, node.args = packing.CONVOLUTION_SUM_IN_PLACE, (residual, x, *rest)
            names.join(residual, node)
        elif node.target in _PLACES and not node.kwargs and names.last_read(operand, node):
            _write(model, names, operand, (), (node,))
            names.join(operand, node)
            node.replace_all_uses_with(operand)
            model.graph.erase_node(node)
        elif (form := _form_of(node)) is not None and names.last_read(operand, node):
            node.target = form
            names.join(operand, node)
    model.graph.eliminate_dead_code()


def _form_of(node: fx.Node) -> Any:
    """Return the in-place form of an op, if its first operand has the result's shape and dtype."""
    form = in_place_form(node.target)
    return (
        form if form is not None and node.args and same_shape_and_dtype(cast(fx.Node, node.args[0]), node) else None
    )


class _Names:
    """Tracks which values may share bytes, and who reads them."""

    def __init__(self, graph: fx.Graph) -> None:
        self._root: dict[Any, fx.Node] = {}
        self._members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        self._whole: set[Any] = set()
        """Values that cover all bytes of their storage, once."""
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            root = self._root.get(node.args[0]) if node.args else None
            if makes_new_bytes(node):
                self._add(node, node, whole=True)
            elif node.target in _WHOLE_VIEWS | _OTHER_VIEWS and root is not None:
                self._add(node, root, whole=node.target in _WHOLE_VIEWS and node.args[0] in self._whole)
            elif not _returns_numbers(node):
                self._forget(node.all_input_nodes)

    def _add(self, node: fx.Node, root: fx.Node, *, whole: bool) -> None:
        self._root[node] = root
        self._members[root].append(node)
        if whole:
            self._whole.add(node)

    def _forget(self, nodes: Sequence[fx.Node]) -> None:
        """Stop tracking the bytes of these values: they may have further aliases."""
        for root in {self._root[n] for n in nodes if n in self._root}:
            for member in self._members.pop(root):
                del self._root[member]

    def last_read(self, operand: Any, reader: fx.Node) -> bool:
        """Whether an operand covers its storage, and this op reads the storage last and once."""
        if operand not in self._whole or operand not in self._root:
            return False
        members = self._members[self._root[operand]]
        times = sum(argument in members for argument in _leaves(reader))
        return times == 1 and all(user <= reader for member in members for user in member.users)

    def can_write(self, base: fx.Node, writer: fx.Node, replaced: Sequence[fx.Node]) -> bool:
        """Whether an op reads the bytes of `base` once, and all later readers are being replaced."""
        members = self._members[self._root[base]]
        times = sum(argument in members for argument in _leaves(writer))
        return times == 1 and all(u <= writer or u in replaced for member in members for u in member.users)

    def join(self, operand: fx.Node, result: fx.Node) -> None:
        """Record that a result is written over an operand."""
        root, other = self._root[operand], self._root.get(result)
        for member in [result] if other is None else self._members.pop(other):
            self._add(member, root, whole=member in self._whole or member is result)


def _returns_numbers(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and not any("Tensor" in str(r.type) for r in schema.returns)


def _leaves(node: fx.Node) -> list[fx.Node]:
    """Return the operands of a node, with repetitions."""
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), found.append)
    return found


def _write(model: FxModel, names: _Names, base: fx.Node, place: _Place, replaced: tuple[fx.Node, ...]) -> None:
    """Write the last result of `replaced` into a part of `base`, which that op read before."""
    _, value, *where = cast(Any, replaced[-1].args)
    place = (*place, (_PLACES[cast(Any, replaced[-1].target)], tuple(where)))
    alone = len(value.users) == 1 and bool(value.args) and _is(value.args[0], base, place)
    if alone and value.target in _PLACES and not value.kwargs:
        _write(model, names, base, place, (*replaced, value))
        return
    form = _form_of(value) if alone else None
    if form is not None and names.can_write(base, value, replaced):
        value.target = form
        return
    with model.graph.inserting_before(replaced[0]):
        part = base
        for view, arguments in place:
            part = model.graph.call_function(view, (part, *arguments))
        model.graph.call_function(aten.copy_.default, (part, value))


def _is(node: Any, base: fx.Node, place: _Place) -> bool:
    """Whether a value is this view of `base`."""
    if not place or not isinstance(node, fx.Node):
        return node is base
    view, where = place[-1]
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target is aten.split.Tensor and view is aten.slice.Tensor:
        size, dim = (*source.args, 0)[1:3]
        start: Any = cast(Any, node.args[1]) * size if isinstance(size, int) else None
        return start is not None and where == (dim, start, start + size) and _is(source.args[0], base, place[:-1])
    return node.target is view and node.args[1:] == where and _is(source, base, place[:-1])
