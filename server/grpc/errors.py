"""The one table from domain errors to gRPC, and how every call's errors are answered."""

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError
from grpc import StatusCode

from server import errors

CODES: Mapping[type[errors.RequestError], StatusCode] = {
    errors.Unauthenticated: StatusCode.UNAUTHENTICATED,
    errors.PermissionMissing: StatusCode.PERMISSION_DENIED,
    errors.InvalidRequest: StatusCode.INVALID_ARGUMENT,
    errors.AlreadyRegistered: StatusCode.ALREADY_EXISTS,
    errors.RegionNotFound: StatusCode.NOT_FOUND,
    errors.ModelNotFound: StatusCode.NOT_FOUND,
    errors.ModelNotReady: StatusCode.UNAVAILABLE,
    errors.PayloadTooLarge: StatusCode.RESOURCE_EXHAUSTED,
    errors.ClientTooSlow: StatusCode.DEADLINE_EXCEEDED,
    errors.Unsupported: StatusCode.UNIMPLEMENTED,
    errors.Overloaded: StatusCode.UNAVAILABLE,
    errors.RequestTimedOut: StatusCode.DEADLINE_EXCEEDED,
    errors.ShuttingDown: StatusCode.UNAVAILABLE,
    errors.ExecutionFailed: StatusCode.INTERNAL,
    errors.DeviceLost: StatusCode.UNAVAILABLE,
    errors.ControlOff: StatusCode.UNAVAILABLE,
    errors.LoadFailed: StatusCode.INVALID_ARGUMENT,
    errors.NotInRepository: StatusCode.INTERNAL,
}

_MOST_CHARACTERS = 2000
"""Of a message: it travels in a header, and those are limited to 8 KiB."""

Call = Callable[[Any, Any], Awaitable[Any]]
_log = logging.getLogger("cohabit.grpc")


def code_of(error: errors.RequestError) -> StatusCode:
    return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)


def message_of(error: Exception) -> str:
    return str(error)[:_MOST_CHARACTERS]


def unforeseen(call: str) -> str:
    """Log the error being handled under an id; returns what the client is told."""
    incident = uuid.uuid4().hex[:12]
    _log.exception("internal error", extra={"fields": {"incident": incident, "call": call}})
    return f"internal error {incident}; the server's log has the details"


def answering(name: str, read: Callable[[bytes], Any], method: Call) -> Call:
    """Wrap a call so that it gets a message of its type, and what it raises becomes a status with the message."""

    async def answer(request: bytes, context: Any) -> Any:
        try:
            return await method(read(request), context)
        except errors.RequestError as error:
            code, message = code_of(error), message_of(error)
            if isinstance(error, errors.Overloaded):
                pause_ms = str(max(1, round(error.retry_after_s * 1e3)))
                context.set_trailing_metadata((("grpc-retry-pushback-ms", pause_ms),))
        except DecodeError as error:
            code, message = StatusCode.INVALID_ARGUMENT, f"the request is no {name}Request: {error}"
        except Exception:
            code, message = StatusCode.INTERNAL, unforeseen(name)
        await context.abort(code, message)
        return None

    return answer
