"""A heap of the latest start times of waiting requests."""

import heapq
import math

from server.scheduling.queues import Ticket

_MAX_STALE = 64
"""The heap is rebuilt beyond this many entries plus two per waiting request: stale entries hold input memory."""


class Deadlines:
    """A heap with lazy deletion: entries of requests that no longer wait are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self._waiting: set[Ticket] = set()

    @property
    def earliest_s(self) -> float:
        """The earliest of the latest start times; infinite if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def watch(self, ticket: Ticket, latest_start_s: float) -> None:
        heapq.heappush(self._heap, (latest_start_s, ticket.number, ticket))
        self._waiting.add(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Remove a request that no longer waits."""
        if not self._heap:
            return
        self._waiting.discard(ticket)
        if len(self._heap) > 2 * len(self._waiting) + _MAX_STALE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def pop_before(self, start_s: float) -> Ticket | None:
        """Remove and return a request whose latest start time has passed; None if there is none."""
        while self._heap and self._heap[0][0] < start_s:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket in self._waiting:
                self._waiting.discard(ticket)
                return ticket
        return None
