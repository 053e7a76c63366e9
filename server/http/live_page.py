"""The live page at `/`, and the server-sent events that it draws."""

from aiohttp import hdrs, web

from cohabit.page.html import live_page, live_policy
from cohabit.server.frontend.access import Permission
from cohabit.server.http.endpoints import Endpoint
from cohabit.server.http.events import EventStream
from cohabit.server.view.live import LiveFeed

EVENTS_PATH = "/ui/events"

_WRITE_S = 5.0
"""Seconds until a page that reads no event is disconnected, so that it keeps no place."""


async def live_page_file(request: web.Request) -> web.Response:
    headers = {
        "Content-Security-Policy": f"{live_policy()}; frame-ancestors 'none'",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        hdrs.CACHE_CONTROL: "no-cache",
    }
    return web.Response(text=live_page(), content_type="text/html", headers=headers)


def live_events(feed: LiveFeed) -> Endpoint:
    """Return the endpoint that sends a document each second. It needs the same permission as metrics on this port."""

    async def events(request: web.Request) -> web.StreamResponse:
        documents = feed.documents()
        return EventStream(documents, await anext(documents), _WRITE_S, padded=True)

    return Endpoint("GET", (EVENTS_PATH,), events, permission=Permission.INFERENCE)
