"""Learns a profile from the steps of a training: times of ops and of copies, without what they cost each other."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence

import msgspec

from cohabit.planner.plan import Compute, Span, SwapIn, SwapOut
from cohabit.planner.profile import Link, Profile
from cohabit.runtime.recording import Recording


def learned(profile: Profile, recording: Recording, weight: float) -> Profile:
    """Return the profile with its op times and links moved by `weight`, up to 1, towards those of a recorded step.

    The simulator slows down what overlaps, by the profile's factors; so here an overlap counts as less time.
    """
    steps, tensors = recording.program.plan.steps, recording.program.graph.tensors
    spans = recording.measured(0.0)
    computes = [span for span in spans if span.lane == "compute"]
    copies = [span for span in spans if span.lane != "compute"]
    seconds = list(profile.op_seconds)
    for span, alone_s in zip(computes, _alone(computes, copies, profile.compute_slowdown), strict=True):
        step = steps[span.step]
        assert isinstance(step, Compute)
        seconds[step.op] += weight * (alone_s - seconds[step.op])
    took_s = {SwapIn: 0.0, SwapOut: 0.0}
    promised_s = {SwapIn: 0.0, SwapOut: 0.0}
    links = {SwapIn: profile.swap_in, SwapOut: profile.swap_out}
    for span, alone_s in zip(copies, _alone(copies, computes, profile.swap_slowdown), strict=True):
        step = steps[span.step]
        assert isinstance(step, SwapIn | SwapOut)
        took_s[type(step)] += alone_s
        promised_s[type(step)] += links[type(step)].seconds(tensors[step.tensor].nbytes)
    swap_in, swap_out = (
        _slower(link, 1 + weight * (took_s[kind] / promised_s[kind] - 1)) if promised_s[kind] else link
        for kind, link in links.items()
    )
    return msgspec.structs.replace(profile, op_seconds=tuple(seconds), swap_in=swap_in, swap_out=swap_out)


def _slower(link: Link, factor: float) -> Link:
    return Link(link.latency_s * factor, link.bandwidth_bytes_per_s / factor)


def _alone(spans: Sequence[Span], others: Iterable[Span], slowdown: float) -> list[float]:
    """Return the seconds that spans would take if none of the others, which slow them down, ran meanwhile."""
    starts, ends, busy = [0.0], [0.0], [0.0]  # of the times in which others run, and their seconds before each
    for start_s, end_s in sorted((other.start_s, other.end_s) for other in others):
        if start_s > ends[-1]:
            busy.append(busy[-1] + ends[-1] - starts[-1])
            starts.append(start_s)
            ends.append(end_s)
        ends[-1] = max(ends[-1], end_s)

    def busy_until(now_s: float) -> float:
        i = bisect_right(starts, now_s) - 1
        return busy[i] + min(now_s, ends[i]) - starts[i]

    return [
        span.end_s - span.start_s - (busy_until(span.end_s) - busy_until(span.start_s)) * (1 - 1 / slowdown)
        for span in spans
    ]
