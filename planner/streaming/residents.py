"""Initial choices of residents, the parameters that stay in memory between inferences.

Parameters are numbered in the order of first use."""

from collections.abc import Iterator

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.streaming.workload import Workload

Choice = tuple[int, ...]


def initial_residents(work: Workload) -> Iterator[Choice]:
    """Yield sets of residents that fill the partition, without repeats."""
    pages = work.arrays.partition_pages
    yield from dict.fromkeys(choose(work, pages) for choose in (paced, fill, spread, largest_first, costly_first))


def largest_first(work: Workload, pages: int) -> Choice:
    """Keep the largest parameters, so that few copies are left."""
    return _take(work, (), np.argsort(-work.arrays.size, kind="stable"), pages)


def costly_first(work: Workload, pages: int) -> Choice:
    """Keep the parameters with the longest copy time for their size: the smallest."""
    size = work.arrays.size
    return _take(work, (), np.argsort(-work.arrays.swap_s / np.maximum(size, 1), kind="stable"), pages)


def spread(work: Workload, pages: int) -> Choice:
    """Keep a constant share of the bytes, so that the link keeps pace with the ops throughout."""
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
    """Keep the parameters that arrive late if all ops are slowed by the least factor at which these fit.

    With factor 1, no op ever waits. If the link is the bottleneck, the factor spreads the waits evenly.
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
    """Keep the parameters with the largest resident shares in a relaxation."""
    return _take(work, (), np.argsort(-shares, kind="stable"), pages)


def fill(work: Workload, pages: int, residents: Choice = ()) -> Choice:
    """Keep `residents` and the parameters used first, so that copies of the others get ahead of the ops."""
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
    """Return the parameters whose copies would end after their deadlines; these copies are skipped."""
    late = np.empty(len(size), dtype=np.int64)
    count, link_s = 0, 0.0
    for p in range(len(size)):
        if link_s + swap_s[p] <= deadline_s[p]:
            link_s += swap_s[p]
        elif size[p]:
            late[count] = p
            count += 1
    return late[:count]
