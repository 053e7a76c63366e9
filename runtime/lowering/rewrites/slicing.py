"""Computes layers with large weights in slices of outputs. Each slice's weight is copied and evicted separately."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from cohabit.runtime.lowering.fusion import ACTIVATIONS
from cohabit.runtime.lowering.model import FxModel, is_linear_layer

aten = torch.ops.aten

SPLIT_BYTES, MOST_SLICE_BYTES = 16 << 20, 8 << 20
"""Weight bytes above which a layer of any model is computed in slices of its outputs; maximum bytes of a slice."""
PACKED_SPLIT_BYTES, MOST_PACKED_SLICE_BYTES = 3 << 20, 2 << 20
"""The same for packed weights: on a CPU, small products are hardly slower, and need less memory."""
SPLIT_SHARE, LEAST_SPLIT_BYTES = 1 / 8, 1 << 20
"""Fraction of the model's weights above which a layer is sliced, too, and the minimum in bytes: a budget of a quarter
of the weights must suffice."""
SLICE_SHARE, LEAST_SLICE_BYTES = 1 / 12, 512 << 10
"""Size of a slice as a fraction of the model's weights, and its minimum in bytes: large enough for the link, small
enough to start early."""
LEAST_WHOLE_BYTES = 1 << 20
"""Results with at least this many bytes per row of the batch have their parts written into them one by one; parts of
smaller results are joined."""
_BLOCK_ROWS = 64
"""Outputs per block of packed layouts, which are padded to a multiple of it."""
_PARTS = "parts"
"""Key in the `meta` of joined parts that will be written into the result: its sizes, and the rows of a part."""
CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_BY_ELEMENT = (aten.to.dtype, aten.mul.Tensor, aten.sub.Tensor, aten.add.Tensor, aten.div.Tensor)
"""Operators that compute a weight element by element, such as from integers and their scales."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """An op whose result can be computed in parts, each from a part of its weight."""

    weight: fx.Node
    operands: Sequence[Any]
    cuts: Sequence[int | None]
    """Per operand, the dimension that parts slice; None if each part reads the whole operand."""
    joined: int
    """The dimension along which parts are joined."""
    arguments: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Returns the op's arguments, given the operands."""


def slice_sizes(model: FxModel, *, packed: bool) -> tuple[int, int]:
    """Return the largest weight of a layer that stays whole, and the size of a slice, in bytes."""
    total = sum(w.nbytes for w in model.weights.values())
    most, slice_bytes = (PACKED_SPLIT_BYTES, MOST_PACKED_SLICE_BYTES) if packed else (SPLIT_BYTES, MOST_SLICE_BYTES)
    most = min(most, max(LEAST_SPLIT_BYTES, int(total * SPLIT_SHARE)))
    return most, min(slice_bytes, max(LEAST_SLICE_BYTES, int(total * SLICE_SHARE)))


def split_large_layers(model: FxModel, packed: bool) -> None:
    """Compute layers with large weights in parts: of output features, of output channels, or of experts.

    Each part has its own part of the weight, so that it can start, and be evicted, independently. A weight stored as
    integers is also multiplied by its scales part by part.
    """
    most, slice_bytes = slice_sizes(model, packed=packed)
    known: dict[tuple[fx.Node, int, int], fx.Node] = {}
    for node in list(model.graph.nodes):
        layer = _layer(model, node) if node.op == "call_function" and not node.kwargs else None
        if layer is None or (nbytes := _stored_bytes(model, layer.weight)) <= most:
            continue
        # Equal slices, rounded up to whole blocks of packed layouts.
        count = _shape(model, layer.weight)[0]
        rows = -(-count // -(-nbytes // slice_bytes))
        if rows > _BLOCK_ROWS:
            rows = -(-rows // _BLOCK_ROWS) * _BLOCK_ROWS
        call: Callable[..., fx.Node] = model.graph.call_function
        after = _activation_after(node)
        with model.graph.inserting_before(node):
            parts: list[fx.Node] = []
            for start in range(0, count, rows):
                own = [
                    o if cut is None or o is None else _rows(model, known, o, cut, start, min(start + rows, count))
                    for o, cut in zip(layer.operands, layer.cuts, strict=True)
                ]
                part = call(node.target, layer.arguments(own))
                # The activation function is applied part by part, too.
                parts.append(part if after is None else call(after.target, (part, *after.args[1:]), after.kwargs))
                form = _part_of(node.meta.get("val"), layer.joined, min(rows, count - start))
                part.meta["val"] = parts[-1].meta["val"] = form
            whole = call(aten.cat.default, (parts, layer.joined))
        # `write_parts` later replaces the concatenation of a large result.
        if (sizes := _whole_sizes(model, node, after or node)) is not None:
            whole.meta[_PARTS] = sizes, rows
        for replaced in [node] if after is None else [after, node]:
            whole.meta |= replaced.meta
            replaced.replace_all_uses_with(whole)
            model.graph.erase_node(replaced)
    model.graph.eliminate_dead_code()  # ops that computed whole weights


def _part_of(value: Any, dim: int, size: int) -> Any:
    """Return a fake tensor of a part's shape."""
    if not isinstance(value, torch.Tensor):
        return None
    sizes: list[Any] = list(value.shape)
    sizes[dim] = size
    with getattr(value, "fake_mode", nullcontext()):  # another mode may be active
        return value.new_empty(sizes)


def _whole_sizes(model: FxModel, node: fx.Node, last: fx.Node) -> list[int | None] | None:
    """Return the sizes of a linear layer's large result that parts are written into; None for the batch's size.

    Memory then holds the result and one part, not the result twice. Returns None if parts are joined: if the result is
    small, the next op can overwrite it, or sizes other than the batch's are dynamic.
    """
    value = node.meta.get("val")
    if node.target is not aten.linear.default or not isinstance(value, torch.Tensor):
        return None
    if any(user.target in (*_BY_ELEMENT, *ACTIVATIONS) for user in last.users):
        return None
    sizes: list[int | None] = [d if isinstance(d, int) else None for d in value.shape]
    row_bytes = math.prod(d for d in sizes if d is not None) * value.itemsize
    dynamic = [d for d in value.shape if not isinstance(d, int)]
    if row_bytes < LEAST_WHOLE_BYTES or any(str(d) != model.batch_symbol for d in dynamic):
        return None
    return sizes


def write_parts(model: FxModel) -> None:
    """Write the parts of large results into them one by one. The program is not functional afterwards."""
    call: Callable[..., fx.Node] = model.graph.call_function
    for node in list(model.graph.nodes):
        if (written := node.meta.get(_PARTS)) is None:
            continue
        sizes, rows = written
        whole = None
        for part, start in zip(cast(Any, node.args[0]), range(0, sizes[-1], rows), strict=True):
            with model.graph.inserting_before(part.next):
                if whole is None:
                    own = [call(aten.sym_size.int, (part, n)) if d is None else d for n, d in enumerate(sizes)]
                    whole = call(aten.new_empty.default, (part, own))
                    whole.meta = dict(node.meta)
                place = call(aten.slice.Tensor, (whole, -1, start, min(start + rows, sizes[-1])))
                call(aten.copy_.default, (place, part))
        assert whole is not None
        node.replace_all_uses_with(whole)
        model.graph.erase_node(node)


def _activation_after(node: fx.Node) -> fx.Node | None:
    """Return the activation function that is a value's only reader, which parts can compute one by one."""
    reader = next(iter(node.users)) if len(node.users) == 1 else None
    return reader if reader is not None and reader.target in ACTIVATIONS else None


def _layer(model: FxModel, node: fx.Node) -> _Layer | None:
    """Describe how an op can be computed in parts; None if it cannot, or has no weight."""
    if is_linear_layer(model, node) or (node.target in CONVOLUTIONS and not _grouped(node)):
        x, weight, bias, *rest = cast(Any, (*node.args, None)[: max(3, len(node.args))])
        if not _stored_bytes(model, weight) or (bias is not None and not _stored_bytes(model, bias)):
            return None
        joined = -1 if node.target is aten.linear.default else 1 - len(_shape(model, weight))
        return _Layer(weight, (x, weight, bias), (None, 0, 0), joined, lambda own: (*own, *rest))
    if node.target is aten.bmm.default:
        return _product(model, "bij,bjk->bik", node.args, lambda own: tuple(own))
    if node.target is aten.einsum.default and isinstance(node.args[1], list | tuple):
        equation = str(node.args[0]).replace(" ", "")
        return _product(model, equation, node.args[1], lambda own: (equation, list(own)))
    return None


def _product(
    model: FxModel, equation: str, operands: Sequence[Any], arguments: Callable[[Sequence[Any]], tuple[Any, ...]]
) -> _Layer | None:
    """Split an einsum along its weight's first dimension, if the result has that dimension."""
    given, _, result = equation.partition("->")
    names = given.split(",")
    weights = [(node, own) for node, own in zip(operands, names, strict=True) if _stored_bytes(model, node)]
    if "." in equation or len(weights) != 1 or not weights[0][1]:
        return None
    weight, first = weights[0][0], weights[0][1][0]
    cuts = [own.index(first) if first in own else None for own in names]
    count = _shape(model, weight)[0]
    for node, own, cut in zip(operands, names, cuts, strict=True):
        # A dimension named twice is a diagonal; one of size 1 is the same for all rows.
        if own.count(first) > 1 or (cut is not None and _shape(model, node)[cut] != count):
            return None
    return _Layer(weight, operands, cuts, result.index(first), arguments) if first in result else None


def _stored_bytes(model: FxModel, node: Any) -> int:
    """Return the bytes of a weight, or of the weights that a value is computed from element by element; else 0."""
    weight = model.weight_of(node)
    if weight is not None:
        return weight.nbytes
    if not isinstance(node, fx.Node) or node.target not in _BY_ELEMENT or len(node.users) > 1 or node.kwargs:
        return 0
    read = [_stored_bytes(model, n) for n in node.all_input_nodes]
    return sum(read) if all(read) else 0


def _shape(model: FxModel, node: fx.Node) -> Sequence[int]:
    weight = model.weight_of(node)
    return (node.meta["val"] if weight is None else weight).shape


def _rows(
    model: FxModel, known: dict[tuple[fx.Node, int, int], fx.Node], node: fx.Node, dim: int, start: int, end: int
) -> fx.Node:
    """Return rows of an operand: a new weight, the same op on rows of its operands, or a view."""
    weight = model.weight_of(node)
    if weight is None and not _stored_bytes(model, node):
        return model.graph.call_function(aten.slice.Tensor, (node, dim, start, end))
    if weight is None:
        count = len(_shape(model, node))
        arguments: list[Any] = list(node.args)
        for i, a in enumerate(arguments):
            if _has_rows(model, a, count):
                arguments[i] = _rows(model, known, a, dim, start, end)
        return model.graph.call_function(cast(Any, node.target), tuple(arguments))
    if (node, start, end) not in known:
        known[node, start, end] = model.add_weight(f"{node.name}_rows{start}", weight[start:end])
    return known[node, start, end]


def _has_rows(model: FxModel, operand: Any, dims: int) -> bool:
    """Whether an operand of an elementwise op has a row for each of the result's; a single row is shared by all."""
    return isinstance(operand, fx.Node) and len(shape := _shape(model, operand)) == dims and shape[0] != 1


def _grouped(node: fx.Node) -> bool:
    """Whether a convolution has more than one group."""
    return len(node.args) > 6 and bool(node.args[6] != 1)
