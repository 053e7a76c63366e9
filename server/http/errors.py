"""The JSON form of every error over HTTP, and the headers of some."""

import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from cohabit.server import errors

_MOST_CHARACTERS = 2000
"""Length of a message, which may have names that a client chose."""


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode({"error": message})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def response_of(error: errors.RequestError) -> web.Response:
    return error_response(errors.statuses_of(error).http, str(error)[:_MOST_CHARACTERS], _headers_of(error))


def _headers_of(error: errors.RequestError) -> Mapping[str, str] | None:
    """Return the headers that tell a client what to do next."""
    match error:
        case errors.Unauthenticated():
            reason = ', error="invalid_token"' if error.wrong_token else ""
            return {"WWW-Authenticate": f'Bearer realm="cohabit"{reason}'}
        case errors.Refused(kind="UnknownEncoding"):
            return {"Accept-Encoding": "gzip, deflate"}
        case errors.Overloaded():
            return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        case _:
            return None
