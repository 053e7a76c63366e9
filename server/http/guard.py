"""Tokens asked for around an HTTP handler."""

from aiohttp import web
from aiohttp.typedefs import Handler

from server.operate.access import Access, Permission


def guarded(handler: Handler, access: Access, permission: Permission) -> Handler:
    """Ask for a token before a handler sees the request; nothing is in between where none is needed."""
    if permission in access.open:
        return handler

    async def guard(request: web.Request) -> web.StreamResponse:
        access.require(request.headers.get("Authorization"), permission)
        return await handler(request)

    return guard
