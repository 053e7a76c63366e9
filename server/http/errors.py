"""The table of HTTP statuses for domain errors, and the JSON form of every error."""

import math
from collections.abc import Mapping

import msgspec
from aiohttp import web

from cohabit.server import errors

STATUS: Mapping[type[errors.RequestError], int] = {
    errors.Unauthenticated: 401,
    errors.PermissionMissing: 403,
    errors.InvalidRequest: 400,
    errors.ModelNotFound: 404,
    errors.ModelNotReady: 503,
    errors.RegionNotFound: 404,
    errors.PayloadTooLarge: 413,
    errors.ClientTooSlow: 408,
    errors.Unsupported: 501,
    errors.Overloaded: 503,
    errors.RateLimited: 429,
    errors.RequestTimedOut: 503,
    errors.ShuttingDown: 503,
    errors.ExecutionFailed: 500,
    errors.EngineFailed: 500,
    errors.DeviceUnavailable: 503,
    errors.ControlOff: 503,
    errors.LoadFailed: 400,
    errors.NotInRepository: 500,
}

_MOST_CHARACTERS = 2000
"""Length of a message, which may have names that a client chose."""


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode({"error": message})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def response_of(error: errors.RequestError) -> web.Response:
    return error_response(status_of(error), str(error)[:_MOST_CHARACTERS], _headers_of(error))


def status_of(error: errors.RequestError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def _headers_of(error: errors.RequestError) -> Mapping[str, str] | None:
    """Return the headers that tell a client what to do next."""
    match error:
        case errors.Unauthenticated():
            reason = ', error="invalid_token"' if error.wrong_token else ""
            return {"WWW-Authenticate": f'Bearer realm="cohabit"{reason}'}
        case errors.UnknownEncoding():
            return {"Accept-Encoding": "gzip, deflate"}
        case errors.Overloaded():
            return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        case _:
            return None
