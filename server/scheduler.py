"""Which request runs next: a bounded queue per model, the oldest request of all first. Pure; the clock is passed in."""

from collections import deque
from dataclasses import dataclass

from server.errors import QueueFull
from server.request import InferRequest


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request's place in the queue. Equal only to itself."""

    request: InferRequest
    number: int
    """Order of arrival over all models."""
    arrived_s: float
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Work:
    """What the device does next: requests for one model, executed together."""

    model: str
    tickets: tuple[Ticket, ...]


@dataclass(frozen=True, slots=True)
class Expired:
    """A request that waited longer than it was willing to."""

    ticket: Ticket


def _arrival(ticket: Ticket) -> int:
    return ticket.number


class Scheduler:
    """Not thread-safe: the engine calls it under its lock."""

    def __init__(self, queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._queues: dict[str, deque[Ticket]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def pending(self, model: str) -> int:
        return len(self._queues.get(model, ()))

    def submit(self, now_s: float, request: InferRequest) -> Ticket:
        """Queue a request. Raises QueueFull."""
        queue = self._queues.setdefault(request.model, deque())
        if len(queue) >= self._queue_limit:
            raise QueueFull(request.model, self._queue_limit)
        deadline_s = None if request.timeout_s is None else now_s + request.timeout_s
        self._arrivals += 1
        ticket = Ticket(request, self._arrivals, now_s, deadline_s)
        queue.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Take a request out of its queue; False if it has left it already."""
        queue = self._queues.get(ticket.request.model, ())
        if ticket not in queue:
            return False
        self._queues[ticket.request.model].remove(ticket)
        return True

    def ahead(self) -> Ticket | None:
        """Look at the request that comes after the one just taken, as far as is known now."""
        return min((queue[0] for queue in self._queues.values() if queue), key=_arrival, default=None)

    def next(self, now_s: float) -> Work | Expired | None:
        """Take the oldest request, or None if no request waits."""
        oldest = self.ahead()
        if oldest is None:
            return None
        self._queues[oldest.request.model].popleft()
        if oldest.deadline_s is not None and now_s > oldest.deadline_s:
            return Expired(oldest)
        return Work(oldest.request.model, (oldest,))

    def clear(self) -> None:
        """Forget every request that waits."""
        self._queues.clear()
