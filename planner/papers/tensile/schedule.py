"""TENSILE's scheduling: swaps, then recomputations, until the iteration fits in memory or neither helps any more.

Sections of the paper, with its gaps and contradictions:

- Algorithm 3 (section IV-F) continues until nothing can be swapped; here it stops once the memory suffices. Tensors are
  released after their last access throughout.
- Algorithm 2 (IV-C) swaps the largest tensor at the peak that can be swapped without delay. A swap-out starts as early
  as possible, but not before the tensor is generated, and has ended at the peak. A swap-in starts as late as possible
  after the peak and has ended when the next access begins; a weight for the first ops of an iteration may return at
  the end of the previous iteration. Transfers overlap neither accesses to their tensor nor each other. The tensor must
  be absent at the peak, so only the gap around the peak counts (lines 32-33). The maximum swapping rate is a fraction
  of the tensors, as in line 30; the paper's text, taken literally, would forbid a second swap.
- Recomputation (IV-D) takes the tensor that saves the most memory per second (MSPS, equation 4). A tensor is recomputed
  only if it and the inputs of its op have no other swap or recomputation, so that no swap is disrupted.
- If scheduling does not suffice, "the Executor will pause the computation and swap the tensors" (III-D). The paper
  does not say which tensors leave; here, the largest at the peak (`press_out`). The pause is not on the time axis.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from cohabit.planner.graph import Graph
from cohabit.planner.papers.tensile.axis import AccessGap, Axis, Channel, TensorAccesses, TransferSpan
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.gaps import START, Choice, Gaps
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Action

PATIENCE: Final = 100
"""Number of iterations before scheduling may stop because it saves too little."""
LEAST_GAIN: Final = 0.0005
"""After PATIENCE iterations, fraction of the peak that the last three must have saved, or scheduling stops."""
_ORDER: Final = (SWAP_OUT, DROP, SWAP_IN, COMPUTE)
"""Order of actions at the same time."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The first moment at which the most bytes are in memory."""

    nbytes: int
    tensors: tuple[int, ...]
    """Tensors in memory then, largest first."""
    time_ns: int


class MemoryUsage:
    """Memory in use over time: the spans in which each tensor is in memory.

    TENSILE, section IV-B, algorithm 1: memory use changes when an iteration begins, when a tensor is generated, at a
    swap-in, at a swap-out (but no earlier than the preceding access ends), and at a release. The paper counts a swap-in
    at its end; here it counts from its start, because its destination is occupied by then. Scratch counts while its op
    runs.
    """

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


class TensileSchedule:
    """One iteration with its transfers. The link has one channel for both directions."""

    def __init__(self, graph: Graph, profile: Profile, most_swapped: float = 1.0) -> None:
        """`most_swapped` is the maximum swapping rate: a fraction of the tensors."""
        self.axis = Axis(graph, profile)
        self.usage = MemoryUsage(self.axis)
        self._most_swapped = most_swapped
        self._channel = Channel()
        self._refused: set[tuple[int, int]] = set()
        """(tensor, time of a peak) of swaps that did not fit on the link, and will not fit later."""

    def lower(self, memory_bytes: int = 0) -> None:
        """Lower the peak to `memory_bytes`, or as far as possible."""
        swapping, peaks = True, list[int]()
        while True:
            peak = self.usage.peak()
            peaks.append(peak.nbytes)
            stuck = len(peaks) > PATIENCE and peaks[-4] - peaks[-1] < LEAST_GAIN * peaks[-4]
            if peak.nbytes <= memory_bytes or stuck:
                return
            if swapping:
                swapping = self._swap_largest(peak)
            elif not self._recompute_best(peak):
                return

    def press_out(self, memory_bytes: int) -> None:
        """Swap out, with pauses, tensors not in use at the peak, until all fit or no more can leave."""
        while (peak := self.usage.peak()).nbytes > memory_bytes:
            excess = peak.nbytes - memory_bytes
            for tensor in peak.tensors:
                track = self.axis.tracks[tensor]
                gap = self._gap_around(track, peak.time_ns)
                if gap is None or gap.rerun is not None or not track.nbytes or excess <= 0:
                    continue
                self._swap_with_pause(track, gap)
                self.usage.update(track)
                excess -= track.nbytes
            if excess == peak.nbytes - memory_bytes:
                return

    def _gap_around(self, track: TensorAccesses, time_ns: int) -> AccessGap | None:
        """Return the gap around a moment, if the tensor may leave in it; else None."""
        for gap in track.gaps:
            after, before = time_ns < gap.after.start_ns, time_ns >= self.axis.end_of(gap.before)
            if (before or after if gap.across else before and after) and not (gap.across and track.stays):
                return gap
        return None

    def _put(self, track: TensorAccesses, gap: AccessGap, out: TransferSpan | None, back: TransferSpan) -> None:
        """End a gap with a swap-in, and add the swap-out `out`, if any."""
        if out is not None:
            track.outs[gap.version] = out
            self._channel.take(out)
        gap.back = back
        self._channel.take(back)
        # A state that is not resident starts on the host: version 0 needs no swap-out.
        if track.kind == "state" and not track.resident and 0 in track.outs:
            self._channel.release(track.outs.pop(0))

    # Swaps: algorithm 2

    def _swap_largest(self, peak: Peak) -> bool:
        """Swap one tensor so that it is absent at the peak; False if that is impossible."""
        full = not self.axis.may_swap_one_more(self._most_swapped)
        for tensor in peak.tensors:
            track = self.axis.tracks[tensor]
            if track.nbytes == 0 or (tensor, peak.time_ns) in self._refused:
                continue
            gap = self._gap_around(track, peak.time_ns)
            allowed = gap is not None and gap.kept and not (full and _counts(track, gap))
            if gap is not None and allowed and self._swap(track, gap, peak.time_ns):
                self._swap_rest(track)
                self.usage.update(track)
                return True
            self._refused.add((tensor, peak.time_ns))
        return False

    def _swap(self, track: TensorAccesses, gap: AccessGap, peak_ns: int) -> bool:
        axis = self.axis
        ahead = gap.across and peak_ns < gap.after.start_ns  # the peak comes before the first access
        out = None
        if track.needs_out(gap):
            gone_by_ns = axis.end_ns if ahead else peak_ns
            if gap.version in track.outs:
                if track.outs[gap.version].end_ns > gone_by_ns:
                    return False
            else:
                out = self._swap_out(track, gap, gone_by_ns)
                if out is None:
                    return False
                self._channel.take(out)
        low_ns = 0 if gap.across and not ahead else peak_ns + 1
        back = self._channel.latest(axis.in_ns(track), low_ns, gap.after.start_ns)
        if back is None and gap.across and not ahead and not (track.kind == "state" and gap.version == 0):
            back = self._channel.latest(axis.in_ns(track), peak_ns + 1, axis.end_ns)
        if out is not None:
            self._channel.release(out)
        if back is None:
            return False
        self._put(track, gap, out, back)
        return True

    def _swap_out(self, track: TensorAccesses, gap: AccessGap, gone_by_ns: int) -> TransferSpan | None:
        changed = track.changes[gap.version - 1] if gap.version else None
        accesses = [TransferSpan(r.start_ns, r.end_ns) for r in track.accesses]
        return self._channel.earliest(self.axis.out_ns(track), self.axis.end_of(changed), gone_by_ns, accesses)

    def _swap_rest(self, track: TensorAccesses) -> None:
        """Release the tensor in its other gaps too, in time order, wherever a swap-in fits on the link."""
        for gap in track.gaps:
            if gap.kept and not gap.across and (not track.needs_out(gap) or gap.version in track.outs):
                gone_ns = self.axis.gone_ns(track, gap)
                back = self._channel.latest(self.axis.in_ns(track), gone_ns + 1, gap.after.start_ns)
                if back is not None:
                    self._put(track, gap, None, back)

    def _swap_with_pause(self, track: TensorAccesses, gap: AccessGap) -> None:
        """Make the tensor leave right after the access before the gap, and return right before the access after it."""
        if gap.back is not None:
            self._channel.release(gap.back)
        gone_ns, back_ns = self.axis.end_of(gap.before), gap.after.start_ns
        out: TransferSpan | None = None
        if track.needs_out(gap) and (gap.version not in track.outs or track.outs[gap.version].end_ns > gone_ns):
            if gap.version in track.outs:
                self._channel.release(track.outs[gap.version])
            out = TransferSpan(gone_ns, gone_ns)
        self._put(track, gap, out, TransferSpan(back_ns, back_ns))

    # Recomputation: section IV-D

    def _recompute_best(self, peak: Peak) -> bool:
        """Recompute one of the tensors at the peak; False if that is impossible.

        The recomputation must need less memory than the peak.
        """
        found: list[tuple[float, TensorAccesses, AccessGap]] = []
        for tensor in peak.tensors:
            track = self.axis.tracks[tensor]
            gap = self._gap_around(track, peak.time_ns)
            if gap is not None and gap.kept and track.nbytes and self._repeatable(track, gap):
                op_s = self.axis.profile.op_seconds[track.changes[0].op]
                found.append((track.nbytes / op_s if op_s else float("inf"), track, gap))
        for _, track, gap in sorted(found, key=lambda f: -f[0]):
            if self._rerun_bytes(track, gap) < peak.nbytes:
                self._recompute(track, gap)
                return True
        return False

    def _repeatable(self, track: TensorAccesses, gap: AccessGap) -> bool:
        """Whether the tensor's op can run again right before the access after the gap."""
        axis = self.axis
        if track.kind != "activation" or track.released:
            return False
        op, at_ns = axis.graph.ops[track.changes[0].op], gap.after.start_ns
        if not axis.changed.isdisjoint(op.touched):
            return False
        others = (axis.tracks[t] for t in op.writes if t != track.tensor)
        return all(_is_there(axis.tracks[t], at_ns) for t in op.reads) and all(_is_gone(t, at_ns) for t in others)

    def _rerun_bytes(self, track: TensorAccesses, gap: AccessGap) -> int:
        run = track.changes[0]
        others = sum(self.axis.tracks[t].nbytes for t in self.axis.graph.ops[run.op].writes if t != track.tensor)
        return self.usage.held_through(gap.after.start_ns) + others + self.axis.scratch_bytes(run)

    def _recompute(self, track: TensorAccesses, gap: AccessGap) -> None:
        axis, op = self.axis, track.changes[0].op
        gap.rerun = axis.insert(op, gap.after)
        for t in axis.graph.ops[op].reads:
            axis.tracks[t].accesses = sorted([*axis.tracks[t].accesses, gap.rerun], key=lambda run: run.start_ns)
            axis.tracks[t].find_gaps()
        for t in axis.graph.ops[op].writes:
            if t != track.tensor:
                axis.tracks[t].extra.append(gap.rerun)
        self.usage.rebuild()
        self._channel = Channel(axis.spans())
        self._refused.clear()


def _counts(track: TensorAccesses, gap: AccessGap) -> bool:
    """Whether the swap counts towards the maximum rate; updates by the optimizing phase do not (lines 26-27)."""
    return not (gap.across and gap.version > 0) and all(g.back is None for g in track.gaps)


def _is_there(track: TensorAccesses, at_ns: int) -> bool:
    return not track.released and (track.is_weight or track.stays or track.accesses[-1].start_ns >= at_ns)


def _is_gone(track: TensorAccesses, at_ns: int) -> bool:
    return not track.stays and track.accesses[-1].end_ns <= at_ns


def actions_of(axis: Axis) -> tuple[list[Action], frozenset[int]]:
    """Return one iteration's actions in time order, and the weights resident before and after it.

    A swap-in is issued after the op that precedes its start. A drop is issued when the tensor's absence starts. So at
    every action, memory contains what the schedule says for that time.
    """
    timed = [(run.start_ns, (COMPUTE, run.op)) for run in axis.runs]
    for track in axis.tracks.values():
        timed += _actions(axis, track)
    timed.sort(key=lambda a: (a[0], _ORDER.index(a[1][0])))
    residents = (t for t, track in axis.tracks.items() if track.resident)
    return [action for _, action in timed], frozenset(residents)


def _actions(axis: Axis, track: TensorAccesses) -> Iterator[tuple[int, Action]]:
    t = track.tensor
    leave = DROP, t
    yield from ((run.end_ns, leave) for run in track.extra)
    if not track.is_weight and not track.stays:
        yield axis.end_of(track.accesses[-1] if track.accesses else None), leave
    for span in track.outs.values():
        yield span.start_ns, (SWAP_OUT, t)
    for gap in track.gaps:
        if not gap.kept:
            yield axis.gone_ns(track, gap), leave
        if gap.back is not None:
            yield gap.back.start_ns, (SWAP_IN, t)


def choices_of(axis: Axis, gaps: Gaps) -> list[Choice]:
    """Return the choice of each gap, without times."""
    found: dict[tuple[int, int, bool], Choice] = {}
    for track in axis.tracks.values():
        last_use = START
        for gap in track.gaps:
            if gap.before is not None and not gap.before.again:
                last_use = gap.before.op
            if not gap.kept:
                choice = Choice.RESTORE if gap.early else Choice.SWAP if gap.rerun is None else Choice.RECOMPUTE
                found[track.tensor, last_use, gap.across] = choice
    choices = (found.get((g.tensor, g.last_use, g.wraps), Choice.KEEP) for g in gaps.all)
    return [choice if choice in g.choices else Choice.SWAP for choice, g in zip(choices, gaps.all, strict=True)]
