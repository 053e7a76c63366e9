"""The peak of memory use: its time and its tensors.

TENSILE, section IV-B, algorithm 1: memory use changes when an iteration begins, when a tensor is generated, at a
swap-in, at a swap-out (but no earlier than the preceding access ends), and at a release. The paper counts a swap-in at
its end; here it counts from its start, because its destination is occupied by then. Scratch counts while its op runs.
"""

from dataclasses import dataclass

import numpy as np

from cohabit.planner.papers.tensile.axis import Axis, TensorAccesses


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most bytes are in memory."""

    nbytes: int
    tensors: tuple[int, ...]
    """Tensors in memory then, largest first."""
    time_ns: int


class MemoryUsage:
    """Memory in use over time: the spans in which each tensor is in memory."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self.rebuild()

    def rebuild(self) -> None:
        """Count everything again after ops were added and times have shifted."""
        self._slot: dict[int, int] = {}
        owner: list[int] = []
        for track in self._axis.tracks.values():
            self._slot[track.tensor] = len(owner)
            owner += [track.tensor] * (len(track.gaps) + len(track.extra) + 1)
        scratch = [(run.start_ns, run.end_ns, self._axis.scratch_bytes(run)) for run in self._axis.runs]
        tensors = len(owner)
        self._owner = np.array([*owner, *([-1] * len(scratch))], np.int64)
        self._first, self._end, self._nbytes = np.zeros((3, len(self._owner)), np.int64)
        if scratch:
            self._first[tensors:], self._end[tensors:], self._nbytes[tensors:] = np.array(scratch, np.int64).T
        for track in self._axis.tracks.values():
            self.update(track)

    def update(self, track: TensorAccesses) -> None:
        """Count a tensor again after its gaps have changed."""
        slot = self._slot[track.tensor]
        slots = slice(slot, slot + len(track.gaps) + len(track.extra) + 1)
        stays = list(self._axis.stays(track))
        self._first[slots] = self._end[slots] = 0
        self._first[slot : slot + len(stays)] = [s.start_ns for s in stays]
        self._end[slot : slot + len(stays)] = [s.end_ns for s in stays]
        self._nbytes[slots] = track.nbytes

    def held_through(self, time_ns: int) -> int:
        """Return the bytes in memory both before and after a moment, without those released or brought in then."""
        return int(self._nbytes[(self._first < time_ns) & (time_ns < self._end)].sum())

    def peak(self) -> Peak:
        moments = np.concatenate((2 * self._end, 2 * self._first + 1))  # at equal times, releases come first
        order = np.argsort(moments, kind="stable")
        held = np.cumsum(np.concatenate((-self._nbytes, self._nbytes))[order])
        if not len(held):
            return Peak(0, (), 0)
        at = int(held.argmax())
        time_ns = int(moments[order[at]]) // 2
        present = np.flatnonzero((self._first <= time_ns) & (time_ns < self._end) & (self._owner >= 0))
        largest_first = present[np.argsort(-self._nbytes[present], kind="stable")]
        return Peak(int(held[at]), tuple(self._owner[largest_first].tolist()), time_ns)
