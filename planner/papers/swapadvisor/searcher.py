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
- The population is smaller than the paper's 144, which suits 72 cores and half an hour: in ten seconds on one core, it
  has more generations.

The first candidate is the serial plan, which always fits. It is not part of the population.
"""

from collections.abc import Iterator, Sequence
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
from cohabit.planner.papers.swapadvisor.evolution import Evolution
from cohabit.planner.papers.swapadvisor.pool_schedule import schedule_of_pool
from cohabit.planner.papers.swapadvisor.pools import pool_of, uses_of
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import Schedule

POPULATION: Final = 48
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


class SwapAdvisor(Evolution[Chromosome]):
    """Evolves a population of schedules and allocations."""

    is_compiled = True

    def __init__(self, problem: Problem, seed: int, *, population: int = POPULATION) -> None:
        require_counted(problem, "swapadvisor")
        super().__init__(seed, population)
        self.problem = problem
        self._uses, sizes = uses_of(problem.graph, problem.profile)
        self._space = AllocationSpace(sizes, problem.memory.nbytes)
        self._precedence = precedence(problem.graph)
        self._share_of_orders = 0.5
        """Fraction of children whose schedule mutates; the allocation of the others does."""
        self._steps = self._evolve()

    def _schedule(self, candidate: Chromosome) -> Schedule | None:
        if candidate is SERIAL:
            return serial_schedule(self.problem)
        pool = pool_of(self._space.sizes, candidate.allocation.classes, candidate.allocation.counts)
        if pool.nbytes > self.problem.memory.nbytes:
            return None
        return schedule_of_pool(self.problem, self._uses, candidate.order, pool, THRESHOLD)

    def _evolve(self) -> Iterator[Sequence[Chromosome]]:
        yield [SERIAL]
        if self.problem.graph.ops and len(self._space.sizes.nbytes):
            yield from self._generations(self._first_generation())

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
