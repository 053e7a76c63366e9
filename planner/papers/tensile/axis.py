"""The time axis of one iteration: runs of ops, accesses to tensors, the gaps in between, and transfers on the link.

TENSILE, section III: a workload is the sequence of tensor accesses in the order of the ops, each as long as its op.
Times are whole nanoseconds, so that an end and a start at the same time compare as equal.
"""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from cohabit.planner.graph import Graph, TensorKind
from cohabit.planner.profile import Link, Profile

NS_PER_S: Final = 10**9


class TransferSpan(NamedTuple):
    """Nanoseconds [start, end). An empty span is a transfer that computation waits for; it is not on the time axis."""

    start_ns: int
    end_ns: int


class Channel:
    """The link over time: transfers in order of time, and free spans for others.

    TENSILE, section IV-C: a transfer occupies the channel exclusively, so one tensor is swapped at a time.
    """

    def __init__(self, spans: Iterable[TransferSpan] = ()) -> None:
        self._spans = sorted(spans)

    def take(self, span: TransferSpan) -> None:
        if span.start_ns < span.end_ns:
            insort(self._spans, span)

    def release(self, span: TransferSpan) -> None:
        if span.start_ns < span.end_ns:
            del self._spans[bisect_left(self._spans, span)]

    def earliest(
        self, work_ns: int, low_ns: int, high_ns: int, avoid: Sequence[TransferSpan] = ()
    ) -> TransferSpan | None:
        """Return the earliest free span of this length in [low, high) that overlaps nothing in `avoid`.

        Spans of `avoid` are sorted and do not overlap.
        """
        start, first = low_ns, max(bisect_right(self._spans, (low_ns, 0)) - 1, 0)
        for taken in heapq.merge(avoid, self._spans[first:], key=lambda span: span.start_ns):
            if start + work_ns > high_ns or taken.start_ns >= start + work_ns:
                break
            start = max(start, taken.end_ns)
        return TransferSpan(start, start + work_ns) if start + work_ns <= high_ns else None

    def latest(self, work_ns: int, low_ns: int, high_ns: int) -> TransferSpan | None:
        """Return the latest free span of this length in [low, high)."""
        end = high_ns
        for i in range(bisect_right(self._spans, (high_ns, 0)) - 1, -1, -1):
            taken = self._spans[i]
            if end - work_ns < low_ns or taken.end_ns <= end - work_ns:
                break
            end = min(end, taken.start_ns)
        return TransferSpan(end - work_ns, end) if end - work_ns >= low_ns else None


@dataclass(eq=False, slots=True)
class OpRun:
    """One execution of an op: an access to every tensor that the op reads or writes."""

    op: int
    start_ns: int
    end_ns: int
    again: bool = False
    """Whether this is a recomputation."""


@dataclass(eq=False, slots=True)
class AccessGap:
    """Time between two accesses of a tensor, during which it may be absent.

    An input's first gap begins with its arrival. A weight's last gap spans the iteration's end, from its last access
    to its first in the next iteration; the weight returns before that access, or before this iteration ends.
    """

    before: OpRun | None
    after: OpRun
    across: bool
    version: int
    """Number of times that the tensor was written or changed before."""
    back: TransferSpan | None = None
    """The swap-in that ends the absence."""
    rerun: OpRun | None = None
    """The recomputation that ends the absence."""

    @property
    def kept(self) -> bool:
        return self.back is None and self.rerun is None

    @property
    def early(self) -> bool:
        """Whether a gap across the iteration's end is over before that end."""
        return self.across and self.back is not None and self.back.start_ns >= self.after.end_ns

    @property
    def returns_ns(self) -> int:
        """Time at which the absence ends."""
        if self.back is not None:
            return self.back.start_ns
        assert self.rerun is not None
        return self.rerun.start_ns


@dataclass(eq=False, slots=True)
class TensorAccesses:
    """One tensor: its accesses in order of time, and its gaps."""

    tensor: int
    nbytes: int
    kind: TensorKind
    stays: bool
    """Whether it must be in memory at the end of the iteration."""
    accesses: list[OpRun] = field(default_factory=list)
    changes: list[OpRun] = field(default_factory=list)
    """Accesses that write it or change it in place."""
    gaps: list[AccessGap] = field(default_factory=list)
    outs: dict[int, TransferSpan] = field(default_factory=dict)
    """Swap-outs by version."""
    extra: list[OpRun] = field(default_factory=list)
    """Recomputations that write it although no later op reads it."""

    @property
    def is_weight(self) -> bool:
        return self.kind in ("parameter", "state")

    @property
    def resident(self) -> bool:
        """Whether it is in memory from one iteration to the next."""
        return self.is_weight and bool(self.gaps) and (self.gaps[-1].kept or self.gaps[-1].early)

    @property
    def released(self) -> bool:
        """Whether it is ever absent between two accesses."""
        return not all(gap.kept for gap in self.gaps)

    def needs_out(self, gap: AccessGap) -> bool:
        """Whether the tensor must be swapped out for this gap, because the host store has no current copy.

        A parameter always has a copy, state until it is changed; resident state was changed in earlier iterations.
        """
        if self.kind == "parameter":
            return False
        return gap.version > 0 or self.kind != "state" or (self.resident and not gap.across)

    def find_gaps(self) -> None:
        """Divide the time between accesses into gaps, and reset all choices."""
        self.gaps = []
        changes = 0
        before: OpRun | None = None
        for run in self.accesses:
            if before is not None or self.kind == "input":
                self.gaps.append(AccessGap(before, run, False, changes))
            changes += run in self.changes
            before = run
        if self.is_weight and self.accesses:
            self.gaps.append(AccessGap(before, self.accesses[0], True, changes))


class Axis:
    """One iteration, from time 0 on. The inputs arrive in the nanosecond before the first op."""

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.graph = graph
        self.profile = profile
        self.changed = frozenset(t for op in graph.ops for t in op.mutates)
        """Tensors that some op changes in place."""
        self.runs = list(_back_to_back(profile.op_seconds))
        self.tracks = {t: self._track(t) for t in range(len(self.graph.tensors))}
        last = len(self.runs) - 1
        for k, (op, run) in enumerate(zip(self.graph.ops, self.runs, strict=True)):
            at_end = self.graph.outputs if k == last else ()
            for t in dict.fromkeys((*op.reads, *op.writes, *at_end)):
                self.tracks[t].accesses.append(run)
            for t in (*op.writes, *op.mutates):
                self.tracks[t].changes.append(run)
        for track in self.tracks.values():
            track.find_gaps()

    @property
    def end_ns(self) -> int:
        return self.runs[-1].end_ns if self.runs else 0

    def may_swap_one_more(self, most_swapped: float) -> bool:
        """Whether one more swapped tensor stays within the maximum swapping rate, a fraction of the accessed
        tensors."""
        swapped = sum(any(g.back is not None for g in t.gaps) for t in self.tracks.values())
        return swapped + 1 <= most_swapped * sum(bool(t.accesses) for t in self.tracks.values())

    def scratch_bytes(self, run: OpRun) -> int:
        return self.graph.ops[run.op].aligned_scratch_bytes

    def in_ns(self, track: TensorAccesses) -> int:
        tensor = self.graph.tensors[track.tensor]
        return _transfer_ns(self.profile.link_of(tensor), tensor.nbytes)

    def out_ns(self, track: TensorAccesses) -> int:
        return _transfer_ns(self.profile.swap_out, self.graph.tensors[track.tensor].nbytes)

    def end_of(self, run: OpRun | None) -> int:
        """Return the end of an access; 0, the arrival, for None."""
        return 0 if run is None else run.end_ns

    def spans(self) -> Iterator[TransferSpan]:
        """Yield all transfers."""
        for track in self.tracks.values():
            yield from track.outs.values()
            yield from (gap.back for gap in track.gaps if gap.back is not None)

    def insert(self, op: int, before: OpRun) -> OpRun:
        """Rerun an op right before a run. Runs and transfers that start with that run or later are delayed."""
        at_ns, added_ns = before.start_ns, _op_ns(self.profile.op_seconds[op])
        again = OpRun(op, at_ns, at_ns + added_ns, again=True)
        for run in self.runs:
            if run.start_ns >= at_ns:
                run.start_ns, run.end_ns = run.start_ns + added_ns, run.end_ns + added_ns
        for track in self.tracks.values():
            track.outs = {v: _put_off(span, at_ns, added_ns) for v, span in track.outs.items()}
            for gap in track.gaps:
                gap.back = None if gap.back is None else _put_off(gap.back, at_ns, added_ns)
        insort(self.runs, again, key=lambda r: r.start_ns)
        return again

    def gone_ns(self, track: TensorAccesses, gap: AccessGap) -> int:
        """Return the time at which the tensor has left, in a gap with a swap or a recomputation."""
        gone = self.end_of(gap.before)
        return max(gone, track.outs[gap.version].end_ns) if track.needs_out(gap) and gap.rerun is None else gone

    def stays(self, track: TensorAccesses) -> Iterator[TransferSpan]:
        """Yield the spans in which the tensor is in memory."""
        yield from (TransferSpan(run.start_ns, run.end_ns) for run in track.extra)
        if not track.accesses:
            if track.kind == "input":
                yield TransferSpan(-1, self.end_ns if track.stays else 0)
            return
        since, until = track.accesses[0].start_ns, track.accesses[-1].end_ns
        if track.kind == "input" or track.is_weight:
            since = -1
        if track.stays or track.is_weight:
            until = self.end_ns
        if track.is_weight and not track.resident:
            since, until = track.gaps[-1].returns_ns, self.gone_ns(track, track.gaps[-1])
        for gap in track.gaps:
            if not gap.kept and (not gap.across or gap.early):
                yield TransferSpan(since, self.gone_ns(track, gap))
                since = gap.returns_ns
        yield TransferSpan(since, until)

    def _track(self, t: int) -> TensorAccesses:
        tensor = self.graph.tensors[t]
        stays = t in self.graph.outputs and tensor.kind != "parameter"
        return TensorAccesses(t, tensor.aligned_bytes, tensor.kind, stays)


def _back_to_back(op_seconds: Sequence[float]) -> Iterator[OpRun]:
    start_ns = 0
    for k, op_s in enumerate(op_seconds):
        yield OpRun(k, start_ns, start_ns + _op_ns(op_s))
        start_ns += _op_ns(op_s)


def _op_ns(op_s: float) -> int:
    return max(round(op_s * NS_PER_S), 1)


def _transfer_ns(link: Link, nbytes: int) -> int:
    return max(math.ceil(link.seconds(nbytes) * NS_PER_S), 1)


def _put_off(span: TransferSpan, at_ns: int, added_ns: int) -> TransferSpan:
    return TransferSpan(span.start_ns + added_ns, span.end_ns + added_ns) if span.start_ns >= at_ns else span
