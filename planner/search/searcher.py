"""The base class of every searcher: ask for candidates, evaluate them, tell their costs."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

from cohabit.planner.plan import Plan
from cohabit.planner.problem import UNFIT, Cost, Problem
from cohabit.planner.simulate import simulate

C = TypeVar("C")


class Searcher(Generic[C]):
    """One search for one problem, seeded when it is made.

    Subclasses set `problem`, and `_steps`, the candidates to ask for. Those whose candidates are evaluated as whole
    plans have `_plan`, which returns a candidate's plan or None if it does not fit in memory; all others override
    `evaluate` and `write`.
    `evaluate` and `write` depend only on the problem and the candidate: other threads may call them.
    """

    problem: Problem
    is_compiled = False
    """Whether evaluating the latest candidates is compiled code, which runs without the GIL."""
    _plan: Callable[[C], Plan | None]
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
        """Simulate a candidate. The period is only simulated if the latency is at most `good_s`."""
        plan = self._plan(candidate)
        if plan is None:
            return UNFIT
        timeline = simulate(self.problem.graph, plan, self.problem.profile)
        return Cost(timeline.latency_s, timeline.period_s or 0.0, timeline.link_bytes)

    def write(self, candidate: C) -> Plan:
        """Return the candidate's plan, without provenance."""
        plan = self._plan(candidate)
        assert plan is not None
        return plan


AnySearcher = Searcher[Any]
