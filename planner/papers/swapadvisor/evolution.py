"""Evolution of a population (SwapAdvisor, section 5.1) with any kind of chromosome."""

from collections.abc import Callable, Generator, Sequence
from typing import Final, Literal, TypeVar

import numpy as np

from cohabit.planner.arrays import Floats
from cohabit.planner.problem import Cost
from cohabit.planner.search.searcher import Searcher

Selection = Literal["elitist", "softmax"]
"""Rule of survival. `softmax` is equation 1 to the letter: a member that is 30 % slower than the best has 0.74 of its
weight, so the population hardly improves. `elitist` keeps the fastest, with distinct costs."""

GENERATIONS: Final = 20
"""Number of generations in a search without a limit."""

C = TypeVar("C")


class Evolution(Searcher[C]):
    """A searcher whose steps are the generations of a population.

    Subclasses make the first generation, and define `_crossed`, which returns two parents' children, and `_mutated`.
    """

    _crossed: Callable[[C, C], list[C]]
    _mutated: Callable[[C], C]

    def __init__(self, seed: int, population: int, selection: Selection, generations: int = GENERATIONS) -> None:
        self.evaluations = 1 + population * (generations + 1)
        self.living: list[tuple[C, Cost]] = []
        """The population after each generation; with `elitist`, the best first."""
        self._population = population
        self._selection = selection
        self._rng = np.random.default_rng(seed)
        self._costs: Sequence[Cost] = ()

    def tell(self, candidates: Sequence[C], costs: Sequence[Cost]) -> None:
        self._costs = costs

    def _generations(self, first: Sequence[C]) -> Generator[Sequence[C], None, None]:
        """Ask for the first generation, then endlessly for the children of the survivors."""
        self.living = yield from self._evaluated(first)
        best_s = np.inf
        while True:
            parents = [parent for parent, _ in self.living]
            everyone = [*self.living, *(yield from self._evaluated(self._children(parents)))]
            seconds = [self.seconds(cost) for _, cost in everyone]
            best_s = min(best_s, *seconds)
            survivors = select(self._selection, seconds, best_s, self._population, self._rng)
            self.living = [everyone[i] for i in survivors]

    def _evaluated(self, members: Sequence[C]) -> Generator[Sequence[C], None, list[tuple[C, Cost]]]:
        yield members
        return list(zip(members, self._costs, strict=False))

    def _children(self, parents: Sequence[C]) -> list[C]:
        """Return one child per member of the population; pairs of parents have some each until there are enough."""
        children: list[C] = []
        while len(children) < self._population:
            pairs = self._rng.permutation(len(parents))[: len(parents) // 2 * 2].reshape(-1, 2)
            for i, j in pairs.tolist():
                children += self._crossed(parents[i], parents[j])
        return [self._mutated(child) for child in children[: self._population]]

    def seconds(self, cost: Cost) -> float:
        """Return the cost for selection; infinite if the candidate does not fit."""
        return self.problem.seconds(cost)


def select(
    selection: Selection, seconds: Sequence[float], best_s: float, count: int, rng: np.random.Generator
) -> list[int]:
    """Choose `count` survivors of a population. If none fits, these are the latest; else only fitting ones survive.

    A member survives twice only if fewer than `count` fit (`softmax`) or have distinct costs (`elitist`).
    """
    times_s = np.array(seconds)
    fitting = np.flatnonzero(np.isfinite(times_s))
    if not len(fitting):
        return list(range(len(seconds) - count, len(seconds)))
    if selection == "softmax":
        few = len(fitting) < count
        drawn = rng.choice(fitting, count, replace=few, p=survival(times_s[fitting].tolist(), best_s))
        return list(map(int, drawn))
    _, different = np.unique(times_s[fitting], return_index=True)  # in ascending order, the first of equals
    again = np.setdiff1d(np.arange(len(fitting)), different)
    again = again[np.argsort(times_s[fitting[again]], kind="stable")]
    ranked = fitting[np.concatenate([different, again])]
    return list(map(int, np.resize(ranked, count)))


def survival(times_s: Sequence[float], best_s: float) -> Floats:
    """Return the softmax of the normalised execution times (equation 1)."""
    normal = (best_s - np.array(times_s)) / best_s if best_s > 0 else np.zeros(len(times_s))
    weight = np.exp(normal)
    chance: Floats = weight / weight.sum()
    return chance
