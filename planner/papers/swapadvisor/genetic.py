"""SwapAdvisor (ASPLOS'20; thesis, chapter 4): a genetic algorithm over schedules and memory pools.

A candidate is an order of the ops and a pool; the swap planner (`pool_swaps`) makes a plan of the two, the
simulator evaluates it. The paper leaves open, and here it is so:

- The first generation has the graph's own order and random ones, and pools that ops can run in: random mappings of
  sizes to classes, and the one that needs the least memory.
- A generation has as many children as the population has members. Only candidates that fit survive, as long as
  there are any.
- The population is smaller than the paper's 144, which were chosen to suit 72 cores and half an hour: in ten seconds
  on one core, it has more generations.

The first candidate is the serial plan, which always fits. It is no part of the population.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.arrays import Floats, Ints
from planner.papers.swapadvisor import pool_lanes
from planner.papers.swapadvisor.allocations import Allocation, Space
from planner.papers.swapadvisor.pools import MemoryPool, pool_of, uses_of
from planner.papers.swapadvisor.schedules import cross_schedules, mutate_schedule, precedence, random_schedule
from planner.plan import Plan
from planner.problem import UNFIT, Cost, Problem
from planner.search.searcher import PlanSearcher
from planner.sequence.serial import require_single_budget, serial_plan

POPULATION: Final = 48
MUTATION: Final = 0.1
GENERATIONS: Final = 20
THRESHOLD: Final = 1.0
"""Of the time that the two copies of a displacement take; see `planner.papers.swapadvisor.pool_swaps`."""
OWN_ORDER: Final = 4
"""Of so many in the first generation, one has the graph's own order."""


@dataclass(frozen=True, slots=True)
class Chromosome:
    """A chromosome: SCH, CLS and CNT. Without any, the serial plan."""

    order: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


SERIAL: Final = Chromosome()


@dataclass(frozen=True)
class _Individual:
    order: Ints
    allocation: Allocation
    cost: Cost = UNFIT


class Genetic(PlanSearcher[Chromosome]):
    """Evolves a population of schedules and allocations.

    `schedules` and `allocations` tell which of the two is searched: without the first all have the graph's own
    order, without the second all have the same pool. `restricted` keeps CLS in the space of section 5.3.
    """

    def __init__(
        self,
        problem: Problem,
        seed: int,
        *,
        population: int = POPULATION,
        restricted: bool = True,
        schedules: bool = True,
        allocations: bool = True,
    ) -> None:
        require_single_budget(problem, "genetic")
        self.problem = problem
        self.evaluations = 1 + population * (GENERATIONS + 1)
        self.population_costs: tuple[Cost, ...] = ()
        """What the members of the living population cost, after each generation."""
        self._population = population
        self._schedules = schedules
        self._allocations = allocations
        self._uses, sizes = uses_of(problem.graph, problem.profile)
        self._space = Space(sizes, problem.memory_bytes, restricted)
        self._precedence = precedence(problem.graph)
        self._rng = np.random.default_rng(seed)
        self._costs: Sequence[Cost] = ()
        self._steps = self._evolve()

    def tell(self, candidates: Sequence[Chromosome], costs: Sequence[Cost]) -> None:
        self._costs = costs

    def evaluate(self, candidate: Chromosome, good_s: float) -> Cost:
        if candidate == SERIAL:
            return super().evaluate(candidate, good_s)
        pool = self._pool(candidate)
        if pool.nbytes > self.problem.memory_bytes:
            return UNFIT
        return pool_lanes.evaluate(self._uses, np.array(candidate.order), pool, THRESHOLD, good_s)

    def _plan(self, candidate: Chromosome) -> Plan:
        if candidate == SERIAL:
            return serial_plan(self.problem)
        order = np.array(candidate.order)
        return pool_lanes.write(self.problem, self._uses, order, self._pool(candidate), THRESHOLD)

    def _pool(self, candidate: Chromosome) -> MemoryPool:
        return pool_of(self._space.sizes, np.array(candidate.classes), np.array(candidate.counts))

    def _evolve(self) -> Generator[Sequence[Chromosome], None, None]:
        yield [SERIAL]
        if not self.problem.graph.ops or not len(self._space.sizes.nbytes):
            return
        living = yield from self._evaluated(self._first_generation())
        best_s = np.inf
        while True:
            self.population_costs = tuple(m.cost for m in living)
            children = yield from self._evaluated(self._children(living))
            best_s = min(best_s, *(m.cost.latency_s for m in (*living, *children)))
            living = self._survivors([*living, *children], best_s)

    def _evaluated(
        self, members: Sequence[_Individual]
    ) -> Generator[Sequence[Chromosome], None, list[_Individual]]:
        yield [_candidate(m) for m in members]
        return [_Individual(m.order, m.allocation, cost) for m, cost in zip(members, self._costs, strict=False)]

    def _first_generation(self) -> list[_Individual]:
        rng, space = self._rng, self._space
        own = np.arange(len(self.problem.graph.ops))
        fixed = space.random(space.leanest, rng)
        members = []
        for i in range(self._population):
            order = own if i % OWN_ORDER == 0 or not self._schedules else random_schedule(self._precedence, rng)
            allocation = fixed
            if self._allocations:
                allocation = space.random(space.leanest if i % 2 == 0 else space.random_classes(rng), rng)
            members.append(_Individual(order, allocation))
        return members

    def _children(self, living: Sequence[_Individual]) -> list[_Individual]:
        """Pairs of parents get two schedules and two allocations, and so four children, which then mutate."""
        rng = self._rng
        children: list[_Individual] = []
        while len(children) < self._population:
            for i, j in rng.permutation(len(living))[: len(living) // 2 * 2].reshape(-1, 2).tolist():
                children += self._crossed(living[i], living[j])
        return [self._mutated(c) for c in children[: self._population]]

    def _crossed(self, first: _Individual, second: _Individual) -> list[_Individual]:
        rng = self._rng
        orders: tuple[Ints, ...] = (first.order,)
        if self._schedules:
            orders = cross_schedules(first.order, second.order, int(rng.integers(len(first.order) + 1)))
        allocations: tuple[Allocation, ...] = (first.allocation,)
        if self._allocations:
            cut = int(rng.integers(len(first.allocation.classes) + 1))
            allocations = self._space.cross(first.allocation, second.allocation, cut)
        return [_Individual(order, allocation) for order in orders for allocation in allocations]

    def _mutated(self, member: _Individual) -> _Individual:
        order, allocation = member.order, member.allocation
        if self._schedules:
            order = mutate_schedule(order, self._precedence, MUTATION, self._rng)
        if self._allocations:
            allocation = self._space.mutated(allocation, MUTATION, self._rng)
        return _Individual(order, allocation)

    def _survivors(self, members: Sequence[_Individual], best_s: float) -> list[_Individual]:
        """Draw the next population by equation 1; twice the same only where fewer fit."""
        fitting = [m for m in members if np.isfinite(m.cost.latency_s)]
        if not fitting:
            return list(members[-self._population :])
        chance = survival([m.cost.latency_s for m in fitting], best_s)
        few = len(fitting) < self._population
        drawn = self._rng.choice(len(fitting), self._population, replace=few, p=chance)
        return [fitting[i] for i in drawn.tolist()]


def survival(times_s: Sequence[float], best_s: float) -> Floats:
    """Equation 1: the softmax of the normalised execution times."""
    normal = (best_s - np.array(times_s)) / best_s if best_s > 0 else np.zeros(len(times_s))
    weight = np.exp(normal)
    chance: Floats = weight / weight.sum()
    return chance


def _candidate(member: _Individual) -> Chromosome:
    return Chromosome(
        tuple(member.order.tolist()),
        tuple(member.allocation.classes.tolist()),
        tuple(member.allocation.counts.tolist()),
    )
