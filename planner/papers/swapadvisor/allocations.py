"""SwapAdvisor's operators on memory allocations (section 5.3): creation, crossover, mutation and repair.

CLS maps each tensor size, in ascending order, to a size class; CNT is the number of objects of each class. Classes are
numbered from 1, as in Figure 5. CLS starts at 1 and rises in steps of 0 or 1: the paper's restricted space.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.papers.swapadvisor.pools import TensorSizes, object_bytes

SPREAD: Final = 0.25
"""Standard deviation of a mutated count, as a fraction of the count; at least one object. The paper gives no number."""


@dataclass(frozen=True)
class Allocation:
    """CLS (`classes`) and CNT (`counts`)."""

    classes: Ints
    counts: Ints


@dataclass(frozen=True)
class AllocationSpace:
    """Allocations of a graph in a given memory."""

    sizes: TensorSizes
    memory_bytes: int

    def least(self, classes: Ints) -> Ints:
        """Return the objects of each class that some op needs at once: with fewer, no plan exists."""
        order = np.argsort(classes, kind="stable")
        first = np.searchsorted(classes[order], np.arange(1, classes.max() + 1))
        by_class = np.add.reduceat(self.sizes.at_once[:, order], first, axis=1)
        least: Ints = by_class.max(axis=0)
        return least

    def most(self, classes: Ints) -> Ints:
        """Return the objects of each class that can ever be in use."""
        return np.bincount(classes - 1, self.sizes.count).astype(np.int64)

    def repaired(self, classes: Ints, counts: Ints) -> Allocation:
        """Clip counts to the needed and the usable numbers of objects, and shrink them to fit in memory."""
        least = self.least(classes)
        bounded = np.clip(counts, least, np.maximum(self.most(classes), least))
        return Allocation(classes, shrink(bounded, object_bytes(self.sizes, classes), self.memory_bytes, least))

    @cached_property
    def leanest(self) -> Ints:
        """CLS with the least memory need of any op."""
        sizes = len(self.sizes.nbytes)
        before = np.zeros((len(self.sizes.at_once), sizes + 1), np.int64)
        np.cumsum(self.sizes.at_once, axis=1, out=before[:, 1:])
        least_bytes, cut = np.zeros(sizes + 1), np.zeros(sizes + 1, np.int64)
        # By dynamic programming: the last class starts after size `cut[high]`.
        for high in range(1, sizes + 1):
            alignment = np.maximum.accumulate(self.sizes.alignment[:high][::-1])[::-1]
            each = -(-self.sizes.nbytes[high - 1] // alignment) * alignment
            needs = least_bytes[:high] + each * (before[:, high, None] - before[:, :high]).max(axis=0)
            cut[high] = np.argmin(needs)
            least_bytes[high] = needs[cut[high]]
        steps, high = np.zeros(sizes, np.int64), sizes
        while high > 0:
            high = int(cut[high])
            steps[high] = 1
        return np.cumsum(steps)

    def random(self, classes: Ints, rng: np.random.Generator) -> Allocation:
        """Return random counts that use the memory: the needed objects, and shares of the rest by bytes and chance."""
        each, least = object_bytes(self.sizes, classes), self.least(classes)
        most = np.maximum(self.most(classes), least)
        counts = least.copy()
        weight = (most - least) * each * rng.exponential(size=len(each))
        left = self.memory_bytes - int(each @ counts)
        if left > 0 and weight.sum() > 0:
            counts += np.minimum((left * weight / weight.sum()).astype(np.int64) // each, most - least)
        return self.filled(Allocation(classes, counts), rng)

    def filled(self, allocation: Allocation, rng: np.random.Generator) -> Allocation:
        """Add objects that can be in use, class by class in random order, until none fits in memory.

        Crossover averages counts and the paper's repair only takes objects away, so memory would be left unused.
        """
        each, counts = object_bytes(self.sizes, allocation.classes), allocation.counts.copy()
        most = np.maximum(self.most(allocation.classes), self.least(allocation.classes))
        for c in rng.permutation(len(each)).tolist():
            left = self.memory_bytes - int(each @ counts)
            counts[c] += max(min(left // int(each[c]), int(most[c] - counts[c])), 0)
        return Allocation(allocation.classes, counts)

    def random_classes(self, rng: np.random.Generator) -> Ints:
        """Return a random CLS of the space."""
        return np.cumsum(np.concatenate([[1], rng.integers(0, 2, len(self.sizes.nbytes) - 1)]))

    def cross(self, first: Allocation, second: Allocation, cut: int) -> tuple[Allocation, Allocation]:
        """Return two children; C1 begins like the second parent, C2 like the first (Figure 5)."""
        return self._child(second, first, cut), self._child(first, second, cut)

    def _child(self, head: Allocation, tail: Allocation, cut: int) -> Allocation:
        joined = np.concatenate([head.classes[:cut], tail.classes[cut:]])
        classes = self.repaired_classes(joined)
        extended = np.concatenate([extend(head)[:cut], extend(tail)[cut:]])
        return self.repaired(classes, average(classes, extended))

    def mutated(self, allocation: Allocation, probability: float, rng: np.random.Generator) -> Allocation:
        """Change each element of CLS, and then of CNT, with this probability."""
        classes = self.mutated_classes(allocation.classes, probability, rng)
        counts = average(classes, extend(allocation))
        hit = rng.random(len(counts)) < probability
        drawn = np.rint(rng.normal(counts, np.maximum(SPREAD * counts, 1.0))).astype(np.int64)
        return self.repaired(classes, np.where(hit, drawn, counts))

    def repaired_classes(self, joined: Ints) -> Ints:
        """Return the CLS of the space that two parents' parts become."""
        return raised(joined)

    def mutated_classes(self, classes: Ints, probability: float, rng: np.random.Generator) -> Ints:
        """Toggle steps between 0 and 1, which shifts all later elements."""
        hit = rng.random(len(classes)) < probability
        steps = np.diff(classes, prepend=classes[0] - 1)
        hit[0] = False
        return np.cumsum(np.where(hit, 1 - steps, steps))


def raised(classes: Ints) -> Ints:
    """Repair a CLS: increase elements by the least amount that makes it rise in steps of 0 or 1."""
    index = np.arange(len(classes))
    from_right = np.maximum.accumulate((classes - index)[::-1])[::-1] + index
    return np.maximum(np.maximum.accumulate(classes), from_right)


def extend(allocation: Allocation) -> Ints:
    """Return CNT_EXT: for each tensor size, the objects that it can use."""
    return allocation.counts[allocation.classes - 1]


def average(classes: Ints, extended: Ints) -> Ints:
    """Return CNT from CNT_EXT: each class gets its sizes' average, rounded."""
    return np.rint(np.bincount(classes - 1, extended) / np.bincount(classes - 1)).astype(np.int64)


def shrink(counts: Ints, each: Ints, memory_bytes: int, least: Ints) -> Ints:
    """Repair a CNT: take from each class a number of objects inversely proportional to their size, until all fit.

    Every class thus loses the same bytes. None falls below `least`; if even that is too much, nothing fits.
    """
    counts = counts.copy()
    while (excess := int(each @ counts) - memory_bytes) > 0 and (counts > least).any():
        giving = np.flatnonzero(counts > least)
        cut = np.minimum(excess // (len(giving) * each[giving]), counts[giving] - least[giving])
        if not cut.any():
            enough = giving[each[giving] >= excess]
            counts[enough[np.argmin(each[enough])] if len(enough) else giving[np.argmax(each[giving])]] -= 1
        counts[giving] -= cut
    return counts
