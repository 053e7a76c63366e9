"""gRPC answers that are ready but not sent yet, limited in bytes and time as HTTP's are."""

import asyncio
from collections import Counter
from typing import Any

from cohabit.planner.errors import format_bytes
from cohabit.server.errors import Overloaded
from cohabit.server.frontend import listening
from cohabit.server.frontend.memory import Lease

_CONNECTION_SHARE = 4


class UnsentAnswers:
    """Request memory held by unsent answers, in bytes by connection. Event loop's thread only.

    An answer counts as sent when HTTP/2's flow control and the socket have taken all of it.
    """

    def __init__(self, memory_bytes: int) -> None:
        """One connection may hold a quarter of `memory_bytes`."""
        self.connection_bytes = memory_bytes // _CONNECTION_SHARE
        self.held: Counter[str] = Counter()

    def of_call(self, context: Any) -> "CallAnswers":
        """Return the answers of a call; they are released with it."""
        answers = CallAnswers(self, context.peer())
        context.add_done_callback(lambda _: answers.close())
        return answers


class CallAnswers:
    """The unsent answers of one call."""

    def __init__(self, unsent: UnsentAnswers, peer: str) -> None:
        self._unsent = unsent
        self._peer = peer
        self._leases: dict[Lease, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def require_below_limit(self) -> None:
        """Raise Overloaded if the connection's unsent answers leave no room for another request."""
        held, most = self._unsent.held[self._peer], self._unsent.connection_bytes
        if held >= most:
            raise Overloaded(
                f"answers that this connection has not received yet take {format_bytes(held)}, the limit is"
                f" {format_bytes(most)}; read them, or start the server with a larger --queue-memory"
            )

    def add(self, lease: Lease) -> None:
        """Keep an answer's memory until it is sent."""
        lease.retain()
        self._leases[lease] = lease.nbytes
        self._unsent.held[self._peer] += lease.nbytes

    def sending(self) -> None:
        """Cancel the current task, which sends, if the client reads nothing for `UNREAD_S`, HTTP's limit."""
        task = asyncio.current_task()
        assert task is not None
        self._timer = asyncio.get_running_loop().call_later(listening.UNREAD_S, task.cancel)

    def sent(self, lease: Lease | None) -> None:
        """Release an answer's memory, if it has any."""
        if self._timer is not None:
            self._timer.cancel()
        if lease is not None:
            held = self._unsent.held
            held[self._peer] -= self._leases.pop(lease)
            if not held[self._peer]:
                del held[self._peer]
            lease.release()

    def close(self) -> None:
        """Release the answers that will not be sent."""
        self.sent(None)
        for lease in list(self._leases):
            self.sent(lease)
