"""The link over time: the spans that transfers occupy, and free spans for others.

TENSILE, section IV-C: a transfer occupies the channel exclusively, so one tensor is swapped at a time.
"""

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
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
        """Return the earliest free span of this length in [low, high) that overlaps nothing in `avoid`.

        Spans of `avoid` are sorted and do not overlap.
        """
        start, first = low_ns, max(bisect_right(self._spans, (low_ns, 0)) - 1, 0)
        for taken in heapq.merge(avoid, self._spans[first:], key=lambda span: span.start_ns):
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
