"""One model's waiting requests: a queue per priority level, and one behind them for those that came too late."""

import math
from collections import deque
from collections.abc import Iterator
from itertools import chain, islice
from operator import attrgetter

import msgspec

from server.protocol.request import InferRequest

_number = attrgetter("number")


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """A request's place in a queue. Equal only to itself."""

    request: InferRequest
    number: int
    """DispatchOrder of arrival over all models."""
    generation: int
    """Which of the model's successive versions was there when the request arrived."""
    arrived_s: float
    deadline_s: float | None = None
    """When its answer must be there; else it is refused."""
    timeout_s: float | None = None
    late_s: float | None = None
    """When it goes behind all others, instead of having a deadline."""
    due_s: float = math.inf
    """When its execution should start at the latest; what has the earliest is the most urgent."""
    level: int = 1
    """1 is the most urgent."""

    @property
    def expires(self) -> bool:
        """Whether there is a time from which it is not treated as it was before."""
        return self.deadline_s is not None or self.late_s is not None


class ModelQueue:
    """Requests in the order in which they are to run."""

    def __init__(self) -> None:
        self._levels: dict[int, deque[Ticket]] = {}
        self._late: deque[Ticket] = deque()
        self._count = 0
        self.rows = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Ticket]:
        """Most urgent level first, and in it the oldest."""
        return chain(*self._levels.values(), self._late)

    def led_by(self, leader: Ticket) -> Iterator[Ticket]:
        """In the same order, but for one that goes first."""
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
        self.rows += ticket.request.batch

    def remove(self, ticket: Ticket) -> bool:
        """Take a request out; False if it is not there."""
        for queue in (self._levels.get(ticket.level), self._late):
            if queue is not None and ticket in queue:
                if queue[0] is ticket:
                    queue.popleft()
                else:
                    queue.remove(ticket)
                self._count -= 1
                self.rows -= ticket.request.batch
                return True
        return False

    def put_behind(self, ticket: Ticket) -> None:
        """Let a request that came too late wait for all others."""
        self._levels[ticket.level].remove(ticket)
        self._late.append(ticket)

    def first(self) -> Ticket | None:
        for queue in self._levels.values():
            if queue:
                return queue[0]
        return self._late[0] if self._late else None

    def due_s(self, most: int) -> float:
        """The earliest due time among the first so many requests, one at least. There must be one."""
        return min(ticket.due_s for ticket in islice(self, max(most, 1)))

    def oldest(self) -> Ticket | None:
        """The first to have arrived, whatever its level."""
        heads = [queue[0] for queue in self._levels.values() if queue]
        if self._late:
            heads.append(self._late[0])
        return min(heads, key=_number, default=None)
