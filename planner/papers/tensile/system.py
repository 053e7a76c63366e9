"""Several jobs on one device: their time axes, the memory that they use together, and the link that they share."""

from collections.abc import Sequence

from planner.papers.tensile.channel import Channel, TransferSpan
from planner.papers.tensile.job import AccessGap, Axis, Job, Track
from planner.papers.tensile.peak import MemoryUsage


class System:
    """What scheduling works on. `duplex` gives each direction a channel of its own; TENSILE's link has one in all."""

    def __init__(self, jobs: Sequence[Job], duplex: bool = False) -> None:
        self.axes = [Axis(job) for job in jobs]
        self.usage = MemoryUsage(self.axes)
        self.inbound = Channel()
        self.outbound = Channel() if duplex else self.inbound
        self.refused: set[tuple[int, int, int]] = set()
        """(job, tensor, time of a peak) of swaps that found no room on the link: it has no more of it later."""

    def put(self, track: Track, gap: AccessGap, out: TransferSpan | None, back: TransferSpan) -> None:
        """End a gap with a swap-in, and add a swap-out where the host store lacks a copy."""
        if out is not None:
            track.outs[gap.version] = out
            self.outbound.take(out)
        gap.back = back
        self.inbound.take(back)
        if track.kind == "state" and not track.resident and 0 in track.outs:  # it arrives unchanged from now on
            self.outbound.free(track.outs.pop(0))

    def put_off(self) -> None:
        """Look at all times again after a run was inserted."""
        self.usage.rebuild()
        spans = [span for axis in self.axes for span in axis.spans()]
        one = self.inbound is self.outbound
        self.inbound = Channel(span for span, swap_in in spans if swap_in or one)
        self.outbound = self.inbound if one else Channel(span for span, swap_in in spans if not swap_in)
        self.refused.clear()


def gap_at(axis: Axis, track: Track, time_ns: int) -> AccessGap | None:
    """The gap around a moment, if the tensor is in memory all through it and may leave."""
    for gap in track.gaps:
        after, before = time_ns < gap.after.start_ns, time_ns >= axis.end_of(gap.before)
        if (before or after if gap.across else before and after) and not (gap.across and track.stays):
            return gap if gap.kept else None
    return None
