"""A searcher for a problem whose ops run in an order of their own."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from planner.order import in_original_order, reordered
from planner.plan import Plan
from planner.problem import Cost, Problem
from planner.search.registry import make


class OtherOrder:
    """Plans with `order[k]` as the k-th op, by any searcher. See `planner.search.searcher.Searcher`."""

    def __init__(self, searcher: str, problem: Problem, seed: int, order: tuple[int, ...]) -> None:
        """Raises what the searcher raises, InfeasibleBudget where this order needs more memory."""
        graph, profile = reordered(problem.graph, problem.profile, order)
        self._problem, self._order = problem, order
        self._searcher = make(searcher, replace(problem, graph=graph, profile=profile), seed)

    @property
    def evaluations(self) -> int:
        return self._searcher.evaluations

    @property
    def is_compiled(self) -> bool:
        return self._searcher.is_compiled

    def ask(self) -> Sequence[Any]:
        return self._searcher.ask()

    def tell(self, candidates: Sequence[Any], costs: Sequence[Cost]) -> None:
        self._searcher.tell(candidates, costs)

    def evaluate(self, candidate: Any, good_s: float) -> Cost:
        return self._searcher.evaluate(candidate, good_s)

    def write(self, candidate: Any) -> Plan:
        plan = self._searcher.write(candidate)
        return in_original_order(plan, self._order, self._problem.graph, self._problem.profile)
