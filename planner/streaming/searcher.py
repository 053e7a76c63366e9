"""The searcher `streaming`: simulated annealing chooses the residents; other parameters stream through memory.

Ops run in the graph's order, or grouped by the parameters they read: an unrolled recurrent network then needs each
layer's weights once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain, repeat

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints
from cohabit.planner.bounds.relaxation import relax
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.order import has_reuse
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.streaming import stream
from cohabit.planner.streaming.anneal import FITS, LINK_WEIGHT, anneal, holds_up_to
from cohabit.planner.streaming.emit import emit
from cohabit.planner.streaming.op_orders import OpOrders
from cohabit.planner.streaming.page_map import NOWHERE
from cohabit.planner.streaming.residents import by_share, initial_residents
from cohabit.planner.streaming.stream import (
    KEPT,
    RELEASED,
    STREAMED,
    Decisions,
    Swaps,
    place_residents,
    play,
    uniform,
)
from cohabit.planner.streaming.workload import Workload

WIDENED = 4
"""Number of quick choices tried in every variant."""
SMALL = (0.5, 0.8)
"""Fractions of the parameters that count as small."""
LEADS = (0.03, 0.1)
"""Fractions of the ops by which copies of small parameters may go ahead."""
CHAINS = 4
"""Number of parallel walks."""
ROUNDS = 8
"""Number of rounds of each walk in a search without a limit."""
WORK_PER_ROUND = 25_000
"""Ops and uses that a walk simulates per round, after which walks are compared: about 10 ms."""
MOST_STEPS = 40
HEAT = 0.004
"""Fraction of the cost by which the first steps may get worse."""


@dataclass(frozen=True, slots=True)
class StreamingCandidate:
    """Decisions as bytes; with `steps`, the best decisions of a walk from them."""

    order: int
    choice: bytes
    hold: bytes
    lead: bytes
    fit: bytes
    steps: int = 0
    heat: float = 0.0
    seed: int = 0

    def decisions(self) -> Decisions:
        choice = np.frombuffer(self.choice, np.int8).astype(np.int64)
        lead = np.frombuffer(self.lead, np.int32).astype(np.int64)
        hold = np.frombuffer(self.hold, np.bool_).copy()
        return Decisions(choice, hold, np.frombuffer(self.fit, np.int8).astype(np.int64), lead)

    def residents(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(np.frombuffer(self.choice, np.int8) != STREAMED).tolist())


class Streaming(Searcher[StreamingCandidate]):
    """Evaluates initial solutions, then continues several annealing walks from the best."""

    is_compiled = True

    def __init__(self, problem: Problem, seed: int, reordered: OpOrders | None = None) -> None:
        self.problem = problem
        self.reordered = OpOrders(problem) if reordered is None else reordered
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._evaluated: list[tuple[float, StreamingCandidate]] = []
        self._decisions = lru_cache(maxsize=64)(self._decide)
        self._steps = filter(None, self._ask())

    @cached_property
    def evaluations(self) -> int:
        variants = len(list(self._variants(0, ())))
        in_round = CHAINS + len(SMALL) * len(LEADS)
        return len(self._starts) + len(self._starts) // 4 + WIDENED * variants + ROUNDS * in_round

    def tell(self, candidates: Sequence[StreamingCandidate], costs: Sequence[Cost]) -> None:
        for candidate, cost in zip(candidates, costs, strict=False):
            busy_s = cost.link_bytes / self.problem.profile.swap_in.bandwidth_bytes_per_s
            self._evaluated.append((cost.latency_s + LINK_WEIGHT * busy_s, candidate))
            if is_optimal(self.reordered[0].work, cost):
                self._steps = iter(())

    def evaluate(self, candidate: StreamingCandidate, good_s: float) -> Cost:
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        resident_at = self._home(work, decisions)
        latency_s, period_s, pages = stream.evaluate(work.arrays, work.numbering, resident_at, decisions, good_s)
        return Cost(latency_s, period_s, pages * PAGE_BYTES)

    def pool_bytes(self, candidate: StreamingCandidate) -> int:
        return self.reordered[candidate.order].work.footprint.activation_bytes

    def _schedule(self, candidate: StreamingCandidate) -> Schedule:
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        resident_at = self._home(work, decisions)
        return emit(work, resident_at, play(work.arrays, resident_at, decisions)[0])

    def played(self, candidate: StreamingCandidate) -> tuple[Workload, Ints, Swaps]:
        """Return a candidate's `resident_at` and the swap-ins of one inference, in the order of their ops."""
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        decisions = decisions._replace(lead=np.zeros_like(decisions.lead))
        resident_at = self._home(work, decisions)
        return work, resident_at, play(work.arrays, resident_at, decisions)[0]

    def first(self) -> StreamingCandidate:
        """Return a quick candidate. Other orders of the ops are tried only if ops reread many weights."""
        orders = len(self.reordered) if has_reuse(self.problem.graph) else 1
        candidates = [next(self._initial(i)) for i in range(orders)]
        return min(candidates, key=lambda c: self.evaluate(c, 0.0).latency_s) if orders > 1 else candidates[0]

    def _ask(self) -> Iterator[Sequence[StreamingCandidate]]:
        # quick choices, then the relaxation's, then all variants of the best
        first = self.first()
        yield [first]
        yield [c for c in self._starts if c != first]
        yield list(self._relaxed())
        yield [variant for c in self._best(WIDENED) for variant in self._variants(c.order, c.residents())]
        # annealing walks from the best, cooler in each round; the last walk restarts from the best
        chains = self._best(CHAINS)
        chains += [chains[0]] * (CHAINS - len(chains))
        heats = [HEAT * (1 - i / ROUNDS) for i in range(ROUNDS)]
        for heat in chain(heats, repeat(HEAT / 4)):
            self._evaluated.clear()
            yield [self._walk(c, heat) for c in chains] + list(self._small_ones_early(chains[0]))
            chains = self._best(CHAINS)
            chains[-1] = chains[0]

    def _best(self, count: int) -> list[StreamingCandidate]:
        return [candidate for _, candidate in sorted(self._evaluated, key=lambda e: e[0])[:count]]

    @cached_property
    def _starts(self) -> list[StreamingCandidate]:
        return list(dict.fromkeys(c for i in range(len(self.reordered)) for c in self._initial(i)))

    def _relaxed(self) -> Iterator[StreamingCandidate]:
        """Yield candidates with the linear relaxation's residents, rounded."""
        problem = self.problem
        relaxed = relax(problem.graph, problem.profile, problem.memory)
        if relaxed is None or problem.residents is not None:
            return
        for i, view in enumerate(self.reordered):
            shares = np.array([relaxed.resident.get(t, 0.0) for t in view.work.parameters])
            yield next(self._variants(i, by_share(view.work, shares, view.work.arrays.partition_pages)))

    def _initial(self, order: int) -> Iterator[StreamingCandidate]:
        """Yield initial solutions, each in its first variant."""
        work = self.reordered[order].work
        if self.problem.residents is not None:
            resident_at = work.pages_of(self.problem.residents)
            sets: list[tuple[int, ...]] = [tuple(np.flatnonzero(resident_at != NOWHERE).tolist())]
        else:
            sets = list(initial_residents(work))
        for residents in sets:
            yield next(self._variants(order, residents))

    def _variants(self, order: int, residents: Sequence[int]) -> Iterator[StreamingCandidate]:
        """Yield candidates with these residents, without variants that are equal (with `keeps`, or without reuse)."""
        work = self.reordered[order].work
        longest_s = float(work.arrays.swap_s.max(initial=0.0))
        spans = (np.inf, 4 * longest_s, 0.0) if len(work.arrays.reused) else (0.0,)
        lead = bytes(4 * len(work.arrays.use_parameter))
        for kept in (KEPT,) if work.arrays.keeps else (RELEASED, KEPT):
            choice = np.full(len(work.parameters), STREAMED, np.int8)
            choice[list(residents)] = kept
            for seconds in spans:
                hold = holds_up_to(work.arrays, seconds).tobytes()
                for fit in range(FITS):
                    yield StreamingCandidate(order, choice.tobytes(), hold, lead, bytes([fit]) * len(hold))

    def _small_ones_early(self, candidate: StreamingCandidate) -> Iterator[StreamingCandidate]:
        """Yield variants in which copies of small parameters may go ahead of others by a share of the ops."""
        arrays = self.reordered[candidate.order].work.arrays
        size, still = arrays.size[arrays.use_parameter], self._walk(candidate, steps=0)
        for small in SMALL:
            for share in LEADS:
                lead = np.where(size <= np.quantile(arrays.size, small), int(share * len(arrays.op_s)), 0)
                yield replace(still, lead=lead.astype(np.int32).tobytes())

    def _walk(self, start: StreamingCandidate, heat: float = 0.0, steps: int | None = None) -> StreamingCandidate:
        """Return a candidate that stands for the best of a walk from this one's decisions."""
        arrays, found = self.reordered[start.order].work.arrays, self._decisions(start)
        if steps is None:
            steps = min(max(WORK_PER_ROUND // (len(arrays.op_s) + len(arrays.use_parameter)), 4), MOST_STEPS)
        choice, hold = found.choice.astype(np.int8).tobytes(), found.hold.tobytes()
        lead, fit = found.lead.astype(np.int32).tobytes(), found.fit.astype(np.int8).tobytes()
        return StreamingCandidate(start.order, choice, hold, lead, fit, steps, heat, int(self._rng.integers(2**31)))

    def _decide(self, candidate: StreamingCandidate) -> Decisions:
        start = candidate.decisions()
        if not candidate.steps:
            return start
        work, fixed = self.reordered[candidate.order].work, self.problem.residents is not None
        resident_at = self._home(work, start)
        return anneal(
            work.arrays, work.numbering, start, resident_at, fixed, candidate.steps, candidate.heat, candidate.seed
        )

    def _home(self, work: Workload, decisions: Decisions) -> Ints:
        given = self.problem.residents
        return place_residents(work.arrays, decisions.choice) if given is None else work.pages_of(given)


def is_optimal(work: Workload, cost: Cost) -> bool:
    """Whether little is left to improve: no op waits, and hardly any copy is avoidable."""
    footprint, arrays = work.footprint, work.arrays
    pages = arrays.partition_pages + arrays.window_pages - max(footprint.op_pages)
    necessary = max(footprint.graph.parameter_bytes - max(pages, 0) * PAGE_BYTES, 0)
    return cost.period_s <= work.profile.compute_s * (1 + 1e-6) and cost.link_bytes <= necessary


def first_latency_s(footprint: Footprint, profile: Profile, memory: Memory) -> float:
    """Return the latency of the best of a few initial solutions. Raises InfeasibleBudget."""
    work = Workload.of(footprint, profile, memory, GraphArrays.of(footprint.graph, profile))
    hold = holds_up_to(work.arrays, float(work.arrays.swap_s.max(initial=0.0)))
    least_s = np.inf
    for residents in initial_residents(work):
        choice = np.full(len(work.parameters), STREAMED)
        choice[list(residents)] = RELEASED
        for fit in range(FITS):
            decisions = uniform(choice, hold, fit)
            latency_s, _, _ = stream.evaluate(
                work.arrays, work.numbering, place_residents(work.arrays, choice), decisions, 0.0
            )
            least_s = min(least_s, latency_s)
        if least_s <= profile.compute_s * (1 + 1e-6):
            break
    return least_s
