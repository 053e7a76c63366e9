"""The default searcher: runs several searchers in turn until one reaches the lower bound.

For a partition with a workspace, `streaming` plans. `offloading` plans if activations do not fit, or if they leave
parameters little room and `streaming` is far from the bound. `streaming` uses the remaining time.

For one budget in which everything is counted, each member first gets a small share of its own effort, and the one with
the best plan continues (one round of successive halving: Jamieson and Talwalkar, "Non-stochastic Best Arm
Identification and Hyperparameter Optimization", AISTATS 2016). After its effort, each of the others gets the rest of
its own, in order of the best latency so far, so that the portfolio is never worse than a member at that effort. The
best member with candidates left then continues. Ops that share weights, such as the time steps of a recurrent network,
can also run grouped by weights: `on_demand`, the quickest member, plans both orders, and all others take its better
one. Graphs that change state, such as training steps, are also planned as chains, which takes a few candidates.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.order import by_parameters, has_reuse, in_original_order, reordered
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.serial import least_bytes, require_counted
from cohabit.planner.search.registry import make
from cohabit.planner.search.searcher import Searcher

QUICKEST: Final = "on_demand"
SAMPLED: Final = ("interval", "particle_swarm")
"""Members that are sampled before they are ranked, quick ones first."""
OF_CHAINS: Final = ("dynprog", "chain_checkpointing")
"""Members that offload or recompute layers of a chain, with a few candidates each."""
SAMPLE: Final = 1 / 16
"""Fraction of its effort that each of SAMPLED gets before ranking."""
BY_WEIGHTS: Final = " in the order of weights"
"""Name suffix of members whose ops run in the order of `planner.order.by_parameters`, grouped by weights."""
AT_BOUND: Final = 1e-4
"""Relative gap to the bound that counts as zero."""
WORTH_OFFLOADING: Final = 0.05
"""Relative gap to the bound above which offloading is tried even if activations fit."""
NARROW: Final = 2
"""Window in units of the largest op's parameters; in a wider one, copies overlap with ops without offloading."""


@dataclass(frozen=True, slots=True)
class MemberCandidate:
    """A candidate of one member."""

    member: int
    inner: Any


class Best(Searcher[MemberCandidate]):
    """Asks one member after the other; stops when the bound is reached."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self._seed = seed
        self._names: list[str] = []
        self._members: dict[int, Any] = {}
        self._order: tuple[int, ...] | None = None
        if problem.memory.counted:
            require_counted(problem, "best")
            self._names += (QUICKEST, *SAMPLED)
            self._order = self._weights_order()
            if self._order is not None:
                self._names += [f"{name}{BY_WEIGHTS}" for name in (QUICKEST, *SAMPLED)]
            if any(op.mutates for op in problem.graph.ops):
                self._names += OF_CHAINS
        else:
            self._choose_serving_members()
        self._told: Sequence[Cost] = ()
        self._least_s = [math.inf] * len(self._names)
        self._count = 0
        self.evaluations = 10**12
        """Known once every member has had its turn; a very large number before."""
        self._steps = self._ask_counted() if problem.memory.counted else self._ask_served()

    def tell(self, candidates: Sequence[MemberCandidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._count += len(costs)
        for candidate, cost in zip(candidates, costs, strict=False):
            self._least_s[candidate.member] = min(self._least_s[candidate.member], self.problem.seconds(cost))

    def evaluate(self, candidate: MemberCandidate, good_s: float) -> Cost:
        cost: Cost = self._member(candidate.member).evaluate(candidate.inner, good_s)
        return cost

    def write(self, candidate: MemberCandidate) -> Plan:
        plan: Plan = self._member(candidate.member).write(candidate.inner)
        if self._order is None or not self._names[candidate.member].endswith(BY_WEIGHTS):
            return plan
        return in_original_order(plan, self._order, self.problem.graph, self.problem.profile)

    def _choose_serving_members(self) -> None:
        """Use offloading alone if streaming does not fit. If neither does, raises the InfeasibleBudget that needs
        less."""
        self._names = ["streaming"]
        try:
            self._member(0)
        except InfeasibleBudget as refusal:
            self._names = ["offloading"]
            try:
                self._member(0)
            except InfeasibleBudget as other:
                raise min(refusal, other, key=lambda r: r.least_bytes) from other
        else:
            self._names += ["offloading"] if _is_narrow(self.problem) else []

    def found_by(self, candidate: MemberCandidate) -> str:
        """Return the name of the member that found a candidate."""
        return self._names[candidate.member]

    def _ask_served(self) -> Iterator[Sequence[MemberCandidate]]:
        yield from self._turn(0)
        if len(self._names) > 1 and min(self._least_s) > self.problem.bound_s * (1 + WORTH_OFFLOADING):
            yield from self._turn(1)
        self.evaluations = self._count
        if not self._is_at_bound():
            yield from self._turn(0, math.inf)

    def _weights_order(self) -> tuple[int, ...] | None:
        """Return an order that groups ops by weights; None if it does not fit or is the graph's own."""
        graph, profile = self.problem.graph, self.problem.profile
        if not has_reuse(graph):
            return None
        order = by_parameters(graph)
        fits = least_bytes(reordered(graph, profile, order)[0]) <= self.problem.memory.nbytes
        return order if fits and list(order) != sorted(order) else None

    def _ask_counted(self) -> Iterator[Sequence[MemberCandidate]]:
        # The quickest member and those of chains run in full.
        quickest = [i for i, name in enumerate(self._names) if name.startswith(QUICKEST)]
        chains = [i for i, name in enumerate(self._names) if name in OF_CHAINS]
        left: dict[int, float] = {}
        for i in (*quickest, *chains):
            if self._is_at_bound():
                return
            left[i] = 0
            yield from self._turn(i)
        # Sample the others in the better order of the ops; then all spend the rest of their effort, the best first.
        start = min(quickest, key=self._rank) + 1
        for i in range(start, start + len(SAMPLED)):
            if self._is_at_bound():
                return
            effort = self._member(i).evaluations
            left[i] = effort - (yield from self._turn(i, SAMPLE * effort))
        for i in sorted(left, key=self._rank):
            if self._is_at_bound():
                return
            if left[i] > 0:
                yield from self._turn(i, left[i])
        self.evaluations = self._count
        for i in sorted(left, key=self._rank):  # a member without further candidates hands over to the next
            if self._is_at_bound():
                return
            yield from self._turn(i, math.inf)

    def _rank(self, i: int) -> tuple[float, int]:
        return self._least_s[i], i

    def _is_at_bound(self) -> bool:
        return min(self._least_s) <= self.problem.bound_s * (1 + AT_BOUND)

    def _turn(self, i: int, most: float | None = None) -> Generator[Sequence[MemberCandidate], None, int]:
        """Ask a member until it has spent `most` evaluations or stops. Returns the number spent.

        `most` is the member's own effort by default, read after its first candidates because computing it takes time.
        """
        member, spent = self._member(i), 0
        while inner := member.ask():
            self._told, self.is_compiled = (), member.is_compiled
            yield [MemberCandidate(i, c) for c in inner]
            member.tell(inner[: len(self._told)], self._told)
            spent += len(inner)
            if spent >= (member.evaluations if most is None else most):
                break
        return spent

    def _member(self, i: int) -> Any:
        if i not in self._members:
            name, problem = self._names[i], self.problem
            if self._order is not None and name.endswith(BY_WEIGHTS):
                graph, profile = reordered(problem.graph, problem.profile, self._order)
                problem = replace(problem, graph=graph, profile=profile)
            self._members[i] = make(name.partition(" ")[0], problem, self._seed)
        return self._members[i]


def _is_narrow(problem: Problem) -> bool:
    """Whether parameters stream through a narrow window that offloading some activation could widen."""
    graph = problem.graph
    footprint = Footprint.of(graph)
    memory = problem.memory
    window = memory.workspace_bytes - footprint.activation_bytes
    if window >= NARROW * max(footprint.op_pages) * PAGE_BYTES or graph.parameter_bytes <= memory.partition_bytes:
        return False
    return any(gap.is_offloadable(graph) for gap in Gaps(graph).all)
