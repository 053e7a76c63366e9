"""The searcher `interval`: TENSILE's schedules for several shares of the memory and swapping rates.

What the paper's executor does when a schedule does not fit (it waits for swaps) is part of the plan here, so that
every memory from the least on has a plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from typing import Final

from cohabit.planner.papers.tensile.axis import Axis
from cohabit.planner.papers.tensile.order import actions_of, fates_of
from cohabit.planner.papers.tensile.schedule import TensileSchedule
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.sequence.gaps import Gaps
from cohabit.planner.sequence.no_wait import fit
from cohabit.planner.sequence.sequence import plan_of
from cohabit.planner.sequence.serial import least_bytes, require_single_budget, serial_plan

SHARES: Final = (1.0, 0.98, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Of the memory, what the schedule assumes to have; the rest is for fragmentation."""
FITTING: Final = 3
"""Shares to evaluate: the largest whose tensors can be placed. Placement takes most of the time."""
UNTIMED: Final = (0.95, 0.9, 0.8, 0.7, 0.5)
"""The same for schedules of which only the decisions count: what they leave is for transfers that come early."""
BEST: Final = 2
"""Candidates of the paper's own way that other ways are tried with."""


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Parameters of one schedule."""

    share: float
    most_swapped: float = 1.0
    """Maximum swapping rate."""
    duplex: bool = False
    """Whether the link's directions are scheduled apart; the paper's link has one channel for both."""
    thorough: bool = True
    """Whether a swapped tensor is released before all its accesses."""


WAYS: Final = tuple(
    (most_swapped, duplex, thorough)
    for most_swapped in (1.0, 0.5, 0.25)
    for duplex, thorough in ((False, True), (True, True), (True, False))
)[1:]
"""Other maximum swapping rates, and what is not the paper's."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A schedule and how it becomes a plan; without a schedule, the serial plan."""

    schedule: ScheduleOptions | None
    timed: bool = True
    """Whether transfers keep the schedule's times. Otherwise only its fates count, and transfers start as early as
    memory allows, which is better where not all of them are hidden."""


class Tensile(Searcher[ScheduleCandidate]):
    """Evaluates schedules for several maximum swapping rates and shares of the memory."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_single_budget(problem, "interval")
        self.problem = problem
        self.evaluations = FITTING + len(UNTIMED) + 1 + BEST * len(WAYS)
        self._gaps = Gaps(problem.graph)
        self._axis = cache(self._scheduled)
        self._plan = cache(self._make)
        self._latency_s: dict[ScheduleCandidate, float] = {}
        self._steps = self._search()

    def tell(self, candidates: Sequence[ScheduleCandidate], costs: Sequence[Cost]) -> None:
        self._latency_s |= {c: cost.latency_s for c, cost in zip(candidates, costs, strict=False)}

    def _search(self) -> Iterator[Sequence[ScheduleCandidate]]:
        """The paper's way in the largest shares that can be placed; then other ways in the best of these.

        The first share is also tried with two channels: on a link with two directions that tells more of the others.
        """
        fitting = (c for share in SHARES if self._plan(c := ScheduleCandidate(ScheduleOptions(share))) is not None)
        first = next(fitting, ScheduleCandidate(None))
        yield [first]
        duplex = (
            [replace(first, schedule=ScheduleOptions(first.schedule.share, *WAYS[0]))] if first.schedule else []
        )
        if duplex:
            yield duplex
        untimed = [ScheduleCandidate(ScheduleOptions(share), timed=False) for share in UNTIMED]
        others = [*islice(fitting, FITTING - 1), *untimed]
        yield [c for c in (*others, ScheduleCandidate(None)) if c != first]
        own = [c for c in self._latency_s if c.schedule is not None and c not in duplex]
        best = sorted(own, key=lambda c: self._latency_s[c])
        ways = [
            replace(c, schedule=ScheduleOptions(c.schedule.share, *way))
            for c in best[:BEST]
            for way in WAYS
            if c.schedule
        ]
        yield [c for c in ways if c not in duplex]

    def _make(self, candidate: ScheduleCandidate) -> Plan | None:
        if candidate.schedule is None:
            return serial_plan(self.problem)
        axis = self._axis(candidate.schedule)
        if not candidate.timed:
            return fit(self.problem, self._gaps, fates_of(axis, self._gaps))
        return plan_of(self.problem, *actions_of(axis))

    def _scheduled(self, how: ScheduleOptions) -> Axis:
        room_bytes = max(int(self.problem.memory_bytes * how.share), least_bytes(self.problem.graph))
        schedule = TensileSchedule(
            self.problem.graph, self.problem.profile, how.most_swapped, duplex=how.duplex, thorough=how.thorough
        )
        schedule.lower(room_bytes)
        schedule.press_out(room_bytes)
        return schedule.axis
