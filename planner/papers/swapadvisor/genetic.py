"""SwapAdvisor (ASPLOS'20; thesis, chapter 4): a genetic algorithm over schedules and memory pools.

A candidate is an order of the ops and a pool. The swap planner (`pool_swaps`) makes a plan of both, and the simulator
evaluates it. Choices that the paper leaves open:

- The first generation has the graph's own order, the one grouped by weights (if ops reread many), and random orders.
  Its pools suffice for every op: random mappings of sizes to classes, and the mapping that needs the least memory.
- A generation has one child per member of the population. Only candidates that fit survive, as long as there are
  any.
- The population is smaller than the paper's 144, which suits 72 cores and half an hour: in ten seconds on one core, it
  has more generations.

The first candidate is the serial plan, which always fits. It is not part of the population.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.order import by_parameters, has_reuse
from cohabit.planner.papers.swapadvisor.allocations import Allocation, AllocationSpace
from cohabit.planner.papers.swapadvisor.evolution import Evolution, Selection
from cohabit.planner.papers.swapadvisor.pool_schedule import schedule_of_pool
from cohabit.planner.papers.swapadvisor.pools import pool_of, uses_of
from cohabit.planner.papers.swapadvisor.schedules import (
    cross_schedules,
    mutate_schedule,
    precedence,
    random_schedule,
)
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.serial import require_counted, serial_schedule
from cohabit.planner.schedule.table import Schedule

POPULATION: Final = 48
MUTATION: Final = 0.1
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


class Genetic(Evolution[Chromosome]):
    """Evolves a population of schedules and allocations.

    `schedules` and `allocations` tell which of the two is searched: without the former, all have the graph's own
    order; without the latter, all have the same pool. `restricted` keeps CLS in the space of section 5.3. The
    paper's `selection` is "softmax".
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        population: int = POPULATION,
        selection: Selection = "elitist",
        restricted: bool = True,
        schedules: bool = True,
        allocations: bool = True,
    ) -> None:
        require_counted(problem, "genetic")
        super().__init__(seed, population, selection)
        self.problem = problem
        self._schedules = schedules
        self._allocations = allocations
        self._uses, sizes = uses_of(problem.graph, problem.profile)
        self._space = AllocationSpace(sizes, problem.memory.nbytes, restricted)
        self._precedence = precedence(problem.graph)
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
        fixed = space.random(space.leanest, rng)
        members = []
        for i in range(self._population):
            order = given[0]
            if self._schedules:
                chosen, is_random = divmod(i, GIVEN_ORDER)
                order = random_schedule(self._precedence, rng) if is_random else given[chosen % len(given)]
            allocation = fixed
            if self._allocations:
                allocation = space.random(space.leanest if i % 2 == 0 else space.random_classes(rng), rng)
            members.append(Chromosome(order, allocation))
        return members

    def _crossed(self, first: Chromosome, second: Chromosome) -> list[Chromosome]:
        """Return four children: combinations of two schedules and two allocations, if both are searched."""
        rng = self._rng
        orders: tuple[Ints, ...] = (first.order,)
        if self._schedules:
            cut = int(rng.integers(len(first.order) + 1))
            orders = cross_schedules(first.order, second.order, cut)
        allocations: tuple[Allocation, ...] = (first.allocation,)
        if self._allocations:
            cut = int(rng.integers(len(first.allocation.classes) + 1))
            allocations = self._space.cross(first.allocation, second.allocation, cut)
        return [Chromosome(order, allocation) for order in orders for allocation in allocations]

    def _mutated(self, child: Chromosome) -> Chromosome:
        order, allocation = child.order, child.allocation
        if self._schedules:
            order = mutate_schedule(order, self._precedence, MUTATION, self._rng)
        if self._allocations:
            allocation = self._space.mutated(allocation, MUTATION, self._rng)
        return Chromosome(order, allocation)
