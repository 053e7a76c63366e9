"""Joined copies: swap-ins that are neighbours in host and device memory become one copy, as large as the link wants it.

Every copy costs the link its latency. An op waits for all of a copy, so one that an op may have to wait for is smaller,
and no op begins later than it would without joining.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from cohabit.planner.plan import Compute
from cohabit.planner.profile import Link, Profile
from cohabit.runtime.binding.calls import Call
from cohabit.runtime.binding.draft import ComputeStep, SwapStep
from cohabit.runtime.binding.program import Program

_COST_SHARE = 0.02
"""Neighbours join a copy until what every copy costs, the link's latency, is no more than this share of its time."""
_LATE_PART = 4
"""A copy for which an op may have to wait is large enough at such a part of that size: the op waits for all of it."""
_LEAST_ENOUGH_BYTES, _MOST_ENOUGH_BYTES = 2 << 20, 8 << 20
"""Limits of the size that is enough, however the link was measured."""
_USUAL_LINK = Link(3.2e-6, 52.5e9)
"""A GPU's, for programs without a profile."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Swap-ins [first, last), which are neighbours in host and in device memory."""

    first: int
    last: int
    segment: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Joining:
    """How large joined copies get on a device. None of several is larger than twice the size that is enough."""

    link: Link
    enough_bytes: int

    @staticmethod
    def of(profile: Profile | None) -> "Joining":
        """Derive the size from what a copy costs on the measured link."""
        link = _USUAL_LINK if profile is None else profile.swap_in
        nbytes = int(link.latency_s * link.bandwidth_bytes_per_s / _COST_SHARE)
        return Joining(link, min(max(nbytes, _LEAST_ENOUGH_BYTES), _MOST_ENOUGH_BYTES))

    @property
    def reserve_s(self) -> float:
        """How much earlier than an op needs it a joined copy ends: the copies before it may be late by one of them."""
        return self.link.seconds(self.enough_bytes)


@dataclass(frozen=True, slots=True)
class Forecast:
    """An inference whose copies are each by themselves, in the profile's times. Without a profile all is too late."""

    ends_s: list[float]
    """When so many compute steps have ended."""
    arrivals_s: list[float]
    """The end of each swap-in."""
    latest_s: list[float]
    """When each swap-in must have ended so that no op begins later than here, even if all later copies are in a row."""

    @staticmethod
    def of(program: Program) -> "Forecast":
        profile, swap_ins = program.draft.profile, len(program.swap_ins)
        if profile is None:
            return Forecast([0.0] * (len(program.computes) + 1), [0.0] * swap_ins, [-inf] * swap_ins)
        ops = iter([profile.op_seconds[s.op] for s in program.plan.steps if isinstance(s, Compute)])
        copy_s = [profile.swap_in.seconds(s.nbytes) * profile.swap_slowdown for s in program.swap_ins]
        ends_s, arrivals_s, needed_s = [0.0], list[float](), [inf] * swap_ins
        awaited = 0
        steps: list[ComputeStep[Call] | SwapStep] = [*program.computes, *program.swap_ins]
        for step in sorted(steps, key=lambda s: s.step):
            if isinstance(step, SwapStep):
                begin_s = max(arrivals_s[-1] if arrivals_s else 0.0, ends_s[step.computes_before])
                arrivals_s.append(begin_s + copy_s[len(arrivals_s)])
                continue
            begin_s = max(ends_s[-1], arrivals_s[step.swap_ins_before - 1] if step.swap_ins_before else 0.0)
            for swap_in in range(awaited, step.swap_ins_before):
                needed_s[swap_in] = begin_s
            awaited = max(awaited, step.swap_ins_before)
            ends_s.append(begin_s + next(ops))
        latest_s = needed_s
        for n in reversed(range(swap_ins - 1)):
            latest_s[n] = min(latest_s[n], latest_s[n + 1] - copy_s[n + 1])
        return Forecast(ends_s, arrivals_s, latest_s)


def joined(
    swap_ins: Sequence[SwapStep], start: int, joining: Joining | None, forecast: Forecast | None = None
) -> tuple[Copy, ...]:
    """Join small neighbours into one copy, which waits for what any of them waits for, and is awaited as a whole.

    `start` is the index of the first among the program's swap-ins. With a forecast, a copy is as large as the link
    wants it where all of it arrives in time for the first op that needs it; elsewhere it is smaller, and waits for
    nothing on behalf of its neighbours. Without, no op waits for these copies. Without `joining`, every copy is by
    itself.
    """
    copies: list[Copy] = []
    latest = 0  # how many compute steps the lane has waited for
    free_s = begin_s = 0.0  # when the link is free for the last copy, and when that begins
    if forecast is not None and start:
        free_s = forecast.arrivals_s[start - 1]
    for index, step in enumerate(swap_ins, start):
        later = step.computes_before > latest or step.others_before > 0
        latest = max(latest, step.computes_before)
        ready_s = 0.0 if forecast is None else forecast.ends_s[latest]
        last = copies[-1] if copies else None
        if last is not None and joining is not None and _continues(last, step):
            nbytes, enough = last.nbytes + step.nbytes, joining.enough_bytes
            if forecast is not None:
                end_s = max(free_s, ready_s) + joining.link.seconds(nbytes)
                if step.others_before or end_s + joining.reserve_s > forecast.latest_s[last.first]:
                    enough = 0 if later else enough // _LATE_PART
            if last.nbytes < enough and nbytes <= 2 * enough:
                copies[-1] = Copy(last.first, index + 1, last.segment, last.offset, nbytes)
                begin_s = max(free_s, ready_s)
                continue
        if last is not None and joining is not None:
            free_s = begin_s + joining.link.seconds(last.nbytes)
        begin_s = max(free_s, ready_s)
        copies.append(Copy(index, index + 1, step.tensor, step.offset, step.nbytes))
    return tuple(copies)


def _continues(copy: Copy, step: SwapStep) -> bool:
    """Whether a swap-in's bytes directly follow those of a copy, in host and device memory."""
    return step.tensor == copy.segment + copy.last - copy.first and step.offset == copy.offset + copy.nbytes
