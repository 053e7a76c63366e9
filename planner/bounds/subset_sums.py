"""The most bytes of whole tensors that fit into given memory next to what an op needs."""

from collections.abc import Sequence
from copy import copy
from typing import Final

from cohabit.planner.bounds.chain import OpChain, UseInterval

PAGE_BYTES: Final = 4096
"""Most tensors are so many times as large as this that their sums can be enumerated."""
MOST_SUMS: Final = 1 << 20


def last_absence(interval: UseInterval, rooms: Sequence[int]) -> int | None:
    """The last moment of a interval at which its tensor cannot be in memory; a copy reserves its bytes at the start."""
    since = max(min(interval.kept_from, interval.arrives_from), 1)
    return next((i for i in range(interval.until, since - 1, -1) if rooms[i] < interval.nbytes), None)


def whole_tensor_room(chain: OpChain, memory_bytes: int) -> list[int]:
    """Return, per moment, the most bytes of whole tensors between two uses that fit next to what is needed."""
    rooms = [memory_bytes - n for n in chain.needed_bytes]

    def fill(first: int, end: int, intervals: Sequence[UseInterval], among: SubsetSums) -> None:
        """Halve the moments until each tensor is in memory, or can be, in all of them or in none."""
        sums, some = copy(among), []
        for s in intervals:
            since = min(s.kept_from, s.arrives_from)
            if since <= first and end <= s.until + 1:
                sums.add(s.nbytes)
            elif since < end and first <= s.until:
                some.append(s)
        if end - first == 1:
            rooms[first] = sums.largest(rooms[first])
        else:
            middle = (first + end) // 2
            fill(first, middle, some, sums)
            fill(middle, end, some, sums)

    fill(0, chain.moments + 1, chain.intervals, SubsetSums(memory_bytes))
    return rooms


def largest_sum(sizes: Sequence[int], limit: int) -> int:
    """At least the largest sum of some of the sizes that is at most `limit`."""
    sums = SubsetSums(limit)
    for nbytes in sizes:
        sums.add(nbytes)
    return sums.largest(limit)


class SubsetSums:
    """All sums of some sizes: bit s of an integer stands for s pages. Odd sizes may fill any gap."""

    def __init__(self, limit: int) -> None:
        self._mask = (1 << (limit // PAGE_BYTES + 1)) - 1 if limit // PAGE_BYTES < MOST_SUMS else 0
        self._reached = 1
        self._odd = 0

    def add(self, nbytes: int) -> None:
        if nbytes % PAGE_BYTES or not self._mask:
            self._odd += nbytes
        else:
            self._reached |= self._reached << nbytes // PAGE_BYTES & self._mask

    def largest(self, limit: int) -> int:
        if limit < 0:
            return limit
        within = self._reached & ((1 << (limit // PAGE_BYTES + 1)) - 1)
        return min(limit, (within.bit_length() - 1) * PAGE_BYTES + self._odd)
