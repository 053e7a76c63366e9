"""How often durations fell between which bounds, as Prometheus counts them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

SECONDS = (*(round(base * 10.0**power, 6) for power in range(-4, 1) for base in (1.0, 1.8, 3.2, 5.6)), 10.0)
"""A hundred microseconds to ten seconds, four bounds to every decade."""


class Histogram:
    """Written by one thread. A reader may see the newest value in a bucket and not yet in the sum."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """How many values are at most each bound, as `le` writes it; the last one counts all."""
        total = 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), list(self._counts), strict=True):
            total += count
            yield bound, total
