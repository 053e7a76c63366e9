"""The memory that bodies take while they are received and decoded, of all connections together."""

from types import TracebackType

from planner.errors import format_bytes
from server.errors import Overloaded

_RETRY_S = 1.0


class BodyMemory:
    """A budget in bytes. Belongs to the event loop's thread."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._taken_bytes = 0
        self._unfinished = 0

    @property
    def is_receiving(self) -> bool:
        """Whether a part of some body has come, and the rest has not."""
        return self._unfinished > 0

    def expect(self, more: int) -> None:
        """Hear that so many bodies have begun to come; negative when they are there, or will not be."""
        self._unfinished += more

    def share(self) -> "Share":
        """What one body takes; given back at the end, when its request is in a queue and counts there."""
        return Share(self)

    def give_back(self, nbytes: int) -> None:
        self._taken_bytes -= nbytes

    def take(self, nbytes: int) -> None:
        if self._taken_bytes + nbytes > self._limit_bytes:
            raise Overloaded(
                f"request bodies that are being received take {format_bytes(self._taken_bytes)} of"
                f" {format_bytes(self._limit_bytes)} already; send fewer at once, or start the server with a larger"
                " --queue-memory",
                _RETRY_S,
            )
        self._taken_bytes += nbytes


class Share:
    """One body's part of the budget."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self.nbytes = 0

    def __enter__(self) -> "Share":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory.give_back(self.nbytes)

    def expect(self, more: int) -> None:
        """See `BodyMemory.expect`."""
        self._memory.expect(more)

    def take(self, nbytes: int) -> None:
        """Count more bytes. Raises Overloaded if there is no room for them."""
        self._memory.take(nbytes)
        self.nbytes += nbytes
