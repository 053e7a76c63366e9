"""A heap of the latest start times of waiting requests."""

import heapq
import math
from collections.abc import Collection

from cohabit.server.scheduling.queues import Ticket

_MAX_STALE = 64
"""The heap is rebuilt above this size plus two entries per waiting request: stale entries hold input memory."""


class Deadlines:
    """A heap with lazy deletion: skips entries of requests that no longer wait."""

    def __init__(self, waiting: Collection[Ticket]) -> None:
        """`waiting` has all requests that wait; the scheduler updates it."""
        self._heap: list[tuple[float, int, Ticket]] = []
        self._waiting = waiting

    @property
    def earliest_s(self) -> float:
        """The earliest of the latest start times; infinite if there are none."""
        return self._heap[0][0] if self._heap else math.inf

    def watch(self, ticket: Ticket, latest_start_s: float) -> None:
        heapq.heappush(self._heap, (latest_start_s, ticket.number, ticket))

    def trim(self) -> None:
        """Drop the entries of requests that no longer wait, if there are many."""
        if len(self._heap) > 2 * len(self._waiting) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def pop_before(self, start_s: float) -> Ticket | None:
        """Remove and return a request whose latest start time has passed; None if there are none."""
        while self._heap and self._heap[0][0] < start_s:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket in self._waiting:
                return ticket
        return None
