"""Initial choices of the parameters that stay in memory between inferences, to be simulated.

All functions number parameters in the order of first use."""

from collections.abc import Iterator

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.streaming.workload import Workload

Choice = tuple[int, ...]


def initial_residents(work: Workload) -> Iterator[Choice]:
    """Some sets of residents that fill the partition, without repeats."""
    pages = work.arrays.partition_pages
    yield from dict.fromkeys(choose(work, pages) for choose in (paced, fill, spread, largest_first, costly_first))


def largest_first(work: Workload, pages: int) -> Choice:
    """The largest, so that few copies are left."""
    return _take(work, (), np.argsort(-work.arrays.size, kind="stable"), pages)


def costly_first(work: Workload, pages: int) -> Choice:
    """Those whose copies take longest for their size: the smallest."""
    size = work.arrays.size
    return _take(work, (), np.argsort(-work.arrays.swap_s / np.maximum(size, 1), kind="stable"), pages)


def spread(work: Workload, pages: int) -> Choice:
    """A constant share of the bytes, so that the link keeps pace with the ops all along."""
    size = work.arrays.size
    share = pages / max(int(size.sum()), 1)
    kept: list[int] = []
    kept_pages = passed_pages = 0
    for p in range(len(size)):
        passed_pages += int(size[p])
        if kept_pages + size[p] <= share * passed_pages:
            kept.append(p)
            kept_pages += int(size[p])
    return fill(work, pages, tuple(kept))


def paced(work: Workload, pages: int) -> Choice:
    """Those that would arrive late, were all ops slower by the least factor at which these fit.

    With factor 1 nothing ever waits. Where the link is the bottleneck, the factor spreads the waiting evenly.
    """
    arrays = work.arrays
    start_s = arrays.op_start_s[arrays.first_use]

    def late(factor: float) -> Ints:
        return _late(start_s * factor, arrays.swap_s, arrays.size)

    low, high = 0.0, 1.0
    while arrays.size[late(high)].sum() > pages and high < 1e6:
        low, high = high, high * 2
    for _ in range(30):
        middle = (low + high) / 2
        if arrays.size[late(middle)].sum() <= pages:
            high = middle
        else:
            low = middle
    kept = late(high)
    return fill(work, pages, tuple(kept.tolist()) if arrays.size[kept].sum() <= pages else ())


def by_share(work: Workload, shares: Floats, pages: int) -> Choice:
    """Those of which a relaxation keeps the largest shares."""
    return _take(work, (), np.argsort(-shares, kind="stable"), pages)


def fill(work: Workload, pages: int, residents: Choice = ()) -> Choice:
    """Those used first, in addition to `residents`, so that copies of the others get ahead of the ops."""
    return _take(work, residents, np.arange(len(work.arrays.size)), pages)


def _take(work: Workload, residents: Choice, order: Ints, pages: int) -> Choice:
    size = work.arrays.size.tolist()
    left = pages - sum(size[p] for p in residents)
    taken = set(residents)
    for p in order.tolist():
        if p not in taken and 0 < size[p] <= left:
            taken.add(p)
            left -= size[p]
    return tuple(sorted(taken))


@compiled
def _late(deadline_s: Floats, swap_s: Floats, size: Ints) -> Ints:
    """Parameters whose copy would end after their op should start, if these were not copied at all."""
    late = np.empty(len(size), dtype=np.int64)
    count, link_s = 0, 0.0
    for p in range(len(size)):
        if link_s + swap_s[p] <= deadline_s[p]:
            link_s += swap_s[p]
        elif size[p]:
            late[count] = p
            count += 1
    return late[:count]
