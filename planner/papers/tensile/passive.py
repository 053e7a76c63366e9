"""Swaps that the executor waits for, where scheduling alone does not fit a job into its memory.

TENSILE, section III-D: when a tensor is not there, "the Executor will pause the computation and swap the tensors
into the GPU memory". The paper wants to avoid that and does not say which tensors leave; here, the largest at the
peak. The pause is not on the time axis.
"""

from planner.papers.tensile.channel import TransferSpan
from planner.papers.tensile.job import AccessGap, Axis, Track
from planner.papers.tensile.system import System


def press_out(system: System, memory_bytes: int) -> None:
    """Swap passively whatever is not in use at the peak, until the first job fits in memory or no more can leave."""
    while (peak := system.usage.peak()).nbytes > memory_bytes:
        too_many = peak.nbytes - memory_bytes
        for j, tensor in peak.tensors:
            track = system.axes[j].tracks[tensor]
            gap = _gap_around(system.axes[j], track, peak.time_ns)
            if gap is None or not track.nbytes or too_many <= 0:
                continue
            _swap_passively(system, system.axes[j], track, gap)
            system.usage.update(j, track)
            too_many -= track.nbytes
        if too_many == peak.nbytes - memory_bytes:
            return


def _gap_around(axis: Axis, track: Track, time_ns: int) -> AccessGap | None:
    """The gap that a moment lies in, if something can still leave in it: no recomputation ends it."""
    for gap in track.gaps:
        before, after = time_ns >= axis.end_of(gap.before), time_ns < gap.after.start_ns
        if (before or after if gap.across else before and after) and not (gap.across and track.stays):
            return gap if gap.rerun is None else None
    return None


def _swap_passively(system: System, axis: Axis, track: Track, gap: AccessGap) -> None:
    """Let the tensor leave right after the access before the gap and come back right before the one behind it."""
    if gap.back is not None:
        system.inbound.free(gap.back)
    gone_ns, back_ns = axis.end_of(gap.before), gap.after.start_ns
    out: TransferSpan | None = None
    if track.needs_out(gap) and (gap.version not in track.outs or track.outs[gap.version].end_ns > gone_ns):
        if gap.version in track.outs:
            system.outbound.free(track.outs[gap.version])
        out = TransferSpan(gone_ns, gone_ns)
    system.put(track, gap, out, TransferSpan(back_ns, back_ns))
