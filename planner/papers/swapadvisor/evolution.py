"""Evolution of a population (SwapAdvisor, section 5.1) with any kind of chromosome."""

from collections.abc import Callable, Generator, Sequence
from typing import Final, TypeVar

import numpy as np

from cohabit.planner.problem import Cost
from cohabit.planner.search.searcher import Searcher

GENERATIONS: Final = 10
"""Number of generations in a search without a limit."""

C = TypeVar("C")


class Evolution(Searcher[C]):
    """A searcher whose steps are the generations of a population.

    Selection is elitist, unlike the paper's: by equation 1, a member that is 30 % slower than the best has 0.74 of its
    weight, so the population hardly improves.
    Subclasses make the first generation, and define `_crossed`, which returns two parents' children, and `_mutated`.
    """

    _crossed: Callable[[C, C], list[C]]
    _mutated: Callable[[C], C]

    def __init__(self, seed: int, population: int) -> None:
        self.evaluations = 1 + population + 2 * population * GENERATIONS
        self.living: list[tuple[C, Cost]] = []
        """The population after each generation, the best first."""
        self._population = population
        self._rng = np.random.default_rng(seed)
        self._costs: Sequence[Cost] = ()

    def tell(self, candidates: Sequence[C], costs: Sequence[Cost]) -> None:
        self._costs = costs

    def _generations(self, first: Sequence[C]) -> Generator[Sequence[C], None, None]:
        """Ask for the first generation, then endlessly for the children of the survivors."""
        self.living = yield from self._evaluated(first)
        while True:
            parents = [parent for parent, _ in self.living]
            everyone = [*self.living, *(yield from self._evaluated(self._children(parents)))]
            seconds = [self.seconds(cost) for _, cost in everyone]
            self.living = [everyone[i] for i in self._survivors(seconds)]

    def _evaluated(self, members: Sequence[C]) -> Generator[Sequence[C], None, list[tuple[C, Cost]]]:
        yield members
        return list(zip(members, self._costs, strict=False))

    def _children(self, parents: Sequence[C]) -> list[C]:
        """Return the mutated children of random pairs of parents."""
        pairs = self._rng.permutation(len(parents))[: len(parents) // 2 * 2].reshape(-1, 2)
        children = (child for i, j in pairs.tolist() for child in self._crossed(parents[i], parents[j]))
        return list(map(self._mutated, children))

    def _survivors(self, seconds: Sequence[float]) -> list[int]:
        return fastest(seconds, self._population)

    def seconds(self, cost: Cost) -> float:
        """Return the cost for selection; infinite if the candidate does not fit."""
        return self.problem.seconds(cost)


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
