"""Tokens asked for around an HTTP handler."""

from server.http.message import Handler, Request, Response
from server.observe.access import Access, Permission


def guarded(handler: Handler, access: Access, permission: Permission) -> Handler:
    """Ask for a token before a handler sees the request; nothing is in between where none is needed."""
    if permission in access.open:
        return handler

    async def guard(request: Request) -> Response:
        access.require(request.header(b"authorization"), permission)
        return await handler(request)

    return guard
