"""Searchers made of others, called members: their base class, and the searcher `best` for single budgets.

Members are asked in a fixed order: `on_demand`, then each of SAMPLED. A member's effort is the number of candidates
that it evaluates when it runs alone. Each of SAMPLED first gets a small fraction of its effort (one round of successive
halving: Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter Optimization", AISTATS
2016). Then the members spend the rest of their effort, in the order of their best latencies. So the portfolio is never
worse than one of its members at that effort. The best member that has candidates left uses the remaining time.

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


@dataclass(eq=False, slots=True)
class Member:
    """A searcher that has been asked."""

    name: str
    searcher: AnySearcher
    order: tuple[int, ...] | None = None
    """The graph's ops in the order of the searcher's; None if that is the graph's own."""
    least_s: float = math.inf
    effort_left: float = 0.0
    """Number of evaluations until it has spent its effort."""


@dataclass(frozen=True, slots=True)
class MemberCandidate:
    """A candidate of one member."""

    member: Member
    inner: Any


class Combined(Searcher[MemberCandidate]):
    """Asks its members in turns, and stops when the bound is reached. Subclasses set `_steps`."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.evaluations = 10**12
        """A very large number until every member has spent its effort; then the number of evaluations so far."""
        self._members: list[Member] = []
        self._told: Sequence[Cost] = ()
        self._count = 0

    def tell(self, candidates: Sequence[MemberCandidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._count += len(costs)
        for candidate, cost in zip(candidates, costs, strict=False):
            candidate.member.least_s = min(candidate.member.least_s, self.problem.seconds(cost))

    def evaluate(self, candidate: MemberCandidate, good_s: float) -> Cost:
        return candidate.member.searcher.evaluate(candidate.inner, good_s)

    def write(self, candidate: MemberCandidate) -> Plan:
        plan, order = candidate.member.searcher.write(candidate.inner), candidate.member.order
        if order is None:
            return plan
        return in_original_order(plan, order, self.problem.graph, self.problem.profile)

    def found_by(self, candidate: MemberCandidate) -> str:
        """Return the name of the member that found a candidate."""
        return candidate.member.name

    def _add(self, name: str, searcher: AnySearcher, order: tuple[int, ...] | None = None) -> Member:
        self._members.append(Member(name, searcher, order))
        return self._members[-1]

    def _spend(self, member: Member, most: float | None = None) -> Generator[Sequence[MemberCandidate], None, int]:
        """Ask a member until it has spent `most` evaluations, has no candidates, or the bound is reached.

        Returns the number spent. By default, `most` is the member's effort; it is read after each of its asks, because
        computing it takes time, and because a searcher lowers its effort once it gains little.
        """
        searcher, spent = member.searcher, 0
        while not self._is_within(AT_BOUND) and (inner := searcher.ask()):
            self._told, self.is_compiled = (), searcher.is_compiled
            yield [MemberCandidate(member, c) for c in inner]
            searcher.tell(inner[: len(self._told)], self._told)
            spent += len(inner)
            if spent >= (searcher.evaluations if most is None else most):
                break
        return spent

    def _is_within(self, gap: float) -> bool:
        """Whether the best latency (or period) so far is within a relative gap of the bound."""
        least_s = min((member.least_s for member in self._members), default=math.inf)
        # Computing the bound takes time, so it waits until there is a first plan.
        return least_s < math.inf and least_s <= self.problem.bound_s * (1 + gap)


_Turn = Generator[Sequence[MemberCandidate], None, Member | None]
"""Yields the candidates of one member, then returns the member; None if the member had no turn."""


class Portfolio(Combined):
    """Plans a single budget. Raises UnsupportedProblem, or InfeasibleBudget with the least budget."""

    def __init__(self, problem: Problem, seed: int) -> None:
        require_counted(problem, "best")
        if QUICKEST not in SEARCHERS:
            raise UnsupportedProblem("the searchers for single budgets are not installed (cohabit.planner.papers)")
        super().__init__(problem)
        self._seed = seed
        self._steps = self._ask()

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

    def _ask_others(self, quickest: Member) -> Iterator[Sequence[MemberCandidate]]:
        """Ask the other members that plan single budgets, after the quickest has planned the graph's own order."""
        order = self._weights_order
        regrouped = None if order is None else (yield from self._turn(QUICKEST, order))
        if any(op.mutates for op in self.problem.graph.ops):
            for name in CHAIN_MEMBERS:
                yield from self._turn(name)
        # Sample the others in the better order of the ops.
        is_better = regrouped is not None and regrouped.least_s < quickest.least_s
        for name in SAMPLED:
            yield from self._turn(name, order if is_better else None, share=SAMPLE)

    @cached_property
    def _weights_order(self) -> tuple[int, ...] | None:
        """An order that groups ops by weights; None if it does not fit or is the graph's own."""
        graph, profile = self.problem.graph, self.problem.profile
        if not has_reuse(graph):
            return None
        order = by_parameters(graph)
        fits = least_bytes(reordered(graph, profile, order)[0]) <= self.problem.memory.nbytes
        return order if fits and list(order) != sorted(order) else None

    def _turn(self, name: str, order: tuple[int, ...] | None = None, *, share: float | None = None) -> _Turn:
        """Ask a new member until it has spent a share of its effort, by default all of it."""
        if self._is_within(AT_BOUND):
            return None
        problem = self.problem
        if order is not None:
            graph, profile = reordered(problem.graph, problem.profile, order)
            problem = replace(problem, graph=graph, profile=profile)
        try:
            searcher = make(name, problem, self._seed)
        except (UnsupportedProblem, InfeasibleBudget):
            return None
        member = self._add(name if order is None else f"{name}{BY_WEIGHTS}", searcher, order)
        if share is None:
            yield from self._spend(member)
        else:
            effort = searcher.evaluations
            member.effort_left = effort - (yield from self._spend(member, share * effort))
        return member

    def _ranked(self) -> list[Member]:
        """Return the members, the best first; of equals, the first asked."""
        return sorted(self._members, key=lambda member: member.least_s)
