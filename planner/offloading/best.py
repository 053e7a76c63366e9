"""The searcher `best` for what is served: `genetic`, then `offloading` if that may help.

`offloading` follows if activations do not fit, or if they leave little memory for parameters and `genetic` is far from
the bound. `genetic` uses the remaining time."""

import math
from collections.abc import Iterator, Sequence
from typing import Final

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.genetic.searcher import Genetic
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.offloading.searcher import Offloading
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.search.portfolio import Combined, MemberCandidate, Portfolio
from cohabit.planner.search.searcher import AnySearcher
from cohabit.planner.streaming.op_orders import require_served

WORTH_OFFLOADING: Final = 0.05
"""Relative gap to the bound above which offloading is tried even if activations fit."""
NARROW: Final = 2
"""A window smaller than this many times the largest op's parameters is narrow. In a wider one, copies overlap ops."""


def best(problem: Problem, seed: int) -> AnySearcher:
    """Return the default search of a problem: `Portfolio` for a single budget, `Best` for what is served."""
    try:
        return Portfolio(problem, seed)
    except UnsupportedProblem:
        return Best(problem, seed)


class Best(Combined):
    """Raises UnsupportedProblem, or InfeasibleBudget with the least budget."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_served(problem, "best")
        super().__init__(problem)
        try:
            self._add("genetic", Genetic(problem, seed))
        except InfeasibleBudget as refusal:  # activations do not fit
            try:
                self._add("offloading", Offloading(problem, seed))
            except InfeasibleBudget as other:
                raise min((refusal, other), key=lambda r: r.least_bytes) from None
        self._steps = self._ask(seed)

    def _ask(self, seed: int) -> Iterator[Sequence[MemberCandidate]]:
        (first,) = self._members
        yield from self._spend(first)
        if first.name == "genetic" and not self._is_within(WORTH_OFFLOADING) and _is_narrow(self.problem):
            try:
                other = self._add("offloading", Offloading(self.problem, seed))
            except InfeasibleBudget:
                pass  # no pool of activations leaves room for the largest op
            else:
                yield from self._spend(other)
        self.evaluations = self._count
        yield from self._spend(first, math.inf)


def _is_narrow(problem: Problem) -> bool:
    """Whether parameters stream through a narrow window that offloading some activation could widen."""
    graph = problem.graph
    footprint = Footprint.of(graph)
    memory = problem.memory
    window = memory.workspace_bytes - footprint.activation_bytes
    if window >= NARROW * max(footprint.op_pages) * PAGE_BYTES or graph.parameter_bytes <= memory.partition_bytes:
        return False
    return any(gap.is_offloadable(graph) for gap in Gaps(graph).all)
