"""SwapAdvisor (ASPLOS'20; thesis, chapter 4): a genetic algorithm over schedules and memory pools.

A candidate is an order of the ops and a pool. The swap planner (`pool_swaps`) makes a plan of both, and the simulator
evaluates it. Choices that the paper leaves open:

- The first generation is random in the paper. Here, a quarter has the graph's own order or the one grouped by weights
  (if ops reread many). Random orders are those of `schedules.random_schedule`. Pools suffice for every op: half have
  random mappings of sizes to classes, half the mapping that needs the least memory.
- One part of a child mutates, its schedule or its allocation, at a rate drawn per child. The paper chooses one rate per
  network, with 10 % as a first guess (section 6.1): that changes a hundred ops of every child, in both parts at once.
- After each repair, objects are added until the memory is used.
- A third of the mutated schedules run ops of the same weights together, and a third run ops depth first.
- Pairs of parents are random, and each member is in one pair: S, the population before selection, is three times N_p.
  Only candidates that fit survive, as long as there are any.
- Selection is elitist, unlike the paper's: by equation 1, a member that is 30 % slower than the best has 0.74 of its
  weight, so the population hardly improves.
- The population is smaller than the paper's 144, which suits 72 cores and half an hour: in ten seconds on one core, it
  has more generations.

The first candidate is the serial plan, which always fits. It is not part of the population.
"""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.genetic.schedules import (
    Run,
    cross_schedules,
    mutate_schedule,
    precedence,
    random_schedule,
)
from cohabit.planner.order import by_parameters, has_reuse
from cohabit.planner.papers.swapadvisor.allocations import Allocation, AllocationSpace
from cohabit.planner.papers.swapadvisor.pool_schedule import schedule_of_pool
from cohabit.planner.papers.swapadvisor.pools import pool_of, uses_of
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import Schedule
from cohabit.planner.search.searcher import Searcher

POPULATION: Final = 48
GENERATIONS: Final = 10
"""Number of generations in a search without a limit."""
ORDER_RATES: Final = (1e-4, 1e-1)
"""Range of the mutation rate of a schedule, drawn log-uniformly per child."""
POOL_RATES: Final = (3e-3, 1e-1)
"""The same for CLS and CNT."""
RUN_RATES: Final = (1e-3, 1e-1)
"""Range of the mutation rate of schedules in which each op drawn is followed by a run of others."""
RUNS: Final[tuple[Run, ...]] = ("", "weights", "newest")
"""Kinds of mutation of a schedule; each is as likely."""
THRESHOLD: Final = 1.0
"""In units of the time of a displacement's two copies; see `planner.papers.swapadvisor.pool_swaps`."""
GIVEN_ORDER: Final = 4
"""One in this many members of the first generation has the graph's own order or the one by weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Chromosome:
    """A chromosome: SCH, and CLS and CNT. Arrays may be shared with other chromosomes, and never change."""

    order: Ints
    allocation: Allocation


_NONE: Final = np.empty(0, np.int64)
SERIAL: Final = Chromosome(_NONE, Allocation(_NONE, _NONE))
"""Stands for the serial plan."""


class SwapAdvisor(Searcher[Chromosome]):
    """Evolves a population of schedules and allocations (section 5.1)."""

    is_compiled = True

    def __init__(self, problem: Problem, seed: int, *, population: int = POPULATION) -> None:
        require_counted(problem, "swapadvisor")
        self.problem = problem
        self.evaluations = 1 + population + 2 * population * GENERATIONS
        self.living: list[tuple[Chromosome, Cost]] = []
        """The population after each generation, the best first."""
        self._population = population
        self._rng = np.random.default_rng(seed)
        self._costs: Sequence[Cost] = ()
        self._uses, sizes = uses_of(problem.graph, problem.profile)
        self._space = AllocationSpace(sizes, problem.memory.nbytes)
        self._precedence = precedence(problem.graph)
        self._share_of_orders = 0.5
        """Fraction of children whose schedule mutates; the allocation of the others does."""
        self._steps = self._evolve()

    def tell(self, candidates: Sequence[Chromosome], costs: Sequence[Cost]) -> None:
        self._costs = costs

    def _schedule(self, candidate: Chromosome) -> Schedule | None:
        if candidate is SERIAL:
            return serial_schedule(self.problem)
        pool = pool_of(self._space.sizes, candidate.allocation.classes, candidate.allocation.counts)
        if pool.nbytes > self.problem.memory.nbytes:
            return None
        return schedule_of_pool(self.problem, self._uses, candidate.order, pool, THRESHOLD)

    def _evolve(self) -> Iterator[Sequence[Chromosome]]:
        """Ask for the serial plan, the first generation, then endlessly for the children of the survivors."""
        yield [SERIAL]
        if not self.problem.graph.ops or not len(self._space.sizes.nbytes):
            return
        self.living = yield from self._evaluated(self._first_generation())
        while True:
            parents = [parent for parent, _ in self.living]
            everyone = [*self.living, *(yield from self._evaluated(self._children(parents)))]
            seconds = [self.problem.seconds(cost) for _, cost in everyone]
            self.living = [everyone[i] for i in self._survivors(seconds)]

    def _evaluated(
        self, members: Sequence[Chromosome]
    ) -> Generator[Sequence[Chromosome], None, list[tuple[Chromosome, Cost]]]:
        yield members
        return list(zip(members, self._costs, strict=False))

    def _first_generation(self) -> list[Chromosome]:
        rng, space = self._rng, self._space
        graph = self.problem.graph
        given = [np.arange(len(graph.ops))]
        if has_reuse(graph):
            given.append(np.array(by_parameters(graph), np.int64))
        members = []
        for i in range(self._population):
            chosen, is_random = divmod(i, GIVEN_ORDER)
            order = random_schedule(self._precedence, rng) if is_random else given[chosen % len(given)]
            classes = space.leanest if i % 2 == 0 else space.random_classes(rng)
            members.append(Chromosome(order, space.random(classes, rng)))
        return members

    def _children(self, parents: Sequence[Chromosome]) -> list[Chromosome]:
        """Return the mutated children of random pairs of parents."""
        pairs = self._rng.permutation(len(parents))[: len(parents) // 2 * 2].reshape(-1, 2)
        children = (child for i, j in pairs.tolist() for child in self._crossed(parents[i], parents[j]))
        return list(map(self._mutated, children))

    def _crossed(self, first: Chromosome, second: Chromosome) -> list[Chromosome]:
        """Return four children: both schedules with both allocations."""
        cut = int(self._rng.integers(len(first.order) + 1))
        orders = cross_schedules(first.order, second.order, cut)
        cut = int(self._rng.integers(len(first.allocation.classes) + 1))
        allocations = self._space.cross(first.allocation, second.allocation, cut)
        return [Chromosome(order, allocation) for order in orders for allocation in allocations]

    def _mutated(self, child: Chromosome) -> Chromosome:
        order, allocation = child.order, child.allocation
        if self._rng.random() < self._share_of_orders:
            run = RUNS[int(self._rng.integers(len(RUNS)))]
            rate = self._rate(RUN_RATES if run else ORDER_RATES)
            order = mutate_schedule(order, self._precedence, rate, self._rng, run)
        else:
            allocation = self._space.mutated(allocation, self._rate(POOL_RATES), self._rng)
        return Chromosome(order, self._space.filled(allocation, self._rng))

    def _rate(self, rates: tuple[float, float]) -> float:
        return float(np.exp(self._rng.uniform(*np.log(rates))))

    def _survivors(self, seconds: Sequence[float]) -> list[int]:
        return fastest(seconds, self._population)


def fastest(seconds: Sequence[float], count: int) -> list[int]:
    """Choose the `count` fastest of a population with distinct costs. If none fits, choose the latest.

    A member survives twice only if fewer than `count` fit.
    """
    times_s = np.array(seconds)
    fitting = np.flatnonzero(np.isfinite(times_s))
    if not len(fitting):
        return list(range(len(seconds) - count, len(seconds)))
    _, different = np.unique(times_s[fitting], return_index=True)  # in ascending order, the first of equals
    again = np.setdiff1d(np.arange(len(fitting)), different)
    again = again[np.argsort(times_s[fitting[again]], kind="stable")]
    ranked = fitting[np.concatenate([different, again])]
    return list(map(int, np.resize(ranked, count)))
