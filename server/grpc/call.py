"""One call: its messages, its deadline, and what goes back to its client."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Protocol

from grpc import StatusCode

from server.eager import Begun, begin
from server.errors import ClientTooSlow, RequestError
from server.grpc import headers
from server.grpc.connection import STREAM_WINDOW_BYTES, Connection
from server.grpc.errors import Refusal, Status, status_of
from server.grpc.framing import IDENTITY, Assembly, Content, Message, inflate, require_known
from server.protocol.body_memory import BodyMemory
from server.protocol.patience import patience_s

_ACKNOWLEDGED_BYTES = STREAM_WINDOW_BYTES // 4
"""At once, while a message is being received. What comes at its end need not be: the call ends soon."""


class Method(Protocol):
    """What a call is for."""

    @property
    def name(self) -> str: ...
    @property
    def takes_stream(self) -> bool:
        """Whether it begins before all messages are there, of which there may be any number."""
        ...

    def run(self, call: "Call") -> Coroutine[None, None, None]:
        """Answer a call, or raise what it fails with."""
        ...


class Desk(Protocol):
    """Where calls come in."""

    @property
    def most_bytes(self) -> int:
        """Of one message."""
        ...

    @property
    def bodies(self) -> BodyMemory:
        """What all messages together take until they are handed on."""
        ...

    def admit(self, headers: Mapping[bytes, bytes]) -> Method:
        """Find what a call is for. Raises RequestError or Refusal for one that is not answered."""
        ...

    def left(self) -> None:
        """A call that was admitted has ended."""
        ...


class Call:
    """A stream of its connection. Belongs to the event loop's thread."""

    def __init__(
        self, desk: Desk, connection: Connection, stream_id: int, fields: Sequence[headers.Header]
    ) -> None:
        self._desk = desk
        self._connection = connection
        self._id = stream_id
        self._headers = dict(reversed(fields))  # of several by one name, the first
        self._assembly = Assembly(desk.most_bytes, desk.bodies)
        self._messages: deque[Message] = deque()
        self._owed_bytes = 0
        """Received and not acknowledged, as long as it is little, or there are messages that have not been read."""
        self._is_half_closed = False
        self._arrival: asyncio.Future[None] | None = None
        """What waits for a message, or for the end of them."""
        self._method: Method | None = None
        self._task: Begun | None = None
        self._deadline_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._metadata: list[tuple[str, str]] = []
        self._has_begun = False
        self._has_ended = False
        self._waits_since: tuple[int, float] | None = None
        """For a client's message: behind how many, and since when."""

    def header(self, name: bytes) -> str | None:
        value = self._headers.get(name)
        return None if value is None else headers.text(value)

    def left_s(self) -> float | None:
        """How long the client waits from now on, if it said so."""
        return None if self._deadline_s is None else max(self._deadline_s - time.monotonic(), 0.0)

    def add_header(self, name: str, value: str) -> None:
        """Send this in front of the first message."""
        self._metadata.append((name, value))

    async def message(self) -> Content:
        """Return the message of a call that takes one. Raises Refusal if there is none."""
        if not self._messages:
            raise Refusal(StatusCode.INTERNAL, "this call takes a message, and came without one")
        return await self._content(self._messages.popleft())

    async def messages(self) -> AsyncIterator[Content]:
        """The messages of a call that takes many, as they come."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                if not self._messages:
                    self._acknowledge_all()
                yield await self._content(message)
            if self._is_half_closed:
                return
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def answer(self, content: bytes) -> None:
        """Send the one message of an answer, which ends the call."""
        self._send(content)
        self.end()

    async def send(self, content: bytes) -> None:
        """Send one message of many, when the client has read most of those before."""
        self._send(content)
        self._connection.flush()
        await self._connection.room(self._id)

    def end(self) -> None:
        """Say that the call went well."""
        self._begin_answer()
        self._end(headers.WENT_WELL)

    def fail(self, status: Status) -> None:
        """End a call that has not ended yet with a status."""
        if self._has_ended:
            return
        if self._has_begun or self._metadata:
            self._begin_answer()
            self._end(headers.ending(status))
            if not self._is_half_closed:
                self._stop_reading()
        else:
            self._refuse([*headers.BEGINNING, *headers.ending(status)])

    def begin(self) -> None:
        if not headers.is_grpc(self._headers):
            self._refuse(headers.NO_GRPC)
            return
        try:
            self._method = self._desk.admit(self._headers)
            require_known(self._encoding)
            self._watch_deadline()
        except (RequestError, Refusal) as error:
            self.fail(status_of(error, "call"))
            return
        if self._method.takes_stream:
            self._task = asyncio.get_running_loop().create_task(self._run(self._method))

    def received(self, data: bytes) -> None:
        self._owed_bytes += len(data)
        if not self._has_ended:
            try:
                if messages := self._assembly.feed(data):
                    self._messages.extend(messages)
                    self._require_one()
            except (RequestError, Refusal) as error:
                self._break_off(status_of(error, "call"))
        if self._has_ended or (self._owed_bytes >= _ACKNOWLEDGED_BYTES and not self._is_unread):
            self._acknowledge_all()
        self._wake()

    def half_closed(self) -> None:
        self._is_half_closed = True
        if self._has_ended:
            return
        if not self._assembly.is_between_messages:
            self._break_off(Status(StatusCode.INTERNAL, "the call ends in the middle of a message"))
        elif self._method is not None and not self._takes_stream:
            self._task = begin(asyncio.get_running_loop(), self._run(self._method))
        self._wake()

    def end_if_overdue(self, now_s: float) -> None:
        """End a call whose client takes too long over a message."""
        begun = not self._assembly.is_between_messages or not (self._is_half_closed or self._takes_stream)
        if self._has_ended or self._is_unread or not begun:
            self._waits_since = None
        elif self._waits_since is None or self._waits_since[0] != self._assembly.messages:
            self._waits_since = (self._assembly.messages, now_s)
        else:
            waited_s, nbytes = now_s - self._waits_since[1], self._assembly.received_bytes
            if waited_s > patience_s(nbytes):
                self._break_off(status_of(ClientTooSlow(nbytes, waited_s), "call"))

    def closed(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        if self._task is not None and not self._has_ended:
            self._task.cancel()
        self._has_ended = True
        self._acknowledge_all()
        self._messages.clear()
        self._assembly.give_up()
        if self._method is not None:
            self._method = None
            self._desk.left()

    @property
    def _is_unread(self) -> bool:
        """Whether there is more than its method wants by now."""
        return bool(self._messages) and self._takes_stream

    @property
    def _takes_stream(self) -> bool:
        return self._method is not None and self._method.takes_stream

    @property
    def _encoding(self) -> str:
        return self.header(b"grpc-encoding") or IDENTITY

    def _require_one(self) -> None:
        if len(self._messages) > 1 and not self._takes_stream:
            raise Refusal(StatusCode.INTERNAL, "this call takes one message, and came with more")

    async def _run(self, method: Method) -> None:
        try:
            await method.run(self)
        except asyncio.CancelledError:
            self.fail(Status(StatusCode.CANCELLED, "the call was cancelled"))
            raise
        except Exception as error:
            self.fail(status_of(error, method.name))

    async def _content(self, message: Message) -> Content:
        self._assembly.handed_on(message)
        if not message.compressed:
            return message.content
        return await asyncio.to_thread(inflate, message.content, self._encoding, self._desk.most_bytes)

    def _send(self, content: bytes) -> None:
        self._begin_answer()
        if not self._has_ended:
            self._connection.send_message(self._id, content)

    def _begin_answer(self) -> None:
        if not self._has_begun and not self._has_ended:
            self._has_begun = self._connection.begin_answer(self._id, headers.beginning(self._metadata))
            self._has_ended = not self._has_begun

    def _end(self, trailers: Sequence[headers.Header]) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._connection.end_answer(self._id, trailers)
            self._connection.flush()

    def _refuse(self, answer: Sequence[headers.Header]) -> None:
        self._has_ended = True
        if self._connection.begin_answer(self._id, answer, end=True):
            self._connection.flush()
            self._stop_reading()

    def _stop_reading(self) -> None:
        self._connection.stop_reading(self._id)
        self._connection.flush()

    def _break_off(self, status: Status) -> None:
        """End a call whose method may be running."""
        self.fail(status)
        if self._task is not None:
            self._task.cancel()

    def _watch_deadline(self) -> None:
        """Raises InvalidRequest."""
        given = self._headers.get(b"grpc-timeout")
        if given is not None:
            timeout_s = headers.timeout_s(given)
            self._deadline_s = time.monotonic() + timeout_s
            expired = Status(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            self._alarm = asyncio.get_running_loop().call_later(timeout_s, self._break_off, expired)

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _acknowledge_all(self) -> None:
        if self._owed_bytes:
            owed_bytes, self._owed_bytes = self._owed_bytes, 0
            self._connection.acknowledge(self._id, owed_bytes)
