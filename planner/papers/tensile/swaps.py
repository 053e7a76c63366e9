"""Swaps the largest tensor at the peak that can be swapped without delay.

TENSILE, section IV-C, algorithm 2. A swap-out starts as early as possible, but not before the tensor is generated, and
has ended at the peak. A swap-in starts as late as possible, behind the peak, and has ended when the next access begins;
a weight that the first ops of an iteration need can come back at the end of the one before. Neither meets an access to
its tensor, nor another transfer. A tensor that was swapped is then released before its other accesses too, where a
swap-in finds room on the link.

Read out of the paper, which leaves it open or says it in two ways: the tensor must be absent at the peak, so that
the gap is the one around the peak and there is no loop over earlier ones (lines 32-33); the maximum swapping rate is
the share of a job's own tensors (line 30 compares it with their number, the text with all jobs' swaps, which would
forbid a single job its second swap).
"""

from planner.papers.tensile.channel import TransferSpan
from planner.papers.tensile.job import AccessGap, Axis, Track
from planner.papers.tensile.peak import Peak
from planner.papers.tensile.system import System, gap_at


def swap_largest(system: System, peak: Peak, thorough: bool = True) -> bool:
    """Swap one tensor so that it is absent at the peak; False if there is none that can be.

    `thorough` releases it before its other accesses as well, as the paper has it.
    """
    full = [axis.swapped + 1 > axis.job.most_swapped * axis.accessed for axis in system.axes]
    for j, tensor in peak.tensors:
        axis = system.axes[j]
        track = axis.tracks[tensor]
        if track.nbytes == 0 or (j, tensor, peak.time_ns) in system.refused:
            continue
        gap = gap_at(axis, track, peak.time_ns)
        allowed = gap is not None and not (full[j] and _is_limited(track, gap))
        if gap is not None and allowed and _swap(system, axis, track, gap, peak.time_ns):
            if thorough:
                _swap_rest(system, axis, track)
            system.usage.update(j, track)
            return True
        system.refused.add((j, tensor, peak.time_ns))
    return False


def _is_limited(track: Track, gap: AccessGap) -> bool:
    """Whether the swap counts: what the optimizing phase updates is swapped at any rate (lines 26-27)."""
    return not (gap.across and gap.version > 0) and all(g.back is None for g in track.gaps)


def _swap(system: System, axis: Axis, track: Track, gap: AccessGap, peak_ns: int) -> bool:
    ahead = gap.across and peak_ns < gap.after.start_ns  # the peak comes before the first access
    out = None
    if track.needs_out(gap):
        gone_by_ns = axis.end_ns if ahead else peak_ns
        if gap.version in track.outs:
            if track.outs[gap.version].end_ns > gone_by_ns:
                return False
        else:
            out = _swap_out(system, axis, track, gap, gone_by_ns)
            if out is None:
                return False
            system.outbound.take(out)
    low_ns = axis.start_ns if gap.across and not ahead else peak_ns + 1
    back = system.inbound.latest(axis.in_ns(track), low_ns, gap.after.start_ns)
    if back is None and gap.across and not ahead and not (track.kind == "state" and gap.version == 0):
        back = system.inbound.latest(axis.in_ns(track), peak_ns + 1, axis.end_ns)
    if out is not None:
        system.outbound.free(out)
    if back is None:
        return False
    system.put(track, gap, out, back)
    return True


def _swap_out(system: System, axis: Axis, track: Track, gap: AccessGap, gone_by_ns: int) -> TransferSpan | None:
    changed = track.changes[gap.version - 1] if gap.version else None
    accesses = [TransferSpan(r.start_ns, r.end_ns) for r in track.accesses]
    return system.outbound.earliest(axis.out_ns(track), axis.end_of(changed), gone_by_ns, accesses)


def _swap_rest(system: System, axis: Axis, track: Track) -> None:
    """Release the tensor before its other accesses too, in order of time, wherever a swap-in finds room."""
    for gap in track.gaps:
        if gap.kept and not gap.across and (not track.needs_out(gap) or gap.version in track.outs):
            back = system.inbound.latest(axis.in_ns(track), axis.gone_ns(track, gap) + 1, gap.after.start_ns)
            if back is not None:
                system.put(track, gap, None, back)
