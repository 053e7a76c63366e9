"""One client's HTTP/2 connection: libnghttp2 keeps the protocol, this moves bytes and tells streams what happened."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import ngh2

from server.grpc.framing import prefix_of
from server.grpc.headers import Header

_GREETING_S = 20.0
"""How long a client may take to say that it speaks HTTP/2."""
STREAM_WINDOW_BYTES = 4 << 20
"""A message of up to half of it is never interrupted for more window, which would wake its client for nothing."""
_CONNECTION_WINDOW_BYTES = (1 << 31) - 1
"""Streams are held back one by one: nobody who waits for its own messages to be read keeps others waiting."""
_FRAME_BYTES = 1 << 20
"""Of the frames that clients may send: each costs as much as the bytes that are received with it."""
_HEADER_LIST_BYTES = 16 << 10
_MOST_STREAMS = 1 << 16
"""Of one connection. How many calls there may be in all is not said to clients, who are told when it is over."""
_RESETS = (10_000, 1_000)
"""At once, and per second: clients give up their calls when these take too long."""
_WRITE_BYTES = 512 << 10
"""Handed to the socket at once; the rest waits until it has gone."""
_QUEUED_BYTES = 1 << 20
"""Of one stream's answers, before it has to wait for its client."""

_RECEIVED = memoryview(bytearray(1 << 20))
"""Where all connections' bytes arrive: they are taken from here before the next ones come. Large ones come at once."""

_CONFIGURATION = ngh2.Configuration(
    auto_window_update=False,
    stream_reset_rate_limit=_RESETS,
    max_inbound_header_list_size=2 * _HEADER_LIST_BYTES,
)
_SETTINGS = {
    ngh2.Setting.MAX_CONCURRENT_STREAMS: _MOST_STREAMS,
    ngh2.Setting.INITIAL_WINDOW_SIZE: STREAM_WINDOW_BYTES,
    ngh2.Setting.MAX_FRAME_SIZE: _FRAME_BYTES,
    ngh2.Setting.MAX_HEADER_LIST_SIZE: _HEADER_LIST_BYTES,
}
_log = logging.getLogger("cohabit.grpc")


class Stream(Protocol):
    """Hears what becomes of one stream. None of it raises."""

    def begin(self) -> None: ...
    def received(self, data: bytes) -> None: ...
    def half_closed(self) -> None:
        """The client has sent everything."""
        ...

    def end_if_overdue(self, now_s: float) -> None:
        """Look whether the client takes too long; from time to time."""
        ...

    def closed(self) -> None:
        """It is over, answered or not: nothing can be sent any more."""
        ...


class Connection(asyncio.BufferedProtocol):
    """Belongs to the event loop's thread. What is sent goes out with the next `flush`."""

    def __init__(
        self,
        open_stream: Callable[["Connection", int, Sequence[Header]], Stream],
        ended: Callable[["Connection"], None],
    ) -> None:
        self._open_stream = open_stream
        self._ended = ended
        self._http2 = ngh2.Connection(ngh2.Role.SERVER, _CONFIGURATION)
        self._streams: dict[int, Stream] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        """Streams whose answers wait for their client to read."""
        self._is_writable = True
        self._is_over = False

    @property
    def is_idle(self) -> bool:
        return not self._streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BYTES)
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._http2.initiate_connection(_SETTINGS)
        self._http2.set_local_window_size(_CONNECTION_WINDOW_BYTES)
        self._greeting = asyncio.get_running_loop().call_later(_GREETING_S, self._abandon, "it said nothing")
        self.flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _RECEIVED

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_over:
            return
        try:
            self._http2.receive_data(_RECEIVED[:nbytes])
        except ngh2.NGH2Error as error:
            self._abandon(str(error))
        else:
            self._dispatch()
            if self._http2.want_write:
                self.flush()

    def pause_writing(self) -> None:
        self._is_writable = False

    def resume_writing(self) -> None:
        self._is_writable = True
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._greeting.cancel()
        self._end_streams()
        self._ended(self)

    def begin_answer(self, stream_id: int, headers: Sequence[Header], end: bool = False) -> bool:
        """Returns whether the stream is still there: its end may be the next event."""
        try:
            self._http2.send_response(stream_id, headers, end_stream=end)
        except ngh2.StreamUnavailableError:
            return False
        return True

    def send_message(self, stream_id: int, content: bytes) -> None:
        self._http2.send_data(stream_id, prefix_of(content))
        self._http2.send_data(stream_id, content)

    def end_answer(self, stream_id: int, trailers: Sequence[Header]) -> None:
        self._http2.send_trailers(stream_id, trailers)

    def stop_reading(self, stream_id: int) -> None:
        """Tell a client that has its answer already that the rest of what it sends is not read."""
        if stream_id in self._streams:
            self._http2.reset_stream(stream_id, ngh2.ErrorCode.NO_ERROR)

    def acknowledge(self, stream_id: int, nbytes: int) -> None:
        """Let the client send that much more."""
        if not self._is_over:
            with contextlib.suppress(ngh2.ConnectionStateError):  # its end may be the next event
                self._http2.acknowledge_received_data(nbytes, stream_id)

    async def room(self, stream_id: int) -> None:
        """Wait until the client has read most of what this stream has sent."""
        if self._http2.queued_body_size(stream_id) > _QUEUED_BYTES:
            self._waiting[stream_id] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[stream_id]
            finally:
                del self._waiting[stream_id]

    def flush(self) -> None:
        """Send what can be sent now."""
        if self._is_over:
            return
        try:
            while self._is_writable:
                output = self._http2.data_to_send(_WRITE_BYTES)
                if output:
                    self._transport.write(output)
                if len(output) < _WRITE_BYTES:
                    break
        except ngh2.NGH2Error as error:
            self._abandon(str(error))
            return
        self._dispatch()
        for stream_id, waiting in self._waiting.items():
            if not waiting.done() and self._http2.queued_body_size(stream_id) <= _QUEUED_BYTES:
                waiting.set_result(None)

    def end_overdue(self, now_s: float) -> None:
        """End calls whose clients take too long."""
        for stream in list(self._streams.values()):
            stream.end_if_overdue(now_s)

    def announce_end(self) -> None:
        """Ask the client to make no more calls here; those that it makes nevertheless are still answered."""
        if not self._is_over:
            self._http2.send_shutdown_notice()
            self.flush()

    def close(self) -> None:
        """End calls that are under way, and the connection."""
        if not self._is_over:
            self._http2.terminate_connection()
            self.flush()
            self._finish()

    def _dispatch(self) -> None:
        for event in self._http2.events():
            if (hear := _HEARD.get(type(event))) is not None:
                hear(self, event)

    def _received(self, event: ngh2.DataReceived) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:
            self.acknowledge(event.stream_id, len(event.data))
            return
        stream.received(event.data)
        if event.end_stream:
            stream.half_closed()

    def _asked(self, event: ngh2.RequestReceived) -> None:
        stream = self._streams[event.stream_id] = self._open_stream(self, event.stream_id, event.headers)
        stream.begin()
        if event.end_stream:
            stream.half_closed()

    def _closed(self, event: ngh2.StreamClosed) -> None:
        if (ended := self._streams.pop(event.stream_id, None)) is not None:
            ended.closed()

    def _all_sent(self, event: ngh2.TrailersReceived) -> None:
        if (stream := self._streams.get(event.stream_id)) is not None:
            stream.half_closed()

    def _greeted(self, event: ngh2.SettingsReceived) -> None:
        self._greeting.cancel()

    def _left(self, event: ngh2.ConnectionClosed) -> None:
        self._finish()

    def _abandon(self, reason: str) -> None:
        """Cut off a client that breaks the protocol."""
        _log.debug("connection ended", extra={"fields": {"reason": reason}})
        self._finish()
        self._transport.abort()

    def _finish(self) -> None:
        self._is_over = True
        self._end_streams()
        self._transport.close()

    def _end_streams(self) -> None:
        streams, self._streams = self._streams, {}
        self._is_over = True
        for stream in streams.values():
            stream.closed()


_HEARD: Mapping[type[ngh2.Event], Callable[[Connection, Any], None]] = {
    ngh2.DataReceived: Connection._received,
    ngh2.RequestReceived: Connection._asked,
    ngh2.StreamClosed: Connection._closed,
    ngh2.TrailersReceived: Connection._all_sent,
    ngh2.SettingsReceived: Connection._greeted,
    ngh2.ConnectionClosed: Connection._left,
}
"""What matters of what libnghttp2 tells."""
