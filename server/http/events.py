"""Answers made of server-sent events, each sent as soon as it is available."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

_PADDED_BYTES = 16 << 10
_SEND_BUFFER_BYTES = 16 << 10
"""Send buffer of the size of a padded event, so that few events wait in the kernel. Linux gives a client that reads
nothing a receive buffer of 64 KiB: after a few events, the next one waits."""


class EventStream(web.StreamResponse):
    """An answer that continues until its client leaves or the events end."""

    _send_headers_immediately = False  # sent with the first event

    def __init__(
        self, events: AsyncGenerator[bytes, None], first: bytes, patience_s: float, *, padded: bool = False
    ) -> None:
        """`first` is the first of the events, taken beforehand so that an initial refusal is answered as an error.

        A client that reads no event for `patience_s` is disconnected, so that it keeps no place: with `padded` events
        soon, with others once its connection's buffers are full.
        """
        super().__init__(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
        self._events = events
        self._first = first
        self._patience_s = patience_s
        self._padding = _PADDED_BYTES if padded else 0
        self._transport: asyncio.Transport | None = None

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        try:
            return await super().prepare(request)
        except BaseException:
            await self._events.aclose()
            raise

    async def _start(self, request: web.BaseRequest) -> AbstractStreamWriter:
        transport = self._transport = request.transport
        if transport is not None and self._padding:
            transport.set_write_buffer_limits(high=0)
            with suppress(OSError):
                socket_of = transport.get_extra_info("socket")
                socket_of.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return await super()._start(request)

    async def write_eof(self, data: bytes = b"") -> None:
        async with aclosing(self._events) as events:
            with suppress(ConnectionError):
                try:
                    await self._send(self._first)
                    async for event in events:
                        await self._send(event)
                except TimeoutError:
                    # At once: an orderly end would wait for the client to read what was sent before.
                    if self._transport is not None:
                        self._transport.abort()
                    return
        await super().write_eof(data)

    async def _send(self, event: bytes) -> None:
        async with asyncio.timeout(self._patience_s):
            await self.write(b"data: %b\n\n" % event.ljust(self._padding))
