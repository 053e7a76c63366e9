"""The default: ours, and where that leaves a gap to the bound, everybody else's as well.

On a single model's budget the portfolio tries every searcher for a little, then gives each the effort that it thinks
is enough, those that did best first, so that it is never worse than any of them at that effort. Whoever has the best
plan then goes on. A partition beside a shared workspace is ours alone: `streaming`, and `travelling` where activations
do not fit, or where they leave the parameters little room and streaming is far from the bound.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from planner.errors import InfeasibleBudget, UnsupportedProblem
from planner.layout.feasible import PAGE_BYTES, Footprint
from planner.offloading.zone import Zones
from planner.plan import Plan
from planner.problem import Cost, Problem
from planner.search.registry import maker
from planner.search.searcher import AnySearcher
from planner.sequence.serial import require

OTHERS: Final = ("on_demand", "genetic", "interval", "greedy", "particle_swarm", "dynprog")
"""Quick ones first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member's candidate."""

    member: int
    inner: Any


OURS_FIRST: Final = 3
"""Times its own idea of enough that ours may search before the others do."""
TASTE: Final = 1 / 16
"""Share of its effort that each of the others gets before they are compared."""
AT_BOUND: Final = 1e-4
"""A gap this small is none."""
WORTH_TRAVELLING: Final = 0.05
"""A gap to the bound that activations may have to travel for, where they need not."""
NARROW: Final = 2
"""Times the largest op's parameters: with more beside the activations, copies overlap with ops as it is."""


class Best:
    """Asks one searcher after the other; stops when the bound is reached."""

    def __init__(self, problem: Problem, seed: int) -> None:
        self.problem = problem
        self._seed = seed
        self._names = ["streaming"]
        self._members: dict[int, AnySearcher] = {}
        single = not problem.workspace_bytes
        try:
            self._member(0)
        except (InfeasibleBudget, UnsupportedProblem) as refusal:
            if single and problem.residents is not None:
                raise
            self._names.clear()
            if not single:
                self._travel_instead(refusal)
        else:
            if not single and _is_narrow(problem):
                self._names.append("travelling")
        if single and problem.residents is None:
            self._names += OTHERS
            require(problem)
        self._told: Sequence[Cost] = ()
        self._asking = 0
        self._least_s = [math.inf] * len(self._names)
        self._count = 0
        self._has_done_enough = False
        self._asks = self._ask()

    @property
    def evaluations(self) -> int:
        """Not known before every member has done its part."""
        return self._count if self._has_done_enough else 10**12

    @property
    def is_compiled(self) -> bool:
        return self._member(self._asking).is_compiled

    def ask(self) -> Sequence[Candidate]:
        return next(self._asks, ())

    def tell(self, candidates: Sequence[Candidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._count += len(costs)
        for candidate, cost in zip(candidates, costs, strict=False):
            self._least_s[candidate.member] = min(self._least_s[candidate.member], cost.latency_s)

    def judge(self, candidate: Candidate, good_s: float) -> Cost:
        return self._member(candidate.member).judge(candidate.inner, good_s)

    def write(self, candidate: Candidate) -> Plan:
        return self._member(candidate.member).write(candidate.inner)

    def _travel_instead(self, refusal: InfeasibleBudget | UnsupportedProblem) -> None:
        """Activations do not fit as they are. Raises the refusal, or another that asks for less."""
        if isinstance(refusal, UnsupportedProblem):
            raise refusal
        self._names.append("travelling")
        try:
            self._member(0)
        except InfeasibleBudget as other:
            raise min(refusal, other, key=lambda r: r.least_bytes) from other

    def _ask(self) -> Iterator[Sequence[Candidate]]:
        everyone = range(len(self._names))
        others = [i for i in everyone if self._names[i] != "streaming"]
        for i in everyone[: len(self._names) - len(others)]:
            ahead = OURS_FIRST if others and not self.problem.workspace_bytes else 1
            yield from self._turn(i, _times(ahead))
            if self.problem.workspace_bytes and self._least_s[i] <= self.problem.bound_s * (1 + WORTH_TRAVELLING):
                others.clear()
        left: dict[int, float] = {}
        for i in others:
            if self._is_at_bound():
                return
            effort = self._member(i).evaluations
            left[i] = effort - (yield from self._turn(i, _most(TASTE * effort)))
        for i in sorted(others, key=self._rank):
            if self._is_at_bound():
                return
            if left[i] > 0:
                yield from self._turn(i, _most(left[i]))
        self._has_done_enough = True
        if not self._is_at_bound():
            yield from self._turn(min(everyone, key=self._rank), _most(math.inf))

    def _rank(self, i: int) -> tuple[float, int]:
        return self._least_s[i], i

    def _is_at_bound(self) -> bool:
        return min(self._least_s) <= self.problem.bound_s * (1 + AT_BOUND)

    def _turn(self, i: int, effort: Callable[[AnySearcher], float]) -> Generator[Sequence[Candidate], None, int]:
        """Let a member ask until it has judged so many candidates, or has nothing more to ask for.

        Returns how many it has judged. How many are enough is asked after the first, which should not wait for that.
        """
        member, spent = self._member(i), 0
        while inner := member.ask():
            self._told, self._asking = (), i
            yield [Candidate(i, c) for c in inner]
            member.tell(inner[: len(self._told)], self._told)
            spent += len(inner)
            if spent >= effort(member):
                break
        return spent

    def _member(self, i: int) -> AnySearcher:
        if i not in self._members:
            self._members[i] = maker(self._names[i])(self.problem, self._seed)
        return self._members[i]


def _is_narrow(problem: Problem) -> bool:
    """Whether parameters must stream past activations that leave them little room, and could leave."""
    graph = problem.graph
    footprint = Footprint.of(graph)
    window = problem.workspace_bytes - footprint.activation_bytes
    if window >= NARROW * max(footprint.op_pages) * PAGE_BYTES or graph.parameter_bytes <= problem.partition_bytes:
        return False
    return Zones(graph).has_gaps


def _times(factor: int) -> Callable[[AnySearcher], float]:
    return lambda searcher: searcher.evaluations * factor


def _most(count: float) -> Callable[[AnySearcher], float]:
    return lambda _: count
