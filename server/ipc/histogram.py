"""A histogram with cumulative buckets, as Prometheus defines it."""

from bisect import bisect_left
from collections.abc import Iterator

import msgspec

SECONDS = (*(round(base * 10.0**power, 6) for power in range(-4, 1) for base in (1.0, 1.8, 3.2, 5.6)), 10.0)
"""A hundred microseconds to ten seconds, four bounds per decade."""


class Histogram(msgspec.Struct):
    """Written by one thread. A reader may see the newest value in a bucket before it is in the sum."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the label `le` and the number of values up to each bound; the last one counts all."""
        total = 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), list(self.counts), strict=True):
            total += count
            yield bound, total
