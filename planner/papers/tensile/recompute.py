"""Recomputes the tensor that saves the most memory at the peak per second of computing it again.

TENSILE, section IV-D: MSPS (equation 4) = memory saving / recomputation time. Only tensors that are never released
otherwise are recomputed, and only from tensors that are never released, so that no swap is disrupted.
"""

from planner.papers.tensile.channel import Channel
from planner.papers.tensile.job import AccessGap, Axis, Track, put_off
from planner.papers.tensile.peak import Peak
from planner.papers.tensile.system import System, gap_at


def recompute_best(system: System, peak: Peak) -> bool:
    """Recompute one tensor of those at the peak; False if there is none that can be.

    The recomputation must not need as much memory as the peak, and the transfers that it puts off must not meet
    those of other jobs.
    """
    found: list[tuple[float, int, Track, AccessGap]] = []
    for j, tensor in peak.tensors:
        axis = system.axes[j]
        track = axis.tracks[tensor]
        gap = gap_at(axis, track, peak.time_ns)
        if gap is not None and _repeatable(axis, track, gap) and track.nbytes:
            op_s = axis.job.profile.op_seconds[track.changes[0].op]
            found.append((track.nbytes / op_s if op_s else float("inf"), j, track, gap))
    for _, j, track, gap in sorted(found, key=lambda f: -f[0]):
        if _fits(system, j, track, gap, peak.nbytes):
            _recompute(system, system.axes[j], track, gap)
            return True
    return False


def _repeatable(axis: Axis, track: Track, gap: AccessGap) -> bool:
    """Whether the op can run again right before the access behind the gap."""
    if track.kind != "activation" or track.released:
        return False
    op, at_ns = axis.graph.ops[track.changes[0].op], gap.after.start_ns
    if not axis.changed.isdisjoint((*op.reads, *op.writes)):
        return False
    others = (axis.tracks[t] for t in op.writes if t != track.tensor)
    return all(_there(axis.tracks[t], at_ns) for t in op.reads) and all(_gone(t, at_ns) for t in others)


def _there(track: Track, at_ns: int) -> bool:
    return not track.released and (track.is_weight or track.stays or track.accesses[-1].start_ns >= at_ns)


def _gone(track: Track, at_ns: int) -> bool:
    return not track.stays and track.accesses[-1].end_ns <= at_ns


def _fits(system: System, job: int, track: Track, gap: AccessGap, peak_bytes: int) -> bool:
    axis = system.axes[job]
    run = track.changes[0]
    others = sum(axis.tracks[t].nbytes for t in axis.graph.ops[run.op].writes if t != track.tensor)
    held = system.usage.held_through(gap.after.start_ns)
    if held + others + axis.scratch_bytes(run) >= peak_bytes:
        return False
    if len(system.axes) == 1:
        return True
    shifted = [
        (put_off(span, gap.after.start_ns, run.end_ns - run.start_ns) if other is axis else span, swap_in)
        for other in system.axes
        for span, swap_in in other.spans()
    ]
    if system.inbound is system.outbound:
        return Channel(span for span, _ in shifted).disjoint()
    return all(Channel(span for span, swap_in in shifted if swap_in is way).disjoint() for way in (True, False))


def _recompute(system: System, axis: Axis, track: Track, gap: AccessGap) -> None:
    op = track.changes[0].op
    gap.rerun = axis.insert(op, gap.after)
    for t in axis.graph.ops[op].reads:
        axis.tracks[t].accesses = sorted([*axis.tracks[t].accesses, gap.rerun], key=lambda run: run.start_ns)
        axis.tracks[t].find_gaps()
    for t in axis.graph.ops[op].writes:
        if t != track.tensor:
            axis.tracks[t].extra.append(gap.rerun)
    system.put_off()
