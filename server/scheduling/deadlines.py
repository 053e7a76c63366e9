"""When waiting requests must start: the earliest first, without keeping those that have left."""

import heapq
import math

from server.scheduling.queues import Ticket

_MOST_GONE = 64
"""So many requests that have left may be remembered, and as many again as wait: their inputs take memory."""


class Deadlines:
    """A heap of latest starts, of which some are of requests that wait no more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []
        self._waiting: set[Ticket] = set()

    @property
    def earliest_s(self) -> float:
        """The earliest latest start; infinite if nobody has one."""
        return self._heap[0][0] if self._heap else math.inf

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, ticket: Ticket, latest_start_s: float) -> None:
        heapq.heappush(self._heap, (latest_start_s, ticket.number, ticket))
        self._waiting.add(ticket)

    def forget(self, ticket: Ticket) -> None:
        """Hear that a request waits no more."""
        if not self._heap:
            return
        self._waiting.discard(ticket)
        if len(self._heap) > 2 * len(self._waiting) + _MOST_GONE:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)

    def pop_before(self, start_s: float) -> Ticket | None:
        """Take out a request that had to start before this; None if there is none."""
        while self._heap and self._heap[0][0] < start_s:
            _, _, ticket = heapq.heappop(self._heap)
            if ticket in self._waiting:
                self._waiting.discard(ticket)
                return ticket
        return None
