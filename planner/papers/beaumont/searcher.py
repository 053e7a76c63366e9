"""The searchers `greedy` and `dynprog`: Beaumont et al.'s GREEDY and DYNPROG on a chain of virtual layers.

Both choose a set of activations in a relaxation of the problem; the plan is the no-wait schedule that offloads exactly
these (sections 4 and 5.3). The relaxations do not model fragmentation, so the choice is made for falling shares of the
memory, until the plans stop improving."""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Final

from cohabit.planner.papers.beaumont.dynprog import optima
from cohabit.planner.papers.beaumont.offload import greedy
from cohabit.planner.papers.beaumont.offload_choices import BEST, Choice, Chooser, Keep, Offload
from cohabit.planner.papers.beaumont.prefetching import WeightChain, best, eager
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.sequence.delayed_drops import delay_drops
from cohabit.planner.sequence.gaps import Fate, Gaps
from cohabit.planner.sequence.no_wait import fit, no_wait
from cohabit.planner.sequence.sequence import Action, plan_of
from cohabit.planner.sequence.serial import require_single_budget, serial_plan
from cohabit.planner.simulate import simulate

SHARES: Final = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5)
"""Of the memory, what a choice assumes to have; the rest is for fragmentation."""
PATIENCE: Final = 3
"""Shares in a row that may bring no better plan, though they bring one whose transfers are timed."""
WINDOWS: Final = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Memory for weights that are not kept, in largest weights of an op."""

LEAN: Final = "everything leaves over every gap"
SERIAL: Final = "everything leaves after every op"
Candidate = Choice | str


class _ChainSearcher(Searcher[Candidate]):
    """Evaluates the choices for each share of the memory; the plans of least memory come last."""

    def __init__(self, name: str, problem: Problem, offload: Offload, keep: Keep) -> None:
        require_single_budget(problem, name)
        self.problem = problem
        self.evaluations = len(SHARES) * (BEST + 4) + 2
        self._gaps = Gaps(problem.graph)
        self._chooser = Chooser(problem, self._gaps, offload, keep)
        self._plan = cache(self._make)
        self._timed = cache(self._with_delayed_drops)
        self._least_s = math.inf
        self._steps = self._search()

    def tell(self, candidates: Sequence[Candidate], costs: Sequence[Cost]) -> None:
        self._least_s = min((self._least_s, *(c.latency_s for c in costs)))

    def _search(self) -> Iterator[Sequence[Candidate]]:
        seen: set[Choice] = set()
        waited = 0
        for share in SHARES if self.problem.graph.ops else ():
            new = [c for c in self._chooser.choices(share) if c not in seen]
            seen.update(new)
            if fitting := [c for c in new if self._plan(c) is not None]:
                before_s = self._least_s
                yield fitting
                better, timed = self._least_s < before_s, any(self._timed(c) for c in fitting)
                waited = 0 if better else waited + timed
                if waited == PATIENCE or self._least_s <= self.problem.profile.compute_s * (1 + 1e-9):
                    return
        yield [c for c in (LEAN, SERIAL) if self._plan(c) is not None]

    def _make(self, candidate: Candidate) -> Plan | None:
        problem, graph = self.problem, self.problem.graph
        if isinstance(candidate, Choice):
            plans = (self._timed(candidate), fit(problem, self._gaps, self._chooser.fates(candidate)))
            fitting = [plan for plan in plans if plan is not None]
            return min(fitting, key=lambda p: simulate(graph, p, problem.profile).latency_s, default=None)
        if candidate == LEAN:
            return fit(problem, self._gaps, [Fate.SWAP] * len(self._gaps.all))
        return serial_plan(self.problem)

    def _with_delayed_drops(self, choice: Choice) -> Plan | None:
        """A plan whose drops are delayed until the swap-outs have ended, as far as memory allows.

        It waits less than a plan with immediate drops, but packs less tightly.
        """
        problem, memory_bytes = self.problem, self.problem.memory_bytes
        fates = self._chooser.fates(choice)
        before: list[Action] | None = None
        for share in SHARES:
            decided = no_wait(self._gaps, int(share * memory_bytes), fates)
            if decided is None:
                return None
            actions = delay_drops(problem.graph, problem.profile, *decided, int(share * memory_bytes))
            plan = plan_of(problem, actions, decided[1]) if actions != before else None
            if plan is not None:
                return plan
            before = actions
        return None


class Greedy(_ChainSearcher):
    """GREEDY: the first activations leave, the weights used first stay."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__(
            "greedy", problem, lambda chain, memory_bytes: [greedy(chain, memory_bytes)], _eager_by_windows
        )


class DynProg(_ChainSearcher):
    """DYNPROG: the set of activations that is best in the relaxation leaves, the best set of weights stays."""

    def __init__(self, problem: Problem, seed: int) -> None:
        super().__init__("dynprog", problem, optima, _best_by_windows)


def _eager_by_windows(line: WeightChain) -> list[Sequence[bool]]:
    return [eager(line, window * max(line.weight_bytes)) for window in (0.0, *WINDOWS)]


def _best_by_windows(line: WeightChain) -> list[Sequence[bool]]:
    room, largest = min(line.room_bytes), max(line.weight_bytes)
    kept_bytes = dict.fromkeys(max(room - window * largest, 0.0) for window in WINDOWS)
    return [keeps for kept in kept_bytes if (keeps := best(line, kept)) is not None]
