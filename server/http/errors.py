"""The one table from domain errors to HTTP, and the JSON form of every error."""

import logging
import math
import uuid
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from aiohttp import web

from server import errors

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
    errors.DeviceLost: 503,
    errors.ControlOff: 503,
    errors.LoadFailed: 400,
    errors.NotInRepository: 500,
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger("cohabit.http")


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode({"error": message})
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def status_of(error: errors.RequestError) -> int:
    return next(STATUS[cls] for cls in type(error).__mro__ if cls in STATUS)


def _headers_of(error: errors.RequestError) -> Mapping[str, str] | None:
    """What a client can do about it, besides the words."""
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


@web.middleware
async def json_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer every error as `{"error": ...}`; what nobody foresaw is logged under an id that the client gets."""
    try:
        return await handler(request)
    except errors.RequestError as error:
        return error_response(status_of(error), str(error), _headers_of(error))
    except web.HTTPException as error:
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return error_response(error.status, error.reason, allow)
    except web.RequestPayloadError as error:
        return error_response(400, f"the request body could not be read: {error}")
    except Exception:
        incident = uuid.uuid4().hex[:12]
        _log.exception("internal error", extra={"fields": {"incident": incident, "path": request.path}})
        return error_response(500, f"internal error {incident}; the server's log has the details")
