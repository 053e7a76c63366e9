"""Which parameters to keep in the partition: quick guesses, for the simulator to judge.

All work on parameters in the order of first use, and return numbers in that order.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from planner.workload import Workload

Ints = NDArray[np.int64]
Choice = tuple[int, ...]


def guesses(work: Workload) -> Iterator[Choice]:
    """Some sets of residents that fit the partition, without repeats."""
    made = (prefix(work), spread(work), paced(work), largest_first(work))
    yield from dict.fromkeys(made)


def prefix(work: Workload) -> Choice:
    """Those used first, so that copies of the others get ahead of the ops."""
    return fill(work, ())


def largest_first(work: Workload) -> Choice:
    """The largest, so that few copies are left."""
    return _take(work, (), np.argsort(-work.arrays.size, kind="stable"))


def spread(work: Workload) -> Choice:
    """A constant share of the bytes, so that the link keeps pace with the ops all along."""
    size = work.arrays.size
    share = work.arrays.partition_pages / max(int(size.sum()), 1)
    kept: list[int] = []
    kept_pages = passed_pages = 0
    for p in range(len(size)):
        passed_pages += int(size[p])
        if kept_pages + size[p] <= share * passed_pages:
            kept.append(p)
            kept_pages += int(size[p])
    return fill(work, tuple(kept))


def paced(work: Workload) -> Choice:
    """Those that would arrive late, were all ops slower by the least factor at which these fit the partition.

    With factor 1 nothing ever waits. Where the link is the bottleneck, the factor spreads the waiting evenly.
    """
    low, high = 0.0, 1.0
    while not _fits(work, _late(work, high)) and high < 1e6:
        low, high = high, high * 2
    for _ in range(30):
        middle = (low + high) / 2
        if _fits(work, _late(work, middle)):
            high = middle
        else:
            low = middle
    late = _late(work, high)
    return fill(work, late) if _fits(work, late) else prefix(work)


def fill(work: Workload, residents: Choice) -> Choice:
    """Use what is left of the partition for more parameters, those used first before others."""
    return _take(work, residents, np.arange(len(work.arrays.size)))


def neighbours(work: Workload, rng: np.random.Generator) -> Callable[[Choice], Choice]:
    """A random change of a choice: one or two residents leave, what fits in their place comes."""

    def change(residents: Choice) -> Choice:
        count = len(work.arrays.size)
        leaving = (
            set(rng.choice(residents, size=min(len(residents), int(rng.integers(1, 3))), replace=False))
            if residents
            else set()
        )
        kept = tuple(p for p in residents if p not in leaving)
        order = [p for p in rng.permutation(count) if p not in leaving]
        return _take(work, kept, np.array([*order, *sorted(leaving)], dtype=np.int64))

    return change


def _take(work: Workload, residents: Choice, order: Ints) -> Choice:
    size = work.arrays.size.tolist()
    left = work.arrays.partition_pages - sum(size[p] for p in residents)
    taken = set(residents)
    for p in order.tolist():
        if p not in taken and 0 < size[p] <= left:
            taken.add(p)
            left -= size[p]
    return tuple(sorted(taken))


def _late(work: Workload, factor: float) -> Choice:
    """Parameters whose copy would end after their op should start, if these were not copied at all."""
    arrays = work.arrays
    deadline = (arrays.op_start_s[arrays.first_use] * factor).tolist()
    late = []
    link_s = 0.0
    for p, swap_s in enumerate(arrays.swap_s.tolist()):
        if link_s + swap_s <= deadline[p]:
            link_s += swap_s
        elif arrays.size[p]:
            late.append(p)
    return tuple(late)


def _fits(work: Workload, residents: Choice) -> bool:
    return int(work.arrays.size[list(residents)].sum()) <= work.arrays.partition_pages
