"""The searcher `genetic`, for what is served: a memetic search, whose mutation is a short annealing walk.

A chromosome is an order of the ops and the decisions of `planner.streaming.stream`: the residents, whether each is
released, and how every copy goes. SwapAdvisor's pools of size classes (section 5.3) have no counterpart: all batch
sizes of a model share residents at fixed addresses, and the runtime places activations.

The first generation is seeded: greedy choices and a linear relaxation's are evaluated in all variants, and the best
begin four walks, which are compared after every round. Its best members are the population. From then on, each child
is a walk from one parent, or from the crossover of two; its order mutates seldom, as in SwapAdvisor, section 5.2. A
child that is better replaces its parent, so the best is never lost.

Plans of the same model for other memory sizes (`Problem.neighbours`) are seeds, too. They replace the variants, and
half of the walks. A search without a limit ends with the first later generation that gains little."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints
from cohabit.planner.bounds.relaxation import relax
from cohabit.planner.genetic.chromosome import ServedChromosome, decisions_of, order_of, renumbered
from cohabit.planner.genetic.crossover import crossed, refitted
from cohabit.planner.genetic.schedules import Precedence, mutate_schedule, precedence
from cohabit.planner.genetic.walk import FITS, LINK_WEIGHT, holds_up_to, walk
from cohabit.planner.layout.feasible import PAGE_BYTES, Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.order import has_reuse
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.search.searcher import Searcher
from cohabit.planner.streaming import stream
from cohabit.planner.streaming.emit import emit
from cohabit.planner.streaming.op_orders import OpOrders
from cohabit.planner.streaming.page_map import NO_MORE, NOWHERE
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
"""Number of parallel walks in the first generation."""
ROUNDS, ROUNDS_FROM_NEIGHBOURS = 8, 3
"""Number of rounds of each of these walks, and the number if there are plans for other memory sizes."""
WORK_PER_ROUND = 25_000
"""Ops and uses that a walk simulates per round, after which walks are compared: about 10 ms."""
MOST_STEPS = 40
HEAT = 0.004
"""Fraction of the cost by which the first steps may get worse."""
COOLED = 0.25
"""Fraction of HEAT in later generations."""
POPULATION = 12
GENERATIONS = 8
"""Maximum number of generations after the first in a search without a limit."""
LEAST_GAIN = 1e-3
"""Fraction of the cost that a generation must save; a search without a limit ends with the first that saves less."""
CROSSED = 0.5
"""Fraction of children with two parents."""
BY_PARAMETER = 0.25
"""Fraction of crossovers that take each parameter from either parent; the others exchange an interval of ops."""
REORDERED = 0.1
"""Fraction of children whose order mutates."""
RATES = (-3.0, -1.0)
"""Range of the decimal logarithm of the mutation rate of an order, drawn per child."""

Evaluated = tuple[float, ServedChromosome]
"""A cost for selection, and the candidate."""


class Genetic(Searcher[ServedChromosome]):
    """Evolves orders and streaming decisions.

    Raises InfeasibleBudget if activations do not fit, and UnsupportedProblem for anything but an inference in a
    partition and a workspace.
    """

    is_compiled = True

    def __init__(self, problem: Problem, seed: int, reordered: OpOrders | None = None) -> None:
        self.problem = problem
        self.reordered = OpOrders(problem) if reordered is None else reordered
        self._rng = np.random.default_rng(seed)
        self._evaluated: list[Evaluated] = []
        """Costs of the latest candidates."""
        self._count = 0
        """Number of evaluated candidates."""
        self._good_enough = np.inf
        """Cost above which a generation counts as the last."""
        self._decisions = lru_cache(maxsize=1024)(self._decide)
        self._steps = filter(None, self._ask())

    @cached_property
    def evaluations(self) -> int:
        variants = len(self._from_neighbours) or WIDENED * len(list(self._variants(0, ())))
        early = len(SMALL) * len(LEADS)
        first = len(self._starts) + len(self._starts) // 4 + variants + self._rounds * (CHAINS + early)
        return first + GENERATIONS * (POPULATION + early)

    @property
    def _rounds(self) -> int:
        return ROUNDS_FROM_NEIGHBOURS if self._from_neighbours else ROUNDS

    def tell(self, candidates: Sequence[ServedChromosome], costs: Sequence[Cost]) -> None:
        for candidate, cost in zip(candidates, costs, strict=False):
            busy_s = cost.link_bytes / self.problem.profile.swap_in.bandwidth_bytes_per_s
            self._evaluated.append((cost.latency_s + LINK_WEIGHT * busy_s, candidate))
            if is_optimal(self.reordered[0].work, cost):
                self._steps = iter(())
        self._count += len(costs)
        if min((cost for cost, _ in self._evaluated), default=0.0) > self._good_enough:
            self.evaluations = self._count

    def evaluate(self, candidate: ServedChromosome, good_s: float) -> Cost:
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        resident_at = self._home(work, decisions)
        latency_s, period_s, pages = stream.evaluate(work.arrays, work.numbering, resident_at, decisions, good_s)
        return Cost(latency_s, period_s, pages * PAGE_BYTES)

    def pool_bytes(self, candidate: ServedChromosome) -> int:
        return self.reordered[candidate.order].work.footprint.activation_bytes

    def _schedule(self, candidate: ServedChromosome) -> Schedule:
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        resident_at = self._home(work, decisions)
        return emit(work, resident_at, play(work.arrays, resident_at, decisions)[0])

    def played(self, candidate: ServedChromosome) -> tuple[Workload, Ints, Swaps]:
        """Return a candidate's `resident_at` and the swap-ins of one inference, in the order of their ops."""
        work, decisions = self.reordered[candidate.order].work, self._decisions(candidate)
        decisions = decisions._replace(lead=np.zeros_like(decisions.lead))
        resident_at = self._home(work, decisions)
        return work, resident_at, play(work.arrays, resident_at, decisions)[0]

    def first(self) -> ServedChromosome:
        """Return a quick candidate. Other orders of the ops are tried only if ops reread many weights."""
        orders = len(self.reordered) if has_reuse(self.problem.graph) else 1
        candidates = [next(self._initial(i)) for i in range(orders)]
        return min(candidates, key=lambda c: self.evaluate(c, 0.0).latency_s) if orders > 1 else candidates[0]

    def _ask(self) -> Iterator[Sequence[ServedChromosome]]:
        living = yield from self._first_generation()
        while True:
            children, parents = [], []
            for _ in range(POPULATION):
                parent = int(len(living) * self._rng.random() ** 2)
                children.append(self._child(living, parent))
                parents.append(parent)
            self._evaluated.clear()
            self._good_enough = (1 - LEAST_GAIN) * living[0][0]
            yield [*children, *self._small_ones_early(living[0][1])]
            # A child replaces its parent, so that the population stays diverse; variants of the best compete with all.
            told = self._evaluated
            for child, parent in zip(told, parents, strict=False):
                if child[0] < living[parent][0]:
                    living[parent] = child
            living = _distinct([*living, *told[len(children) :]])

    def _first_generation(self) -> Generator[Sequence[ServedChromosome], None, list[Evaluated]]:
        """Ask for seeds, and for rounds of walks from the best; returns the population."""
        # quick choices, then the relaxation's, then all variants of the best
        first = self.first()
        yield [first]
        yield [c for c in self._starts if c != first]
        yield list(self._relaxed())
        if self._from_neighbours:
            yield self._from_neighbours
        else:
            yield [variant for c in self._best(WIDENED) for variant in self._variants(c.order, c.residents())]
        # walks from the best, cooler in each round; the last walk restarts from the best
        chains, walked = self._best(CHAINS), list[Evaluated]()
        chains += [chains[0]] * (CHAINS - len(chains))
        for i in range(self._rounds):
            self._evaluated.clear()
            heat = HEAT * (1 - i / self._rounds)
            yield [*(self._walk(c, heat) for c in chains), *self._small_ones_early(chains[0])]
            walked += self._evaluated
            chains = self._best(CHAINS)
            chains[-1] = chains[0]
        return _distinct(walked)

    def _child(self, living: Sequence[Evaluated], parent: int) -> ServedChromosome:
        """Return a walk from a member of the population, often crossed with another; seldom in another order."""
        rng = self._rng
        order, found = living[parent][1].order, self._decisions(living[parent][1])
        if len(living) > 1 and rng.random() < CROSSED:
            other = (parent + int(rng.integers(1, len(living)))) % len(living)
            mate = self._in_order(living[other][1], order)
            arrays, fixed = self.reordered[order].work.arrays, self.problem.residents is not None
            low, high = sorted(rng.integers(len(arrays.op_s) + 1, size=2).tolist())
            low = -1 if rng.random() < BY_PARAMETER else low
            found = crossed(arrays, found, mate, low, high, fixed, int(rng.integers(2**31)))
        if rng.random() < REORDERED:
            rate = float(10 ** rng.uniform(*RATES))
            mutant = mutate_schedule(np.array(self.reordered[order].order), self._precedence, rate, rng)
            changed = self.reordered.number_of(tuple(mutant.tolist()))
            if changed is not None:
                found = renumbered(found, self.reordered[order], self.reordered[changed])
                order = changed
        return self._walk(ServedChromosome.of(order, found), COOLED * HEAT)

    def _in_order(self, candidate: ServedChromosome, order: int) -> Decisions:
        """Return a candidate's decisions, numbered as in some order."""
        return renumbered(self._decisions(candidate), self.reordered[candidate.order], self.reordered[order])

    @cached_property
    def _precedence(self) -> Precedence:
        return precedence(self.problem.graph)

    @cached_property
    def _from_neighbours(self) -> list[ServedChromosome]:
        """Candidates that decide as plans for other memory sizes do, with each rule for holes."""
        found = []
        for plan in self.problem.neighbours:
            order = self.reordered.number_of(order_of(plan))
            if order is None:
                continue
            work = self.reordered[order].work
            decisions = decisions_of(plan, work)
            if self.problem.residents is None:
                decisions = refitted(work.arrays, decisions, int(self._rng.integers(2**31)))
            else:
                given = work.pages_of(self.problem.residents) != NOWHERE
                kept = np.where(decisions.choice == STREAMED, RELEASED, decisions.choice)
                decisions = decisions._replace(choice=np.where(given, kept, STREAMED))
            # A released resident whose bytes nothing took looks like a kept one.
            released = np.where(decisions.choice == STREAMED, STREAMED, RELEASED)
            for choice in (decisions.choice,) if work.arrays.keeps else (decisions.choice, released):
                for fit in range(FITS):
                    rules = np.full(len(decisions.hold), fit)
                    found.append(ServedChromosome.of(order, decisions._replace(choice=choice, fit=rules)))
        return list(dict.fromkeys(found))

    def _best(self, count: int) -> list[ServedChromosome]:
        return [candidate for _, candidate in sorted(self._evaluated, key=lambda e: e[0])[:count]]

    @cached_property
    def _starts(self) -> list[ServedChromosome]:
        return list(dict.fromkeys(c for i in range(len(self.reordered)) for c in self._initial(i)))

    def _relaxed(self) -> Iterator[ServedChromosome]:
        """Yield candidates with the linear relaxation's residents, rounded."""
        problem = self.problem
        relaxed = relax(problem.graph, problem.profile, problem.memory)
        if relaxed is None or problem.residents is not None:
            return
        for i, view in enumerate(self.reordered):
            shares = np.array([relaxed.resident.get(t, 0.0) for t in view.work.parameters])
            yield next(self._variants(i, by_share(view.work, shares, view.work.arrays.partition_pages)))

    def _initial(self, order: int) -> Iterator[ServedChromosome]:
        """Yield initial solutions, each in its first variant."""
        work = self.reordered[order].work
        if self.problem.residents is not None:
            resident_at = work.pages_of(self.problem.residents)
            sets: list[tuple[int, ...]] = [tuple(np.flatnonzero(resident_at != NOWHERE).tolist())]
        else:
            sets = list(initial_residents(work))
        for residents in sets:
            yield next(self._variants(order, residents))

    def _variants(self, order: int, residents: Sequence[int]) -> Iterator[ServedChromosome]:
        """Yield candidates with these residents, without variants that are equal (with `keeps`, or without reuse)."""
        work = self.reordered[order].work
        longest_s = float(work.arrays.swap_s.max(initial=0.0))
        spans = (np.inf, 4 * longest_s, 0.0) if (work.arrays.use_next < NO_MORE).any() else (0.0,)
        lead = bytes(4 * len(work.arrays.use_parameter))
        for kept in (KEPT,) if work.arrays.keeps else (RELEASED, KEPT):
            choice = np.full(len(work.parameters), STREAMED, np.int8)
            choice[list(residents)] = kept
            for seconds in spans:
                hold = holds_up_to(work.arrays, seconds).tobytes()
                for fit in range(FITS):
                    yield ServedChromosome(order, choice.tobytes(), hold, lead, bytes([fit]) * len(hold))

    def _small_ones_early(self, candidate: ServedChromosome) -> Iterator[ServedChromosome]:
        """Yield variants in which copies of small parameters may go ahead of others by a share of the ops."""
        arrays = self.reordered[candidate.order].work.arrays
        size, still = arrays.size[arrays.use_parameter], self._walk(candidate, steps=0)
        for small in SMALL:
            for share in LEADS:
                lead = np.where(size <= np.quantile(arrays.size, small), int(share * len(arrays.op_s)), 0)
                yield replace(still, lead=lead.astype(np.int32).tobytes())

    def _walk(self, start: ServedChromosome, heat: float = 0.0, steps: int | None = None) -> ServedChromosome:
        """Return a candidate that stands for the best of a walk from this one's decisions."""
        arrays, found = self.reordered[start.order].work.arrays, self._decisions(start)
        if steps is None:
            steps = min(max(WORK_PER_ROUND // (len(arrays.op_s) + len(arrays.use_parameter)), 4), MOST_STEPS)
        return ServedChromosome.of(start.order, found, steps, heat, int(self._rng.integers(2**31)))

    def _decide(self, candidate: ServedChromosome) -> Decisions:
        start = candidate.decisions()
        if not candidate.steps:
            return start
        work, fixed = self.reordered[candidate.order].work, self.problem.residents is not None
        resident_at = self._home(work, start)
        return walk(
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


def _distinct(evaluated: Sequence[Evaluated]) -> list[Evaluated]:
    """Return the best members with distinct costs, the best first; at most POPULATION."""
    by_cost = {cost: (cost, candidate) for cost, candidate in reversed(evaluated)}
    return [by_cost[cost] for cost in sorted(by_cost)[:POPULATION]]
