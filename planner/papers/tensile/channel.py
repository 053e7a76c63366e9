"""The link over time: when transfers occupy it, and where another transfer fits.

TENSILE, section IV-C: a transfer occupies the channel exclusively, so one tensor is swapped at a time.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class TransferSpan(NamedTuple):
    """Nanoseconds [start, end). An empty span is a transfer that computation waits for; it is not on the time axis."""

    start_ns: int
    end_ns: int


class Channel:
    """Transfers that do not overlap, in order of time."""

    def __init__(self, spans: Iterable[TransferSpan] = ()) -> None:
        self._spans = sorted(spans)

    def take(self, span: TransferSpan) -> None:
        if span.start_ns < span.end_ns:
            insort(self._spans, span)

    def release(self, span: TransferSpan) -> None:
        if span.start_ns < span.end_ns:
            del self._spans[bisect_left(self._spans, span)]

    def earliest(
        self, work_ns: int, low_ns: int, high_ns: int, avoid: Sequence[TransferSpan] = ()
    ) -> TransferSpan | None:
        """Return the earliest free span of this length in [low, high) that overlaps nothing in `avoid`."""
        start = low_ns
        for taken in _merged(self._from(low_ns), avoid):
            if start + work_ns > high_ns or taken.start_ns >= start + work_ns:
                break
            start = max(start, taken.end_ns)
        return TransferSpan(start, start + work_ns) if start + work_ns <= high_ns else None

    def latest(self, work_ns: int, low_ns: int, high_ns: int) -> TransferSpan | None:
        """Return the latest free span of this length in [low, high)."""
        end = high_ns
        for i in range(bisect_right(self._spans, (high_ns, 0)) - 1, -1, -1):
            taken = self._spans[i]
            if end - work_ns < low_ns or taken.end_ns <= end - work_ns:
                break
            end = min(end, taken.start_ns)
        return TransferSpan(end - work_ns, end) if end - work_ns >= low_ns else None

    def _from(self, low_ns: int) -> Iterator[TransferSpan]:
        first = max(bisect_right(self._spans, (low_ns, 0)) - 1, 0)
        return (self._spans[i] for i in range(first, len(self._spans)))


def _merged(taken: Iterator[TransferSpan], avoid: Sequence[TransferSpan]) -> Iterator[TransferSpan]:
    """Both in order of their starts. Those of `avoid` are in order and may touch, not overlap."""
    waiting = iter(avoid)
    other = next(waiting, None)
    for span in taken:
        while other is not None and other.start_ns <= span.start_ns:
            yield other
            other = next(waiting, None)
        yield span
    while other is not None:
        yield other
        other = next(waiting, None)
