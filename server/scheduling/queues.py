"""Requests that wait for one model: a queue per priority level, then one for late requests."""

import math
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

import msgspec

from cohabit.server.ipc.request import Request, SequenceId

_number = attrgetter("number")


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """A request's entry in a queue. Equal only to itself."""

    request: Request
    number: int
    """Order of arrival over all models."""
    load_number: int
    """The load of its model that executes the request: the one served when it arrived. Unique per compute lane."""
    arrived_s: float
    deadline_s: float | None = None
    """Time by which the answer must be ready; otherwise the request is shed."""
    timeout_s: float | None = None
    late_s: float | None = None
    """Time at which it moves to the end of the queue; set instead of `deadline_s`."""
    due_s: float = math.inf
    """Latest time at which its execution should start; the earliest is the most urgent."""
    level: int = 1
    """1 is the most urgent."""
    alone: bool = False
    """Whether the device was idle on its arrival, so that a late execution delays no other request."""

    @property
    def expires(self) -> bool:
        """Whether it has a deadline or a time at which it counts as late."""
        return self.deadline_s is not None or self.late_s is not None


class RequestQueue:
    """One model's waiting requests in dispatch order."""

    def __init__(self) -> None:
        self._levels: dict[int, deque[Ticket]] = {}
        self._late: deque[Ticket] = deque()
        self._count = 0
        self.rows: Counter[tuple[int, ...]] = Counter()
        """Waiting rows by the requests' sizes: rows of different sizes are not executed together."""

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate by level, the most urgent first, and by age within a level."""
        return chain(*self._levels.values(), self._late)

    @property
    def sequences(self) -> set[SequenceId]:
        return {ticket.request.sequence.id for ticket in self if ticket.request.sequence is not None}

    def starting_with(self, leader: Ticket) -> Iterator[Ticket]:
        """Iterate with `leader` first, the others in order."""
        if leader is self.first():
            return iter(self)
        return chain((leader,), (ticket for ticket in self if ticket is not leader))

    def waiting(self, level: int) -> int:
        return len(self._levels.get(level, ()))

    def push(self, ticket: Ticket) -> None:
        queue = self._levels.get(ticket.level)
        if queue is None:
            queue = self._levels[ticket.level] = deque()
            self._levels = dict(sorted(self._levels.items()))
        queue.append(ticket)
        self._count += 1
        self.rows[ticket.request.sizes] += ticket.request.batch

    def remove(self, ticket: Ticket) -> None:
        """Remove a request, which must be in the queue."""
        queue = self._levels[ticket.level]
        (queue if ticket in queue else self._late).remove(ticket)
        self._count -= 1
        self.rows[ticket.request.sizes] -= ticket.request.batch
        if not self.rows[ticket.request.sizes]:
            del self.rows[ticket.request.sizes]

    def move_to_end(self, ticket: Ticket) -> None:
        """Move a late request to the end of the queue."""
        self._levels[ticket.level].remove(ticket)
        self._late.append(ticket)

    def first(self) -> Ticket:
        """Return the first request. The queue must not be empty."""
        return next(iter(self))

    def due_s(self, most: int) -> float:
        """Return the earliest due time of the first `most` requests, at least one. The queue must not be empty."""
        return min(ticket.due_s for ticket in islice(self, max(most, 1)))

    def oldest(self) -> Ticket:
        """Return the request that arrived first, at any level. The queue must not be empty."""
        return min((queue[0] for queue in (*self._levels.values(), self._late) if queue), key=_number)
