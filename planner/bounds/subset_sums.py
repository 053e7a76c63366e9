"""Maximum bytes of whole tensors that fit in memory next to an op's needs."""

from collections.abc import Sequence
from copy import copy
from typing import Final

from cohabit.planner.bounds.chain import OpChain, UseInterval

PAGE_BYTES: Final = 4096
"""Unit of tensor sizes: most sizes are multiples, small enough to enumerate their sums."""
MOST_SUMS: Final = 1 << 20


def last_absence(interval: UseInterval, free_bytes: Sequence[int]) -> int | None:
    """Return the last moment of an interval at which its tensor does not fit, if any; copies reserve all bytes
    first."""
    since = max(min(interval.kept_from, interval.arrives_from), 1)
    return next((i for i in range(interval.until, since - 1, -1) if free_bytes[i] < interval.nbytes), None)


def most_whole_tensor_bytes(chain: OpChain, memory_bytes: int) -> list[int]:
    """Return, per moment, the maximum bytes of whole tensors between two uses that fit next to the needed ones."""
    free_bytes = [memory_bytes - n for n in chain.needed_bytes]

    def bisect_moments(first: int, end: int, intervals: Sequence[UseInterval], among: SubsetSums) -> None:
        """Halve the moments until each tensor can be in memory at all of them or at none."""
        sums, some = copy(among), []
        for s in intervals:
            since = min(s.kept_from, s.arrives_from)
            if since <= first and end <= s.until + 1:
                sums.add(s.nbytes)
            elif since < end and first <= s.until:
                some.append(s)
        if end - first == 1:
            free_bytes[first] = sums.largest(free_bytes[first])
        else:
            middle = (first + end) // 2
            bisect_moments(first, middle, some, sums)
            bisect_moments(middle, end, some, sums)

    bisect_moments(0, chain.moments + 1, chain.intervals, SubsetSums(memory_bytes))
    return free_bytes


def largest_sum(sizes: Sequence[int], limit: int) -> int:
    """Return the largest subset sum within `limit`, or an upper bound on it."""
    sums = SubsetSums(limit)
    for nbytes in sizes:
        sums.add(nbytes)
    return sums.largest(limit)


class SubsetSums:
    """All subset sums: bit s of an integer stands for s pages. Unaligned sizes may fill any gap."""

    def __init__(self, limit: int) -> None:
        self._mask = (1 << (limit // PAGE_BYTES + 1)) - 1 if limit // PAGE_BYTES < MOST_SUMS else 0
        self._reached = 1
        self._unaligned_bytes = 0

    def add(self, nbytes: int) -> None:
        if nbytes % PAGE_BYTES or not self._mask:
            self._unaligned_bytes += nbytes
        else:
            self._reached |= self._reached << nbytes // PAGE_BYTES & self._mask

    def largest(self, limit: int) -> int:
        if limit < 0:
            return limit
        within = self._reached & ((1 << (limit // PAGE_BYTES + 1)) - 1)
        return min(limit, (within.bit_length() - 1) * PAGE_BYTES + self._unaligned_bytes)
