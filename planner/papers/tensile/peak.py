"""When the most memory is in use, and by which tensors.

TENSILE, section IV-B, algorithm 1: the footprint changes when an iteration begins, a tensor is generated, a swap-in,
a swap-out (but no earlier than the access before it ends), and a release. The paper counts a swap-in at its end; here
it counts from its start, because the bytes that are copied to are taken by then. Scratch counts while its op runs.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.papers.tensile.job import Axis, OpRun, Track


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most bytes are in memory. All jobs are on one time axis."""

    nbytes: int
    tensors: tuple[tuple[int, int], ...]
    """(job, tensor) of what is in memory then, largest first."""
    last_access: tuple[OpRun | None, ...]
    """Of each job, the last op that read something and had ended."""
    time_ns: int


class MemoryUsage:
    """The memory in use over time: for every tensor of every job, when it is there. Outside of its iteration, a job
    has no memory."""

    def __init__(self, axes: Sequence[Axis]) -> None:
        self._axes = axes
        self.rebuild()

    def rebuild(self) -> None:
        """Count everything again: ops were added, and times have shifted."""
        self._slot: dict[tuple[int, int], int] = {}
        self._owner: list[tuple[int, int] | None] = []
        for j, axis in enumerate(self._axes):
            for track in axis.tracks.values():
                self._slot[j, track.tensor] = len(self._owner)
                self._owner += [(j, track.tensor)] * (len(track.gaps) + len(track.extra) + 1)
        scratch = [(run.start_ns, run.end_ns, axis.scratch_bytes(run)) for axis in self._axes for run in axis.runs]
        tensors = len(self._owner)
        self._owner += [None] * len(scratch)
        self._first = np.zeros(len(self._owner), dtype=np.int64)
        self._end = np.zeros(len(self._owner), dtype=np.int64)
        self._nbytes = np.zeros(len(self._owner), dtype=np.int64)
        if scratch:
            self._first[tensors:], self._end[tensors:], self._nbytes[tensors:] = np.array(scratch, dtype=np.int64).T
        for j, axis in enumerate(self._axes):
            for track in axis.tracks.values():
                self.update(j, track)

    def update(self, job: int, track: Track) -> None:
        """Count a tensor again, whose gaps have changed."""
        slot = self._slot[job, track.tensor]
        slots = slice(slot, slot + len(track.gaps) + len(track.extra) + 1)
        stays = list(self._axes[job].stays(track))
        self._first[slots] = self._end[slots] = 0
        self._first[slot : slot + len(stays)] = [s.start_ns for s in stays]
        self._end[slot : slot + len(stays)] = [s.end_ns for s in stays]
        self._nbytes[slots] = track.nbytes

    def held_bytes(self, time_ns: int) -> int:
        """Bytes in memory at a moment."""
        return int(self._nbytes[(self._first <= time_ns) & (time_ns < self._end)].sum())

    def held_through(self, time_ns: int) -> int:
        """Bytes that are in memory before and after a moment: what is released or brought then does not count."""
        return int(self._nbytes[(self._first < time_ns) & (time_ns < self._end)].sum())

    def peak(self) -> Peak:
        moments = np.concatenate((2 * self._end, 2 * self._first + 1))  # at one time, releases come first
        order = np.argsort(moments, kind="stable")
        held = np.cumsum(np.concatenate((-self._nbytes, self._nbytes))[order])
        if not len(held):
            return Peak(0, (), tuple(None for _ in self._axes), 0)
        at = int(held.argmax())
        time_ns = int(moments[order[at]]) // 2
        present = np.flatnonzero((self._first <= time_ns) & (time_ns < self._end))
        present = present[np.lexsort((present, -self._nbytes[present]))]
        owners = (self._owner[i] for i in present.tolist())
        return Peak(
            nbytes=int(held[at]),
            tensors=tuple(owner for owner in owners if owner is not None),
            last_access=tuple(_last_access(axis, time_ns) for axis in self._axes),
            time_ns=time_ns,
        )


def _last_access(axis: Axis, time_ns: int) -> OpRun | None:
    ended = bisect_right(axis.runs, time_ns, key=lambda run: run.end_ns)
    return next((run for run in reversed(axis.runs[:ended]) if axis.graph.ops[run.op].reads), None)
