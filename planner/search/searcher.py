"""Base class of searchers: ask for candidates, evaluate them, tell their costs."""

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
    """One search for one problem, seeded at creation.

    Subclasses set `problem`, and `_steps`, an iterator that yields the candidates of each `ask`. They define
    `_schedule`, which returns a candidate's schedule, or None if it does not fit in memory. They override `evaluate` if
    costs need no schedule, and `pool_bytes` if the pool is smaller than the workspace. `evaluate` and `write` depend
    only on the problem and the candidate: other threads may call them.
    """

    problem: Problem
    is_compiled = False
    """Whether the latest candidates are evaluated by compiled code, which runs without the GIL."""
    _schedule: Callable[[C], Schedule | None]
    _steps: Iterator[Sequence[C]]

    @cached_property
    def evaluations(self) -> int:
        """Number of candidates after which a search without a limit stops. Subclasses assign or override it."""
        raise NotImplementedError

    def ask(self) -> Sequence[C]:
        """Return the next independent candidates to evaluate; empty when the search is over."""
        return next(self._steps, ())

    def tell(self, candidates: Sequence[C], costs: Sequence[Cost]) -> None:
        """Receive the costs of the latest candidates; fewer if a limit cut the evaluation short.

        Searchers whose candidates build on one another override this.
        """

    def evaluate(self, candidate: C, good_s: float) -> Cost:
        """Simulate a candidate. If latency is the objective, skips the period of candidates slower than `good_s`."""
        schedule = self._schedule(candidate)
        good_s = math.inf if self.problem.objective == "period" else good_s
        return UNFIT if schedule is None else evaluate(self.problem, schedule, good_s)

    def found_by(self, candidate: C) -> str | None:
        """Return the name of the searcher that found a candidate, if this one asks others."""
        return None

    def pool_bytes(self, candidate: C) -> int:
        """Return the size of the pool for a candidate's counted bytes."""
        return self.problem.memory.workspace_bytes

    def write(self, candidate: C) -> Plan:
        """Return the candidate's plan, without provenance."""
        schedule = self._schedule(candidate)
        assert schedule is not None
        return write(self.problem, schedule, self.pool_bytes(candidate))


AnySearcher = Searcher[Any]
