"""The live page at `/`, and the server-sent events that it draws."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter

from cohabit.server.frontend.access import Permission
from cohabit.server.http.endpoints import Endpoint
from cohabit.server.view.live import LiveFeed
from cohabit.server.view.page import live_page, live_policy

EVENTS_PATH = "/ui/events"

_WRITE_S = 5.0
"""A page that takes no event for this long is disconnected, so that it keeps no place."""
_LEAST_EVENT_BYTES = 16 << 10
_SEND_BUFFER_BYTES = 16 << 10
"""Events are at least as long, and few wait in the kernel: with a receive buffer of 64 KiB, which Linux gives a client
that reads nothing, the next event waits after five seconds."""


async def live_page_file(request: web.Request) -> web.Response:
    return page_file(live_page(), live_policy())


def page_file(page: str, policy: str) -> web.Response:
    """Answer with a page under its Content-Security-Policy."""
    headers = {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        hdrs.CACHE_CONTROL: "no-cache",
    }
    return web.Response(text=page, content_type="text/html", headers=headers)


def live_events(feed: LiveFeed) -> Endpoint:
    """Return the endpoint that sends a document each second. It needs the permission that metrics need here."""

    async def events(request: web.Request) -> web.StreamResponse:
        documents = feed.documents()
        return EventStream(documents, await anext(documents))

    return Endpoint("GET", (EVENTS_PATH,), events, permission=Permission.INFERENCE)


class EventStream(web.StreamResponse):
    """An answer that goes on until its client has left or the documents end."""

    def __init__(self, documents: AsyncGenerator[bytes, None], first: bytes) -> None:
        """`first` was taken from the documents, so that what refuses them is answered as an error."""
        super().__init__(headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"})
        self._documents = documents
        self._first = first

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        try:
            return await super().prepare(request)
        except BaseException:
            await self._documents.aclose()
            raise

    async def _start(self, request: web.BaseRequest) -> AbstractStreamWriter:
        transport = request.transport
        if transport is not None:
            transport.set_write_buffer_limits(high=0)
            with suppress(OSError):
                socket_of = transport.get_extra_info("socket")
                socket_of.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        return await super()._start(request)

    async def write_eof(self, data: bytes = b"") -> None:
        async with aclosing(self._documents) as documents:
            with suppress(ConnectionError, TimeoutError):
                await self._send(self._first)
                async for document in documents:
                    await self._send(document)
        await super().write_eof(data)

    async def _send(self, document: bytes) -> None:
        async with asyncio.timeout(_WRITE_S):
            await self.write(b"data: %b\n\n" % document.ljust(_LEAST_EVENT_BYTES))
