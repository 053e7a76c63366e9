"""Finds input values that index a weight, and their valid ranges.

A CPU's kernels raise IndexError for an index out of range. CUDA's kernels fail an assertion, which loses the device and
every model on it, or compare only the lower 32 bits and read another row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.model import TABLE_OPS
from cohabit.runtime.lowering.slots import Slot
from cohabit.runtime.lowering.trace import Instruction

aten = torch.ops.aten

_SAME_SHAPE = frozenset({aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default})
_SAME_VALUES = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
        *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.expand.default),
        *(aten.permute.default, aten.transpose.int, aten.t.default),
    }
)
"""Operators whose result has exactly the values of their first argument, perhaps in another shape."""
_CASTS = frozenset({aten._to_copy.default, aten.to.dtype})
_PARTS = frozenset({aten.select.int, aten.slice.Tensor})


@dataclass(frozen=True, slots=True)
class IndexedValues:
    """Values of one input that index a weight, and their valid range."""

    input: int
    calls: tuple[Instruction, ...]
    """Casts, and selections of parts of the input, that lead to the values."""
    least: int
    most: int

    @property
    def are_all(self) -> bool:
        """Whether every value of the input is an index."""
        return all(call.target in _CASTS for call in self.calls)

    def out_of_range(self, given: torch.Tensor) -> int | None:
        """Return a value of the input that is out of range; None if there is none."""
        values = given
        for call in self.calls:
            values = call.target(values, *call.args[1:], **call.kwargs)
        if not values.numel():
            return None
        least, most = (int(bound) for bound in torch.aminmax(values))
        return least if least < self.least else most if most > self.most else None


@dataclass(frozen=True, slots=True)
class _Origin:
    """The input that a value comes from, and the calls in between."""

    input: int
    calls: tuple[Instruction, ...] = ()
    is_reshaped: bool = False


def indexed_values(lowered: Lowered, bucket: Bucket) -> tuple[IndexedValues, ...]:
    """Return the input values that index weights directly, without indices that the program computes."""
    trace = lowered.traces[bucket]
    shapes = {piece.name: piece.shape for segment in lowered.manifest.segments for piece in segment.pieces}
    shapes |= {table.name: table.shape for table in lowered.manifest.tables}
    changed = {storage.index for op in trace.ops for storage in op.mutates if storage.kind == "input"}
    origins = {slot: _Origin(n) for n, slot in enumerate(trace.input_slots) if n not in changed}
    found: list[IndexedValues] = []
    for call in trace.instructions:
        first = call.args[0] if call.args else None
        name = trace.weight_slots.get(first.index) if isinstance(first, Slot) else first
        if isinstance(name, str) and name in shapes:
            for indices, least, most in _ranges(call, shapes[name]):
                origin = origins.get(indices.index) if isinstance(indices, Slot) else None
                if origin is not None:
                    found.append(IndexedValues(origin.input, origin.calls, least, most))
        elif isinstance(first, Slot) and first.index in origins:
            after = _after(call, origins[first.index])
            if after is not None:
                origins[call.out] = after
    return tuple(values for n, values in enumerate(found) if values not in found[:n])


def _ranges(call: Instruction, shape: Sequence[int]) -> Iterator[tuple[Any, int, int]]:
    """Yield the indices by which a call reads a weight of this shape, with their smallest and largest valid values."""
    if call.target in TABLE_OPS:
        yield call.args[1], 0, shape[0] - 1
    elif call.target in (aten.index_select.default, aten.gather.default):
        yield call.args[2], 0, shape[call.args[1]] - 1
    elif call.target is aten.index.Tensor:
        found = zip(call.args[1], shape, strict=False)
        yield from ((indices, -size, size - 1) for indices, size in found if indices is not None)


def _after(call: Instruction, origin: _Origin) -> _Origin | None:
    """Return the origin of a call's result, given that of its first argument; None if it is not tracked."""
    if call.target in _SAME_SHAPE:
        return origin
    if call.target in _SAME_VALUES:
        return _Origin(origin.input, origin.calls, is_reshaped=True)
    is_part = call.target in _PARTS and not origin.is_reshaped
    if (is_part or call.target in _CASTS) and len(call.reads) == 1:
        return _Origin(origin.input, (*origin.calls, call), origin.is_reshaped)
    return None
