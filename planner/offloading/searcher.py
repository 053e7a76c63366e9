"""The searcher `offloading`: offloads activations that do not fit, or that leave parameters too little room.

The workspace is divided again between activations and parameters in flight. For each size of the activations' pool,
`planner.offloading.pool` chooses the activations to offload. Parameters stream past the pool as in
`planner.genetic.searcher`, as if they had the link to themselves. Complete plans are then simulated."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Final

from cohabit.planner.arrays import Ints
from cohabit.planner.genetic.chromosome import ServedChromosome
from cohabit.planner.genetic.searcher import Genetic
from cohabit.planner.layout.feasible import Footprint, page_aligned
from cohabit.planner.offloading.pool import RANKS, ActivationPools
from cohabit.planner.problem import TIE, UNFIT, Cost, Problem
from cohabit.planner.schedule.table import COMPUTE, NOTHING, SWAP_IN, Action, Row, Schedule, scheduled
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.streaming.emit import ParameterRows
from cohabit.planner.streaming.op_orders import OpOrders, require_served
from cohabit.planner.streaming.stream import Swaps
from cohabit.planner.streaming.workload import Workload

SIZES: Final = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
"""Pool sizes to try, between the smallest pool (0) and the largest that fits (1)."""
BEST: Final = 4
"""Number of ways to stream past a pool that are simulated together with its activations."""
LOOKED_AT: Final = 3
"""Number of pools past which BEST ways to stream are simulated."""


@dataclass(frozen=True, slots=True)
class OffloadingCandidate:
    """A pool, a way to stream past it, and the order of copies on the link."""

    size: int
    rank: int
    parameters: ServedChromosome
    strictly: bool


def first_latency_s(problem: Problem) -> float:
    """Return the latency of the better of two quick plans: one with the smallest pool, one with the largest.

    Raises InfeasibleBudget.
    """
    searcher = Offloading(problem, 0)
    return min(searcher.evaluate(guess, 0.0).latency_s for guess in searcher.extremes())


class Offloading(Searcher[OffloadingCandidate]):
    """Evaluates every pool with a quick choice for the parameters, then refines the best pools."""

    evaluations = 1 + 2 * len(SIZES) * len(RANKS) + 2 * LOOKED_AT * BEST

    def __init__(self, problem: Problem, seed: int) -> None:
        """Raise UnsupportedProblem, or InfeasibleBudget with the least budget for this partition."""
        graph = problem.graph
        require_served(problem, "offloading")
        self.problem = problem
        self._pools = ActivationPools(graph, problem.profile)
        self._sizes = self._pool_sizes()
        self._pool = cache(lambda size, rank: self._pools.within(self._sizes[size], RANKS[rank]))
        self._past = cache(lambda size: Genetic(problem, seed, OpOrders(problem, self._sizes[size])))
        """Genetic search past a pool of the given size."""
        self._variants = cache(self._find_variants)
        self._evaluated: list[tuple[float, OffloadingCandidate]] = []
        self._steps = self._search()

    def tell(self, candidates: Sequence[OffloadingCandidate], costs: Sequence[Cost]) -> None:
        self._evaluated += [(cost.latency_s, c) for cost, c in zip(costs, candidates, strict=False)]

    def pool_bytes(self, candidate: OffloadingCandidate) -> int:
        return self._sizes[candidate.size]

    def _schedule(self, candidate: OffloadingCandidate) -> Schedule | None:
        actions = self._pool(candidate.size, candidate.rank)
        if actions is None:
            return None
        work, resident_at, swaps = self._past(candidate.size).played(candidate.parameters)
        pool_bytes = self._sizes[candidate.size]
        return OffloadingEmitter(work, actions, pool_bytes, resident_at, swaps, candidate.strictly).schedule()

    def _search(self) -> Iterator[Sequence[OffloadingCandidate]]:
        middle = len(self._sizes) // 2
        yield [self._guess(middle, 0, strictly=False)]
        ranks = range(len(RANKS)) if self._pools.movable else range(1)
        yield [
            self._guess(size, rank, strictly=strictly)
            for size in range(len(self._sizes))
            for rank in ranks
            for strictly in (False, True)
        ]
        best = sorted(self._evaluated, key=lambda e: e[0])
        pools = list(dict.fromkeys((c.size, c.rank) for latency_s, c in best if latency_s < UNFIT.latency_s))
        yield [
            OffloadingCandidate(size, rank, parameters, strictly)
            for size, rank in pools[:LOOKED_AT]
            for parameters in self._variants(size)
            for strictly in (False, True)
        ]

    def extremes(self) -> list[OffloadingCandidate]:
        """Return candidates with the smallest and the largest pool."""
        return [self._guess(size, 0, strictly=False) for size in {0, len(self._sizes) - 1}]

    def _guess(self, size: int, rank: int, *, strictly: bool) -> OffloadingCandidate:
        return OffloadingCandidate(size, rank, self._past(size).first(), strictly)

    def _pool_sizes(self) -> list[int]:
        """Return pool sizes in bytes. The largest holds the activations' peak, or leaves ops the least workspace."""
        problem, graph = self.problem, self.problem.graph
        least = page_aligned(self._pools.least_bytes())
        alone, memory = Footprint.of_pool(graph, least), problem.memory
        alone.require(memory.partition_bytes, memory.workspace_bytes)
        spare = memory.workspace_bytes - alone.least_workspace_bytes(memory.partition_bytes)
        most = min(spare, max(Footprint.of(graph).activation_bytes - least, 0))
        return list(dict.fromkeys(least + page_aligned(int(share * most)) for share in SIZES if most or not share))

    def _find_variants(self, size: int) -> list[ServedChromosome]:
        """Return the best ways to stream past a pool, assuming that parameters have the link to themselves."""
        searcher, spent = self._past(size), 0
        evaluated: list[tuple[float, ServedChromosome]] = []
        while spent < searcher.evaluations and (candidates := searcher.ask()):
            costs = [searcher.evaluate(c, 0.0) for c in candidates]
            searcher.tell(candidates, costs)
            evaluated += [(cost.latency_s, c) for cost, c in zip(costs, candidates, strict=True)]
            spent += len(candidates)
        fastest = min(latency_s for latency_s, _ in evaluated)
        ties = [c for latency_s, c in evaluated if latency_s <= fastest * TIE]
        others = [c for _, c in sorted(evaluated, key=lambda e: e[0])]
        return list(dict.fromkeys([*ties[:1], *ties[-1:], *others]))[:BEST]


class OffloadingEmitter:
    """Makes one schedule, in which parameters stream and activations are offloaded within their pool.

    Both share the swap-in lane. Among the copies that may start, the one needed first is issued first. With `strictly`,
    no copy overtakes another that is needed sooner but cannot start yet.
    """

    def __init__(
        self,
        work: Workload,
        actions: Sequence[Action],
        pool_bytes: int,
        resident_at: Ints,
        swaps: Swaps,
        strictly: bool,
    ) -> None:
        """`pool_bytes` is the size of the pool, `actions` are those on activations in it."""
        self._work, self._actions, self._pool_bytes, self._strictly = work, actions, pool_bytes, strictly
        self._graph = work.footprint.graph
        self._copies = ParameterRows(work, resident_at, swaps)
        self._rows: list[Row] = []
        self._returning = deque[int]()
        """Activations that may return now."""
        self._returns_due = deque(self._find_returns_due())

    def schedule(self) -> Schedule:
        last = -1
        self._rows += self._copies.drops_after(-1)
        self._issue(-1)
        for verb, what in self._actions:
            if verb == SWAP_IN:
                self._returning.append(what)
                self._issue(last)
                continue
            self._rows.append((verb, what, NOTHING, NOTHING))
            if verb == COMPUTE:
                last = what
                self._rows += self._copies.drops_after(last)
                self._issue(last)
        assert not self._returning, "an activation returns without a use"
        return scheduled(self._work.numbering.graph, self._rows, self._copies.resident_at, self._pool_bytes)

    def _issue(self, k: int) -> None:
        """Issue every copy that may start after op k, in order of need."""
        while (parameter := self._copies.may_start(k)) or self._returning:
            first = self._is_activation_first(parameter, bool(self._returning))
            if first is None:
                return
            if first:
                self._returns_due.popleft()
                self._rows.append((SWAP_IN, self._returning.popleft(), NOTHING, NOTHING))
            else:
                self._rows.append(self._copies.swap_in())

    def _is_activation_first(self, parameter: bool, activation: bool) -> bool | None:
        """Whether the next copy is an activation's, not a parameter's; None if it cannot start yet."""
        ops = len(self._graph.ops)
        never = ops + 1
        needed_by = self._copies.needed_by
        parameter_due = never if needed_by is None else needed_by
        activation_due = self._returns_due[0] if self._returns_due else never
        if self._strictly or parameter_due >= ops:
            if activation_due < parameter_due and not activation:
                return None
            if parameter_due < activation_due and not parameter:
                return None
        return activation if activation != parameter else activation_due <= parameter_due

    def _find_returns_due(self) -> list[int]:
        """Return per swap-in, in order, the first op that uses this activation or one that is swapped in later."""
        due: list[int] = []
        upcoming = {t: len(self._graph.ops) - 1 for t in self._graph.outputs}
        for verb, what in reversed(self._actions):
            if verb == COMPUTE:
                upcoming |= dict.fromkeys(self._graph.ops[what].reads, what)
            elif verb == SWAP_IN:
                due.append(upcoming[what])
        return list(accumulate(due, min))[::-1]
