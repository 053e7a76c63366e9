"""The searcher `best` for what is served: `genetic`, then `offloading` if that may help.

`offloading` follows if activations do not fit, or if they leave little memory for parameters and `genetic` is far from
the bound. `genetic` uses the remaining time."""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.genetic.searcher import Genetic
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.offloading.searcher import Offloading
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.search.portfolio import Portfolio
from cohabit.planner.search.searcher import AnySearcher, Searcher
from cohabit.planner.streaming.op_orders import require_served

AT_BOUND: Final = 1e-4
"""Relative gap to the bound that counts as zero."""
WORTH_OFFLOADING: Final = 0.05
"""Relative gap to the bound above which offloading is tried even if activations fit."""
NARROW: Final = 2
"""A window smaller than this many times the largest op's parameters is narrow. In a wider one, copies overlap ops."""


@dataclass(frozen=True, slots=True)
class ServedCandidate:
    """A candidate of `genetic` or `offloading`."""

    searcher: AnySearcher
    inner: Any


def best(problem: Problem, seed: int) -> AnySearcher:
    """Return the default search of a problem: `Portfolio` for a single budget, `Best` for what is served."""
    try:
        return Portfolio(problem, seed)
    except UnsupportedProblem:
        return Best(problem, seed)


class Best(Searcher[ServedCandidate]):
    """Stops when the bound is reached. Raises UnsupportedProblem, or InfeasibleBudget with the least budget."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_served(problem, "best")
        self.problem = problem
        self.evaluations = 10**12
        """A very large number until every searcher has spent its effort; then the number of evaluations so far."""
        self._first = _first(problem, seed)
        self._seed = seed
        self._told: Sequence[Cost] = ()
        self._least_s = math.inf
        self._steps = self._ask()

    def tell(self, candidates: Sequence[ServedCandidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._least_s = min([self._least_s, *(cost.latency_s for cost in costs)])

    def evaluate(self, candidate: ServedCandidate, good_s: float) -> Cost:
        return candidate.searcher.evaluate(candidate.inner, good_s)

    def write(self, candidate: ServedCandidate) -> Plan:
        return candidate.searcher.write(candidate.inner)

    def found_by(self, candidate: ServedCandidate) -> str:
        return "genetic" if isinstance(candidate.searcher, Genetic) else "offloading"

    def _ask(self) -> Iterator[Sequence[ServedCandidate]]:
        first = self._first
        # The effort is read after the first candidates, because computing it takes time.
        spent = yield from self._spend(first, None)
        if isinstance(first, Genetic) and not self._is_within(WORTH_OFFLOADING) and _is_narrow(self.problem):
            try:
                other = Offloading(self.problem, self._seed)
            except InfeasibleBudget:
                pass  # no pool of activations leaves room for the largest op
            else:
                spent += yield from self._spend(other, None)
        self.evaluations = spent
        yield from self._spend(first, math.inf)

    def _spend(self, searcher: AnySearcher, most: float | None) -> Generator[Sequence[ServedCandidate], None, int]:
        """Ask a searcher until it has spent `most` evaluations (by default, its effort), has no candidates, or the
        bound is reached. Returns the number spent."""
        spent = 0
        self.is_compiled = searcher.is_compiled
        while not self._is_within(AT_BOUND) and (inner := searcher.ask()):
            self._told = ()
            yield [ServedCandidate(searcher, c) for c in inner]
            searcher.tell(inner[: len(self._told)], self._told)
            spent += len(inner)
            # A searcher lowers its effort once it gains little.
            if spent >= (searcher.evaluations if most is None else most):
                break
        return spent

    def _is_within(self, gap: float) -> bool:
        """Whether the best latency so far is within a relative gap of the bound."""
        # Computing the bound takes time, so it waits until there is a first plan.
        return self._least_s < math.inf and self._least_s <= self.problem.bound_s * (1 + gap)


def _first(problem: Problem, seed: int) -> AnySearcher:
    """Return the searcher that begins: `genetic` if activations fit, otherwise `offloading`."""
    try:
        return Genetic(problem, seed)
    except InfeasibleBudget as refusal:
        try:
            return Offloading(problem, seed)
        except InfeasibleBudget as other:
            raise min((refusal, other), key=lambda r: r.least_bytes) from None


def _is_narrow(problem: Problem) -> bool:
    """Whether parameters stream through a narrow window that offloading some activation could widen."""
    graph = problem.graph
    footprint = Footprint.of(graph)
    memory = problem.memory
    window = memory.workspace_bytes - footprint.activation_bytes
    if window >= NARROW * max(footprint.op_pages) * PAGE_BYTES or graph.parameter_bytes <= memory.partition_bytes:
        return False
    return any(gap.is_offloadable(graph) for gap in Gaps(graph).all)
