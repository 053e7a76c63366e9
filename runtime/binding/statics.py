"""Values that depend on addresses only: parameters, and views of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cohabit.runtime.binding.calls import CallTemplate, static_value, template_of, weight_at
from cohabit.runtime.lowering.slots import slots_of
from cohabit.runtime.lowering.trace import Trace
from cohabit.runtime.lowering.weights import Manifest, Piece
from cohabit.runtime.memory import DeviceArena


@dataclass(frozen=True, slots=True)
class Statics:
    """The static slots of a trace."""

    pieces: Mapping[int, Piece]
    """Parameters, by slot."""
    views: Mapping[int, CallTemplate]
    """Views of static slots, by slot."""
    segments: Mapping[int, tuple[int, ...]]
    """By slot: the segments that its value depends on. A parameter's slot has one."""

    @staticmethod
    def of(trace: Trace, manifest: Manifest, device: torch.device) -> "Statics":
        known = {p.name: (n, p) for n, s in enumerate(manifest.segments) for p in s.pieces}
        pieces = {slot: known[name][1] for slot, name in trace.weight_slots.items()}
        segments: dict[int, tuple[int, ...]] = {
            slot: (known[name][0],) for slot, name in trace.weight_slots.items()
        }
        views: dict[int, CallTemplate] = {}
        for i in trace.instructions:
            if i.op is None and i.reads and all(slot in segments for slot in i.reads):
                views[i.out] = template_of(i, device)
                segments[i.out] = tuple(sorted({s for slot in i.reads for s in segments[slot]}))
        return Statics(pieces, views, segments)


class StaticValues:
    """Tensors of static slots at their segments' addresses. Keeps the last value of each slot."""

    def __init__(self, statics: Statics, arena: DeviceArena[Any]) -> None:
        self._statics = statics
        self._arena = arena
        self._last: dict[int, tuple[tuple[int, ...], Any]] = {}

    def at(self, slot: int, offsets: Mapping[int, int]) -> Any:
        """Return a slot's value, given the offset of each segment in the arena. Raises MemoryExceeded."""
        own = tuple(offsets[segment] for segment in self._statics.segments[slot])
        last = self._last.get(slot)
        if last is not None and last[0] == own:
            return last[1]
        if slot in self._statics.pieces:
            value: Any = weight_at(self._arena, own[0], self._statics.pieces[slot])
        else:
            view = self._statics.views[slot]
            reads = slots_of((view.args, view.kwargs))
            value = static_value(view, {read: self.at(read, offsets) for read in reads})
        self._last[slot] = (own, value)
        return value
