"""Beaumont et al.'s GREEDY and DYNPROG: offload activations of a chain of virtual layers, and bring them back.

Both choose a set of activations in a relaxation of the problem (planner.offload, planner.dynprog); the plan is the
no-wait schedule that offloads just these (sections 4 and 5.3). The relaxations know nothing of fragmentation, so the
choice is made for falling shares of the memory, until the plans get no better.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from planner.dynprog import dynprog
from planner.errors import UnsupportedProblem
from planner.gaps import Gaps
from planner.no_wait import fit, lean
from planner.offload import greedy
from planner.offload_choices import BEST, Choice, Chooser, Keep, Offload
from planner.plan import Plan
from planner.prefetching import Line, best, eager
from planner.problem import UNFIT, Cost, Problem
from planner.sequence import lay_out, write
from planner.serial import require, serial
from planner.simulate import simulate

SHARES: Final = (1.0, 0.98, 0.96, 0.93, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Of the memory, what a choice assumes to have; the rest is for fragmentation."""
PATIENCE: Final = 2
"""Shares in a row that may bring no better plan."""
WINDOWS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Memory for weights that are not kept, in largest weights of an op."""

LEAN: Final = "everything leaves over every gap"
SERIAL: Final = "everything leaves after every op"
Candidate = Choice | str


class _Offloading:
    """Judges the choices for each share of the memory; what needs the least memory comes last."""

    def __init__(self, name: str, problem: Problem, offload: Offload, keep: Keep) -> None:
        if problem.workspace_bytes or problem.residents is not None:
            raise UnsupportedProblem(
                f"{name} plans a single model's budget, without a shared workspace or given residents"
            )
        require(problem)
        self.problem = problem
        self.evaluations = len(SHARES) * 16 * BEST
        self._gaps = Gaps(problem.graph)
        self._chooser = Chooser(problem, self._gaps, offload, keep)
        self._plan = cache(self._make)
        self._least_s = math.inf
        self._steps = self._search()

    def ask(self) -> Sequence[Candidate]:
        return next(self._steps, ())

    def tell(self, candidates: Sequence[Candidate], costs: Sequence[Cost]) -> None:
        self._least_s = min((self._least_s, *(c.latency_s for c in costs)))

    def judge(self, candidate: Candidate, good_s: float) -> Cost:
        plan = self._plan(candidate)
        if plan is None:
            return UNFIT
        timeline = simulate(self.problem.graph, plan, self.problem.profile)
        return Cost(timeline.latency_s, timeline.period_s or 0.0, timeline.link_bytes)

    def write(self, candidate: Candidate) -> Plan:
        plan = self._plan(candidate)
        assert plan is not None
        return plan

    def _search(self) -> Iterator[Sequence[Candidate]]:
        seen: set[Choice] = set()
        waited = 0
        for share in SHARES if self.problem.graph.ops else ():
            new = [c for c in self._chooser.choices(share) if c not in seen]
            seen.update(new)
            if fitting := [c for c in new if self._plan(c) is not None]:
                before_s = self._least_s
                yield fitting
                waited = 0 if self._least_s < before_s else waited + 1
                if waited == PATIENCE:
                    return
        yield [c for c in (LEAN, SERIAL) if self._plan(c) is not None]

    def _make(self, candidate: Candidate) -> Plan | None:
        problem, graph = self.problem, self.problem.graph
        if isinstance(candidate, Choice):
            return fit(problem, self._gaps, self._chooser.fates(candidate))
        if candidate == LEAN:
            return fit(problem, self._gaps, lean(self._gaps))
        actions = serial(graph)
        placed = lay_out(graph, actions, (), problem.memory_bytes)
        return write(graph, problem.profile, problem.memory_bytes, actions, (), placed)


class Greedy(_Offloading):
    """GREEDY: the first activations leave, the weights used first stay."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__("greedy", problem, greedy, lambda line: (eager(line),))


class DynProg(_Offloading):
    """DYNPROG: the set of activations that is best in the relaxation leaves, the best set of weights stays."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__("dynprog", problem, dynprog, _by_windows)


def _by_windows(line: Line) -> list[Sequence[bool]]:
    """The best choice for each amount of memory that kept weights leave."""
    room, largest = min(line.room_bytes), max(line.weight_bytes)
    kept_bytes = dict.fromkeys(max(room - w * largest, 0.0) for w in WINDOWS)
    return [keeps for kept in kept_bytes if (keeps := best(line, kept)) is not None]
