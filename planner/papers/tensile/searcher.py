"""The searcher `interval`: TENSILE's schedules for several maximum swapping rates.

If a schedule does not fit, the paper's executor waits for swaps. Here these waits are part of the plan, so that every
memory from the least on has a plan.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from cohabit.planner.papers.tensile.axis import Axis
from cohabit.planner.papers.tensile.schedule import TensileSchedule, actions_of, choices_of
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.no_wait import schedule_of_choices
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import Schedule, columns, counted
from cohabit.planner.search.searcher import Searcher

RATES: Final = (1.0, 0.5, 0.25)
"""Maximum swapping rates to try."""


@dataclass(frozen=True, slots=True)
class ScheduleCandidate:
    """A timed iteration, and how to make a schedule of it; without a maximum swapping rate, the serial schedule."""

    most_swapped: float | None
    timed: bool = True
    """Whether transfers keep their times. Otherwise only the choices count, and transfers start as early as memory
    allows, which is better if some are not hidden."""


class Tensile(Searcher[ScheduleCandidate]):
    """Evaluates schedules for several maximum swapping rates."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, "interval")
        self.problem = problem
        self.evaluations = 2 * len(RATES) + 1
        self._gaps = Gaps(problem.graph)
        self._axis = cache(self._timed)
        self._schedule = cache(self._make)
        self._steps = self._search()

    def _search(self) -> Iterator[Sequence[ScheduleCandidate]]:
        candidates = [ScheduleCandidate(rate, timed) for rate in RATES for timed in (True, False)]
        fitting = [c for c in candidates if self._schedule(c) is not None]
        yield [*fitting, ScheduleCandidate(None)]

    def _make(self, candidate: ScheduleCandidate) -> Schedule | None:
        problem = self.problem
        if candidate.most_swapped is None:
            return serial_schedule(problem)
        axis = self._axis(candidate.most_swapped)
        if not candidate.timed:
            return schedule_of_choices(problem, self._gaps, choices_of(axis, self._gaps))
        actions, residents = actions_of(axis)
        return counted(problem.arrays, *columns(actions), residents, problem.memory.nbytes)

    def _timed(self, most_swapped: float) -> Axis:
        schedule = TensileSchedule(self.problem.graph, self.problem.profile, most_swapped)
        schedule.lower(self.problem.memory.nbytes)
        schedule.press_out(self.problem.memory.nbytes)
        return schedule.axis
