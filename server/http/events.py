"""Answers that are server-sent events, each sent as soon as it is there."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

_PADDED_BYTES = 16 << 10
_SEND_BUFFER_BYTES = 16 << 10
"""Padded events are as long, and few wait in the kernel: with a receive buffer of 64 KiB, which Linux gives a client
that reads nothing, the next one waits after a few."""


class EventStream(web.StreamResponse):
    """An answer that goes on until its client has left or the events end."""

    _send_headers_immediately = False  # but with the first event

    def __init__(
        self, events: AsyncGenerator[bytes, None], first: bytes, patience_s: float, *, padded: bool = False
    ) -> None:
        """`first` was taken from the events, so that what refuses them is answered as an error.

        A client that takes no event for `patience_s` is disconnected, so that it keeps no place: of `padded` events
        soon, of others once the buffers of its connection are full.
        """
        super().__init__(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
        self._events = events
        self._first = first
        self._patience_s = patience_s
        self._padding = _PADDED_BYTES if padded else 0

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        try:
            return await super().prepare(request)
        except BaseException:
            await self._events.aclose()
            raise

    async def _start(self, request: web.BaseRequest) -> AbstractStreamWriter:
        transport = request.transport
        if transport is not None and self._padding:
            transport.set_write_buffer_limits(high=0)
            with suppress(OSError):
                socket_of = transport.get_extra_info("socket")
                socket_of.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return await super()._start(request)

    async def write_eof(self, data: bytes = b"") -> None:
        async with aclosing(self._events) as events:
            with suppress(ConnectionError, TimeoutError):
                await self._send(self._first)
                async for event in events:
                    await self._send(event)
        await super().write_eof(data)

    async def _send(self, event: bytes) -> None:
        async with asyncio.timeout(self._patience_s):
            await self.write(b"data: %b\n\n" % event.ljust(self._padding))
