"""The default: ours, and where that leaves a gap to the bound, everybody else's as well.

On a single model's budget the portfolio gives every searcher the effort that it thinks is enough, so that it is never
worse than any of them at that effort, and then goes on with ours. A partition beside a shared workspace is ours alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from planner.errors import InfeasibleBudget, UnsupportedProblem
from planner.plan import Plan
from planner.problem import Cost, Problem
from planner.registry import maker
from planner.searcher import AnySearcher
from planner.serial import require

OTHERS: Final = ("on_demand", "genetic", "interval", "greedy", "particle_swarm", "dynprog")
"""Quick ones first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A member's candidate."""

    member: int
    inner: Any


OURS_FIRST: Final = 3
"""Times its own idea of enough that ours may search before the others do."""
AT_BOUND: Final = 1e-4
"""A gap this small is none."""


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
        except (InfeasibleBudget, UnsupportedProblem):
            if not single or problem.residents is not None:
                raise
            self._names.clear()
        if single and problem.residents is None:
            self._names += OTHERS
            require(problem)
        self._told: Sequence[Cost] = ()
        self._least_s = math.inf
        self._count = 0
        self._has_done_enough = False
        self._asks = self._ask()

    @property
    def evaluations(self) -> int:
        """Not known before every member has done its part."""
        return self._count if self._has_done_enough else 10**12

    def ask(self) -> Sequence[Candidate]:
        return next(self._asks, ())

    def tell(self, candidates: Sequence[Candidate], costs: Sequence[Cost]) -> None:
        self._told = costs
        self._count += len(costs)
        self._least_s = min(self._least_s, *(c.latency_s for c in costs), math.inf)

    def judge(self, candidate: Candidate, good_s: float) -> Cost:
        return self._member(candidate.member).judge(candidate.inner, good_s)

    def write(self, candidate: Candidate) -> Plan:
        return self._member(candidate.member).write(candidate.inner)

    def _ask(self) -> Iterator[Sequence[Candidate]]:
        for i in range(len(self._names)):
            effort = self._member(i).evaluations
            ours_first = self._names[i] == "streaming" and len(self._names) > 1
            yield from self._turn(i, OURS_FIRST * effort if ours_first else effort)
            if self._least_s <= self.problem.bound_s * (1 + AT_BOUND):
                return
        self._has_done_enough = True
        yield from self._turn(0, None)

    def _turn(self, i: int, most: int | None) -> Iterator[Sequence[Candidate]]:
        """Let a member ask until it has nothing more to ask for, or has used up its evaluations."""
        member = self._member(i)
        while (most is None or most > 0) and (inner := member.ask()):
            inner = inner[:most]
            self._told = ()
            yield [Candidate(i, c) for c in inner]
            member.tell(inner[: len(self._told)], self._told)
            most = None if most is None else most - len(inner)

    def _member(self, i: int) -> AnySearcher:
        if i not in self._members:
            self._members[i] = maker(self._names[i])(self.problem, self._seed)
        return self._members[i]
