"""Connection between a front end and the engine: whole messages over a Unix socket."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from cohabit.server.ipc.messages import LENGTH_BYTES

M = TypeVar("M")


class MessageChannel(asyncio.Protocol, Generic[M]):
    """Sends and receives messages in order. Belongs to the event loop's thread."""

    def __init__(
        self,
        encode: Callable[[Any], bytes],
        decode: Callable[[memoryview], M],
        on_message: Callable[[M], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._on_message = on_message
        self._on_closed = on_closed
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_closed()

    def send(self, message: Any) -> None:
        """Send a message. After the connection has ended, and `on_closed` was called, messages are dropped."""
        if self._transport is not None:
            self._transport.write(self._encode(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        messages = []
        with memoryview(self._buffer) as view:
            while start + LENGTH_BYTES <= len(view):
                end = start + LENGTH_BYTES + int.from_bytes(view[start : start + LENGTH_BYTES], "little")
                if end > len(view):
                    break
                with view[start + LENGTH_BYTES : end] as body:
                    messages.append(self._decode(body))
                start = end
        del self._buffer[:start]
        for message in messages:
            self._on_message(message)
