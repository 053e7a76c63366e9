"""The base class of every searcher: ask for candidates, evaluate them, tell their costs."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from cohabit.planner.plan import Plan
from cohabit.planner.problem import UNFIT, Cost, Problem
from cohabit.planner.schedule.simulate import evaluate
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.schedule.write import write

C = TypeVar("C")


class Searcher(Generic[C]):
    """One search for one problem, seeded when it is made.

    Subclasses set `problem`, and `_steps`, the candidates to ask for. They have `_schedule`, which returns a
    candidate's schedule, or None if it does not fit in memory. Those that can tell a candidate's cost without making
    its schedule override `evaluate`; those whose pool is not all of the workspace override `pool_bytes`.
    `evaluate` and `write` depend only on the problem and the candidate: other threads may call them.
    """

    problem: Problem
    is_compiled = False
    """Whether evaluating the latest candidates is compiled code, which runs without the GIL."""
    _schedule: Callable[[C], Schedule | None]
    _steps: Iterator[Sequence[C]]

    @cached_property
    def evaluations(self) -> int:
        """Number of candidates after which a search without a limit stops. Subclasses assign or override it."""
        raise NotImplementedError

    def ask(self) -> Sequence[C]:
        """Return the next candidates to evaluate, independent of one another; none when the search is over."""
        return next(self._steps, ())

    def tell(self, candidates: Sequence[C], costs: Sequence[Cost]) -> None:
        """Take the costs of the latest candidates; there are fewer costs if a limit cut the evaluation short.

        For searchers whose candidates build on one another.
        """

    def evaluate(self, candidate: C, good_s: float) -> Cost:
        """Simulate a candidate. Where the latency is the objective, the period only if that is at most `good_s`."""
        schedule = self._schedule(candidate)
        good_s = math.inf if self.problem.objective == "period" else good_s
        return UNFIT if schedule is None else evaluate(self.problem, schedule, good_s)

    def pool_bytes(self, candidate: C) -> int:
        """Size of the pool in which a candidate's counted bytes lie."""
        return self.problem.memory.workspace_bytes

    def write(self, candidate: C) -> Plan:
        """Return the candidate's plan, without provenance."""
        schedule = self._schedule(candidate)
        assert schedule is not None
        return write(self.problem, schedule, self.pool_bytes(candidate))


AnySearcher = Searcher[Any]
