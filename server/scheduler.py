"""Which request runs next: a bounded queue per model, the oldest request of all first. Pure; the clock is passed in."""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from server.errors import QueueFull
from server.request import InferRequest

_GAIN = 0.9
"""A batch is worth it if a sample takes at most this part of its time in a smaller one."""


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


def _is_late(ticket: Ticket, now_s: float) -> bool:
    return ticket.deadline_s is not None and now_s > ticket.deadline_s


def worthwhile_batches(seconds_by_batch: Mapping[int, float]) -> frozenset[int]:
    """Batch sizes that take clearly less time per sample than any smaller one: worth putting requests together for.

    A model that is bound by its swaps, or by reading its weights, gains almost the whole batch; one that is bound by
    arithmetic may gain nothing, and then its requests had better not wait for each other.
    """
    worthwhile = set()
    best_s = math.inf
    for batch, seconds in sorted(seconds_by_batch.items()):
        if seconds / batch <= _GAIN * best_s:
            worthwhile.add(batch)
            best_s = seconds / batch
    return frozenset(worthwhile)


class Scheduler:
    """Not thread-safe: the engine calls it under its lock."""

    def __init__(self, queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._batches: dict[str, frozenset[int]] = {}
        self._queues: dict[str, deque[Ticket]] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def pending(self, model: str) -> int:
        return len(self._queues.get(model, ()))

    def join(self, model: str, batches: frozenset[int]) -> None:
        """Put waiting requests of a model together where they add up to one of these batch sizes."""
        self._batches[model] = batches

    def submit(self, now_s: float, request: InferRequest) -> Ticket:
        """Queue a request. Raises QueueFull."""
        queue = self._queues.setdefault(request.model, deque())
        if len(queue) >= self._queue_limit:
            raise QueueFull.of_model(request.model, self._queue_limit, 1.0)
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

    def ahead(self, now_s: float) -> tuple[str, int] | None:
        """Look at what `next` would take: the model and the batch, as far as is known now."""
        oldest = self._oldest()
        if oldest is None:
            return None
        return oldest.request.model, sum(t.request.batch for t in self._together(oldest.request.model, now_s))

    def next(self, now_s: float) -> Work | Expired | None:
        """Take the oldest request, and those of its model that join it, or None if no request waits."""
        oldest = self._oldest()
        if oldest is None:
            return None
        queue = self._queues[oldest.request.model]
        if _is_late(oldest, now_s):
            return Expired(queue.popleft())
        return Work(
            oldest.request.model, tuple(queue.popleft() for _ in self._together(oldest.request.model, now_s))
        )

    def _oldest(self) -> Ticket | None:
        return min((queue[0] for queue in self._queues.values() if queue), key=_arrival, default=None)

    def _together(self, model: str, now_s: float) -> list[Ticket]:
        """The first request of a queue, with as many behind it as make the largest worthwhile batch."""
        queue, batches = self._queues[model], self._batches.get(model, frozenset())
        rows, taken = 0, 1
        for count, ticket in enumerate(queue, start=1):
            rows += ticket.request.batch
            if rows > max(batches, default=0) or _is_late(ticket, now_s):
                break
            if rows in batches:
                taken = count
        return list(islice(queue, taken))

    def clear(self) -> None:
        """Forget every request that waits."""
        self._queues.clear()
