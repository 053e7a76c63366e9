"""Shapes, slices, concatenations and indices."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cohabit.server.importing.onnx.indexing import PAIRS
from cohabit.server.importing.onnx.known import MOST_NUMBERS, Known
from cohabit.server.importing.onnx.registry import NodeCall, Value, operator_of

_NO_LIMIT = 1 << 31
"""Ends of slices from here on mean the end of the dimension."""


def _with(value: Known, array: np.ndarray[Any, Any]) -> Known:
    return Known(np.asarray(array, dtype=object), value.dtype)


def _is_small(value: Value) -> bool:
    """Whether a value is to be handled as numbers: a weight stays one."""
    return isinstance(value, Known) and (value.weight is None or value.numbers.size == 1)


def _plain(numbers: Sequence[Any]) -> bool:
    return all(isinstance(number, int) for number in numbers)


@operator_of("Identity", "Dropout")
def _identity(call: NodeCall) -> Value | tuple[Value | None, ...]:
    if len(call.node.outputs) > 1:  # the mask of a dropout, which drops nothing
        return call.value(0), torch.ones_like(call.tensor(), dtype=torch.bool)
    return call.value(0)


@operator_of("Shape")
def _shape(call: NodeCall) -> Value:
    value = call.value(0)
    shape = value.numbers.shape if isinstance(value, Known) else value.shape
    return Known.of(list(shape)[call.attr("start", 0) : call.attr("end")])


@operator_of("Size")
def _size(call: NodeCall) -> Value:
    value = call.value(0)
    return Known.of(value.numbers.size if isinstance(value, Known) else math.prod(value.shape))


@operator_of("ConstantOfShape")
def _constant_of_shape(call: NodeCall) -> Value:
    shape = call.sizes("shape", 0) or []
    fill = call.attr("value", Known.of(0.0, torch.float32))
    number, dtype = fill.list[0], fill.dtype
    if _plain(shape) and math.prod(shape) <= MOST_NUMBERS:
        return Known(np.full(shape, number, dtype=object), dtype)
    return torch.full(shape, number, dtype=dtype)


@operator_of("Range")
def _range(call: NodeCall) -> Value:
    start, limit, step = (call.number(name, index, None) for index, name in enumerate(("start", "limit", "delta")))
    first = call.value(0)
    if _plain((start, limit, step)) and len(range(start, limit, step)) <= MOST_NUMBERS:
        return Known.of(list(range(start, limit, step)), first.dtype)
    return torch.arange(start, limit, step, dtype=first.dtype)


@operator_of("Reshape")
def _reshape(call: NodeCall) -> Value:
    value, shape = call.value(0), call.sizes("shape", 1) or []
    if isinstance(value, Known) and _is_small(value) and _plain(shape):
        kept = [value.numbers.shape[i] if n == 0 and i < value.numbers.ndim else n for i, n in enumerate(shape)]
        return _with(value, value.numbers.reshape(kept))
    x = call.tensor()
    if not call.attr("allowzero", 0):
        shape = [x.shape[i] if isinstance(n, int) and n == 0 else n for i, n in enumerate(shape)]
    return x.reshape(shape)


@operator_of("Flatten")
def _flatten(call: NodeCall) -> Value:
    x, axis = call.tensor(), call.attr("axis", 1)
    axis = axis + x.dim() if axis < 0 else axis
    if axis == 1 and x.dim() > 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


@operator_of("Transpose")
def _transpose(call: NodeCall) -> Value:
    value, order = call.value(0), call.attr("perm")
    if isinstance(value, Known) and _is_small(value):
        return _with(value, np.transpose(value.numbers, order))
    x = call.tensor()
    return x.permute(list(reversed(range(x.dim()))) if order is None else list(order))


@operator_of("Squeeze")
def _squeeze(call: NodeCall) -> Value:
    value, axes = call.value(0), call.sizes("axes", 1)
    if isinstance(value, Known) and _is_small(value):
        return _with(value, np.squeeze(value.numbers, None if axes is None else tuple(axes)))
    x = call.tensor()
    return x.squeeze() if axes is None else x.squeeze(axes)


@operator_of("Unsqueeze")
def _unsqueeze(call: NodeCall) -> Value:
    value, axes = call.value(0), call.sizes("axes", 1) or []
    if isinstance(value, Known) and _is_small(value):
        return _with(value, np.expand_dims(value.numbers, tuple(axes)))
    x = call.tensor()
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator_of("Expand")
def _expand(call: NodeCall) -> Value:
    value, shape = call.value(0), call.sizes("shape", 1) or []
    if isinstance(value, Known) and _is_small(value) and _plain(shape):
        both = np.broadcast_shapes(value.numbers.shape, tuple(shape))
        if math.prod(both) <= MOST_NUMBERS:
            return _with(value, np.broadcast_to(value.numbers, both))
    x = call.tensor()
    own = [1] * (len(shape) - x.dim()) + list(x.shape)
    wanted = [1] * (x.dim() - len(shape)) + shape
    # Either side may be 1; a size of 1 that is a symbol does not occur in what torch.export traces.
    return x.expand([n if isinstance(m, int) and m == 1 else m for n, m in zip(own, wanted, strict=True)])


@operator_of("Tile")
def _tile(call: NodeCall) -> Value:
    value, repeats = call.value(0), call.sizes("repeats", 1) or []
    if isinstance(value, Known) and _is_small(value) and _plain(repeats):
        array = np.tile(value.numbers, repeats)
        if array.size <= MOST_NUMBERS:
            return _with(value, array)
    return call.tensor().repeat(repeats)


@operator_of("Concat")
def _concat(call: NodeCall) -> Value:
    axis = call.attr("axis", 0)
    known = [value for value in call.values if isinstance(value, Known)]
    if len(known) == len(call.values) and all(value.weight is None or value.numbers.size == 1 for value in known):
        return _with(known[0], np.concatenate([value.numbers for value in known], axis))
    return torch.cat(call.tensors(), axis)


@operator_of("Split")
def _split(call: NodeCall) -> Value | tuple[Value | None, ...]:
    axis, parts, count = call.attr("axis", 0), call.sizes("split", 1), len(call.node.outputs)
    value = call.value(0)
    if isinstance(value, Known) and _is_small(value):
        ends = np.cumsum(parts)[:-1] if parts is not None else count
        return tuple(_with(value, part) for part in np.array_split(value.numbers, ends, axis))
    x = call.tensor()
    if parts is None:
        size = -(-x.shape[axis] // count)
        parts = [size] * (count - 1)
        parts.append(x.shape[axis] - size * (count - 1))
    found: tuple[Tensor, ...] = torch.split(x, parts, axis)
    return found


@operator_of("Slice")
def _slice(call: NodeCall) -> Value:
    value = call.value(0)
    starts, ends = call.sizes("starts", 1) or [], call.sizes("ends", 2) or []
    axes = call.sizes("axes", 3) or list(range(len(starts)))
    steps = call.sizes("steps", 4) or [1] * len(starts)
    if isinstance(value, Known) and _is_small(value) and _plain([*starts, *ends]):
        index = [slice(None)] * value.numbers.ndim
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
            index[axis] = slice(start, end, step)
        return _with(value, value.numbers[tuple(index)])
    x = call.tensor()
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _sliced(call, x, axis % x.dim(), start, end, step)
    return x


def _sliced(call: NodeCall, x: Tensor, axis: int, start: Any, end: Any, step: int) -> Tensor:
    if step > 0:
        if isinstance(end, int) and end >= _NO_LIMIT:
            end = None
        return x[(*[slice(None)] * axis, slice(start, end, step))]
    if isinstance(x.shape[axis], int) and _plain((start, end)):
        chosen = range(*slice(start, end, step).indices(x.shape[axis]))
        return x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64))
    call.require(start in (-1,) or start >= _NO_LIMIT, "a negative step from a place other than the end")
    call.require(isinstance(end, int) and end < -_NO_LIMIT, "a negative step to a place other than the beginning")
    return x.flip(axis)[(*[slice(None)] * axis, slice(None, None, -step))]


@operator_of("Gather")
def _gather(call: NodeCall) -> Value:
    data, indices, axis = call.value(0), call.value(1), call.attr("axis", 0)
    if isinstance(data, Known) and isinstance(indices, Known) and _is_small(data) and indices.is_concrete:
        return _with(data, np.take(data.numbers, indices.numbers.astype(np.int64), axis))
    x = call.tensor()
    number = indices.number if isinstance(indices, Known) else None
    if number is not None and isinstance(indices, Known) and indices.numbers.ndim == 0:
        return x.select(axis, int(number))
    index = call.tensor(1)
    if axis == 0 and x.dim() == 2 and call.constant[0]:
        return F.embedding(index, x)  # of a table: its rows are not counted from its end
    if not isinstance(indices, Known) or min(indices.list) < 0:
        index = torch.where(index < 0, index + x.shape[axis], index)
    where: tuple[Any, ...] = (*[slice(None)] * (axis % x.dim()), index.long())
    return x[where]


@operator_of(PAIRS)
def _gather_pairs(call: NodeCall) -> Value:
    x = call.tensor(0)
    return (x.flatten(2) if x.dim() > 2 else x[..., None])[call.tensor(1), call.tensor(2)]


@operator_of("GatherElements")
def _gather_elements(call: NodeCall) -> Value:
    x, axis = call.tensor(0), call.attr("axis", 0)
    return torch.gather(x, axis, torch.where(call.tensor(1) < 0, call.tensor(1) + x.shape[axis], call.tensor(1)))


def _at(x: Tensor, indices: Tensor, first: int) -> tuple[Any, ...]:
    """Return an index of `x` for the last dimension of `indices`, a tuple each, from a dimension on."""
    parts = indices.unbind(-1)
    return tuple(torch.where(part < 0, part + x.shape[first + i], part) for i, part in enumerate(parts))


@operator_of("GatherND")
def _gather_nd(call: NodeCall) -> Value:
    x, indices, batch = call.tensor(0), call.tensor(1), call.attr("batch_dims", 0)
    grids = []
    for dim in range(batch):
        rows = torch.arange(x.shape[dim]).reshape([-1 if i == dim else 1 for i in range(indices.dim() - 1)])
        grids.append(rows)
    return x[(*grids, *_at(x, indices, batch))]


_SCATTERED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator_of("ScatterElements")
def _scatter_elements(call: NodeCall) -> Value:
    x, index, updates = call.tensor(0), call.tensor(1), call.tensor(2)
    axis, reduction = call.attr("axis", 0), call.attr("reduction", "none")
    index = torch.where(index < 0, index + x.shape[axis], index)
    if reduction == "none":
        return x.scatter(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _SCATTERED[reduction])


@operator_of("ScatterND")
def _scatter_nd(call: NodeCall) -> Value:
    x, updates, reduction = call.tensor(0), call.tensor(2), call.attr("reduction", "none")
    call.require(reduction in ("none", "add"), f"reduction={reduction}")
    return x.index_put(_at(x, call.tensor(1), 0), updates, accumulate=reduction == "add")


@operator_of("OneHot")
def _one_hot(call: NodeCall) -> Value:
    index, axis = call.tensor(0).long(), call.attr("axis", -1)
    depth, values = int(call.number("depth", 1, 0)), call.tensor(2)
    index = torch.where(index < 0, index + depth, index).unsqueeze(axis)
    classes = torch.arange(depth).reshape([-1, *[1] * (index.dim() - 1 - axis % index.dim())])
    return torch.where(index == classes, values[1], values[0])


_PADDING = {"constant": "constant", "edge": "replicate", "reflect": "reflect", "wrap": "circular"}


@operator_of("Pad")
def _pad(call: NodeCall) -> Value:
    x, pads, mode = call.tensor(), call.sizes("pads", 1) or [], call.attr("mode", "constant")
    axes = [axis % x.dim() for axis in call.sizes("axes", 3) or range(x.dim())]
    both = {axis: (pads[i], pads[i + len(axes)]) for i, axis in enumerate(axes)}
    if mode != "constant":
        return _padded_otherwise(x, both, mode)
    padding = [amount for axis in reversed(range(x.dim())) for amount in both.get(axis, (0, 0))]
    return F.pad(x, padding, value=call.number("value", 2, 0))


def _padded_otherwise(x: Tensor, both: dict[int, tuple[Any, Any]], mode: str) -> Tensor:
    """Pad with a tensor's own values, one dimension after the other, as the last of three."""
    for axis, (before, after) in both.items():
        if not (isinstance(before, int) and isinstance(after, int) and before == after == 0):
            moved = x.movedim(axis, -1)
            rows = moved.reshape(1, -1, moved.shape[-1])
            padded = F.pad(rows, (before, after), mode=_PADDING[mode])
            x = padded.reshape(*moved.shape[:-1], padded.shape[-1]).movedim(-1, axis)
    return x


@operator_of("DepthToSpace")
def _depth_to_space(call: NodeCall) -> Value:
    x, size = call.tensor(), call.attr("blocksize")
    if call.attr("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, size)
    rows, channels, height, width = x.shape
    parts = x.reshape(rows, size, size, channels // size**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(rows, channels // size**2, height * size, width * size)


@operator_of("SpaceToDepth")
def _space_to_depth(call: NodeCall) -> Value:
    x, size = call.tensor(), call.attr("blocksize")
    rows, channels, height, width = x.shape
    parts = x.reshape(rows, channels, height // size, size, width // size, size).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(rows, channels * size**2, height // size, width // size)


@operator_of("Trilu")
def _trilu(call: NodeCall) -> Value:
    function: Callable[[Tensor, int], Tensor] = torch.triu if call.attr("upper", 1) else torch.tril
    return function(call.tensor(), int(call.number("k", 1, 0)))
