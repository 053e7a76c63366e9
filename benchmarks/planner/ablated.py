"""SwapAdvisor's search with one part left out or replaced, for `benchmarks.planner.ablation`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.genetic.schedules import random_schedule
from cohabit.planner.papers.swapadvisor.allocations import Allocation, AllocationSpace
from cohabit.planner.papers.swapadvisor.pools import object_bytes
from cohabit.planner.papers.swapadvisor.searcher import Chromosome, SwapAdvisor, fastest
from cohabit.planner.problem import Problem

Order = Literal["searched", "random", "torch's"]


@dataclass(frozen=True)
class Way:
    """What is searched, and how. What is not searched is the same in all members."""

    order: Order = "searched"
    """If "random", all members have one random order, if "torch's", the graph's own."""
    allocations: bool = True
    """Whether allocations are searched. If not, all members have one random pool."""
    restricted: bool = True
    """Whether CLS stays in the restricted space of section 5.3."""
    softmax: bool = False
    """Whether selection is the paper's (equation 1)."""


WAYS: Final[Mapping[str, Way]] = {
    "both": Way(),
    "schedules only": Way(allocations=False),
    "allocations only, a random order": Way("random"),
    "allocations only, torch's order": Way("torch's"),
    "both, softmax selection": Way(softmax=True),
    "both, CLS unrestricted": Way(restricted=False),
}


class UnrestrictedSpace(AllocationSpace):
    """Allocations whose CLS maps any size to any class."""

    def random_classes(self, rng: np.random.Generator) -> Ints:
        sizes = len(self.sizes.nbytes)
        return compact(rng.integers(1, sizes + 1, sizes))

    def repaired_classes(self, joined: Ints) -> Ints:
        return compact(joined)

    def mutated_classes(self, classes: Ints, probability: float, rng: np.random.Generator) -> Ints:
        """Draw any class for each element that mutates."""
        hit = rng.random(len(classes)) < probability
        return compact(np.where(hit, rng.integers(1, len(classes) + 1, len(classes)), classes))


class AblatedGenetic(SwapAdvisor):
    """The genetic search in one of its ways, from random orders and random pools only, as in section 5.1."""

    def __init__(self, problem: Problem, seed: int, population: int, way: Way) -> None:
        super().__init__(problem, seed, population=population)
        self._way = way
        self._best_s = np.inf
        if not way.restricted:
            self._space = UnrestrictedSpace(self._space.sizes, self._space.memory_bytes)
        self._one_order = np.arange(len(problem.graph.ops))
        if way.order == "random":
            self._one_order = random_schedule(self._precedence, self._rng)
        if way.order != "searched":
            self._share_of_orders = 0.0
        if not way.allocations:
            self._share_of_orders = 1.0
            self._one_pool = self._fitting_pool()

    def _fitting_pool(self) -> Allocation:
        """Return a random pool that fits in memory. Random mappings that need too much are drawn again."""
        space = self._space
        while True:
            pool = space.random(space.random_classes(self._rng), self._rng)
            if object_bytes(space.sizes, pool.classes) @ pool.counts <= space.memory_bytes:
                return pool

    def _first_generation(self) -> list[Chromosome]:
        space, rng = self._space, self._rng
        return [
            self._fixed(random_schedule(self._precedence, rng), space.random(space.random_classes(rng), rng))
            for _ in range(self._population)
        ]

    def _crossed(self, first: Chromosome, second: Chromosome) -> list[Chromosome]:
        """Return two children if schedules or allocations are not searched: one per other half."""
        children = super()._crossed(first, second)
        if self._way.order != "searched":
            return children[:2]
        return children if self._way.allocations else children[::2]

    def _mutated(self, child: Chromosome) -> Chromosome:
        mutated = super()._mutated(child)
        return self._fixed(mutated.order, mutated.allocation)

    def _fixed(self, order: Ints, allocation: Allocation) -> Chromosome:
        return Chromosome(
            order if self._way.order == "searched" else self._one_order,
            allocation if self._way.allocations else self._one_pool,
        )

    def _survivors(self, seconds: Sequence[float]) -> list[int]:
        self._best_s = min(self._best_s, *seconds)
        if not self._way.softmax:
            return super()._survivors(seconds)
        return drawn_by_softmax(seconds, self._best_s, self._population, self._rng)


def drawn_by_softmax(seconds: Sequence[float], best_s: float, count: int, rng: np.random.Generator) -> list[int]:
    """Draw `count` survivors by equation 1, all different if as many fit. If none fits, choose the latest."""
    times_s = np.array(seconds)
    fitting = np.flatnonzero(np.isfinite(times_s))
    if not len(fitting):
        return fastest(seconds, count)
    drawn = rng.choice(fitting, count, replace=len(fitting) < count, p=survival(times_s[fitting].tolist(), best_s))
    return list(map(int, drawn))


def survival(times_s: Sequence[float], best_s: float) -> Floats:
    """Return the softmax of the normalised execution times (equation 1)."""
    normal = (best_s - np.array(times_s)) / best_s if best_s > 0 else np.zeros(len(times_s))
    weight = np.exp(normal)
    chance: Floats = weight / weight.sum()
    return chance


def compact(classes: Ints) -> Ints:
    """Renumber the occurring classes 1, 2, ... in the same order."""
    occurring: Ints = np.unique(classes, return_inverse=True)[1].astype(np.int64) + 1
    return occurring
