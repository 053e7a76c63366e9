"""The searcher `best` for single budgets: runs several searchers in turn until one reaches the lower bound.

The searchers, called members, are asked in a fixed order: `on_demand`, then each of SAMPLED. A member's effort is the
number of candidates that it evaluates when it runs alone. Each of SAMPLED first gets a small fraction of its effort
(one round of successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization", AISTATS 2016). Then the members spend the rest of their effort, in the order of their best latencies. So
the portfolio is never worse than one of its members at that effort. The best member that has candidates left uses the
remaining time.

Ops that share weights, such as the time steps of a recurrent network, can also run grouped by weights. `on_demand`,
the quickest member, plans both orders; SAMPLED plan the better one. Graphs that change state, such as training
steps, are also planned as chains, which takes a few candidates.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from cohabit.planner.errors import InfeasibleBudget, UnsupportedProblem
from cohabit.planner.order import by_parameters, has_reuse, in_original_order, reordered
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.schedule.serial import least_bytes, require_counted
from cohabit.planner.search.registry import SEARCHERS, make
from cohabit.planner.search.searcher import AnySearcher, Searcher

QUICKEST: Final = "on_demand"
SAMPLED: Final = ("interval", "particle_swarm")
"""Members that are sampled before they are ranked, quick ones first."""
CHAIN_MEMBERS: Final = ("dynprog", "chain_checkpointing")
"""Members that treat the graph as a chain of layers to offload or recompute, with a few candidates each."""
SAMPLE: Final = 1 / 16
"""Fraction of its effort that each of SAMPLED gets before ranking."""
BY_WEIGHTS: Final = " in the order of weights"
"""Name suffix of members whose ops run in the order of `planner.order.by_parameters`, grouped by weights."""
AT_BOUND: Final = 1e-4
"""Relative gap to the bound that counts as zero."""


@dataclass(frozen=True, slots=True)
class MemberCandidate:
    """A candidate of one member."""

    member: int
    inner: Any


@dataclass(slots=True)
class _Member:
    """A searcher that has been asked."""

    name: str
    searcher: AnySearcher
    by_weights: bool
    """Whether its ops run grouped by weights."""
    index: int
    least_s: float = math.inf
    effort_left: float = 0.0
    """Number of evaluations until it has spent its effort."""

    @property
    def rank(self) -> tuple[float, int]:
        return self.least_s, self.index


_Turn = Generator[Sequence[MemberCandidate], None, _Member | None]
"""Yields the candidates of one member, then returns the member; None if the member had no turn."""


class Portfolio(Searcher[MemberCandidate]):
    """Asks one member after the other; stops when the bound is reached.

    Raises UnsupportedProblem, or InfeasibleBudget with the least budget.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, "best")
        if QUICKEST not in SEARCHERS:
            raise UnsupportedProblem("the searchers for single budgets are not installed (cohabit.planner.papers)")
        self.problem = problem
        self._seed = seed
        self._members: list[_Member] = []
        self._told: Sequence[Cost] = ()
        self._count = 0
        self.evaluations = 10**12
        """A very large number until every member has spent its effort; then the number of evaluations so far."""
        self._steps = self._ask()

    def tell(self, candidates: Sequence[MemberCandidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._count += len(costs)
        for candidate, cost in zip(candidates, costs, strict=False):
            member = self._members[candidate.member]
            member.least_s = min(member.least_s, self.problem.seconds(cost))

    def evaluate(self, candidate: MemberCandidate, good_s: float) -> Cost:
        return self._members[candidate.member].searcher.evaluate(candidate.inner, good_s)

    def write(self, candidate: MemberCandidate) -> Plan:
        member = self._members[candidate.member]
        plan = member.searcher.write(candidate.inner)
        if not member.by_weights:
            return plan
        assert self._weights_order is not None
        return in_original_order(plan, self._weights_order, self.problem.graph, self.problem.profile)

    def found_by(self, candidate: MemberCandidate) -> str:
        """Return the name of the member that found a candidate."""
        member = self._members[candidate.member]
        return f"{member.name}{BY_WEIGHTS}" if member.by_weights else member.name

    def _ask(self) -> Iterator[Sequence[MemberCandidate]]:
        quickest = yield from self._turn(QUICKEST)
        assert quickest is not None  # it plans every single budget that is large enough
        yield from self._ask_others(quickest)
        # Each member spends the rest of its effort, the best first.
        for member in self._ranked():
            if member.effort_left > 0:
                yield from self._spend(member, member.effort_left)
        self.evaluations = self._count
        # The best continues until it has no candidates, then the next best.
        for member in self._ranked():
            yield from self._spend(member, math.inf)

    def _ask_others(self, quickest: _Member) -> Iterator[Sequence[MemberCandidate]]:
        """Ask the other members that plan single budgets, after the quickest has planned the graph's own order."""
        regrouped = None
        if self._weights_order is not None:
            regrouped = yield from self._turn(QUICKEST, by_weights=True)
        if any(op.mutates for op in self.problem.graph.ops):
            for name in CHAIN_MEMBERS:
                yield from self._turn(name)
        # Sample the others in the better order of the ops.
        by_weights = regrouped is not None and regrouped.least_s < quickest.least_s
        for name in SAMPLED:
            yield from self._turn(name, by_weights=by_weights, share=SAMPLE)

    @cached_property
    def _weights_order(self) -> tuple[int, ...] | None:
        """An order that groups ops by weights; None if it does not fit or is the graph's own."""
        graph, profile = self.problem.graph, self.problem.profile
        if not has_reuse(graph):
            return None
        order = by_parameters(graph)
        fits = least_bytes(reordered(graph, profile, order)[0]) <= self.problem.memory.nbytes
        return order if fits and list(order) != sorted(order) else None

    def _turn(self, name: str, *, by_weights: bool = False, share: float | None = None) -> _Turn:
        """Ask a new member until it has spent a share of its effort, by default all of it."""
        if self._is_within(AT_BOUND):
            return None
        problem = self.problem
        if by_weights:
            assert self._weights_order is not None
            graph, profile = reordered(problem.graph, problem.profile, self._weights_order)
            problem = replace(problem, graph=graph, profile=profile)
        try:
            searcher = make(name, problem, self._seed)
        except (UnsupportedProblem, InfeasibleBudget):
            return None
        member = _Member(name, searcher, by_weights, len(self._members))
        self._members.append(member)
        if share is None:
            yield from self._spend(member)
        else:
            effort = searcher.evaluations
            member.effort_left = effort - (yield from self._spend(member, share * effort))
        return member

    def _spend(self, member: _Member, most: float | None = None) -> Generator[Sequence[MemberCandidate], None, int]:
        """Ask a member until it has spent `most` evaluations or has no candidates. Returns the number spent.

        Does nothing if the bound is reached. By default, `most` is the member's effort; it is read after the first
        candidates, because computing it takes time.
        """
        searcher, spent = member.searcher, 0
        if self._is_within(AT_BOUND):
            return spent
        while inner := searcher.ask():
            self._told, self.is_compiled = (), searcher.is_compiled
            yield [MemberCandidate(member.index, c) for c in inner]
            searcher.tell(inner[: len(self._told)], self._told)
            spent += len(inner)
            if spent >= (searcher.evaluations if most is None else most):
                break
        return spent

    def _ranked(self) -> list[_Member]:
        return sorted(self._members, key=lambda member: member.rank)

    def _is_within(self, gap: float) -> bool:
        """Whether the best latency so far is within a relative gap of the bound."""
        least_s = min((member.least_s for member in self._members), default=math.inf)
        # Computing the bound takes time, so it waits until there is a first plan.
        return least_s < math.inf and least_s <= self.problem.bound_s * (1 + gap)
