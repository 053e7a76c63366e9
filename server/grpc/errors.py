"""The table of gRPC statuses for domain errors, and the status that a call ends with."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from grpc import StatusCode

from cohabit.server import errors
from cohabit.server.log import log_internal_error

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
    errors.EngineFailed: StatusCode.INTERNAL,
    errors.DeviceUnavailable: StatusCode.UNAVAILABLE,
    errors.ControlOff: StatusCode.UNAVAILABLE,
    errors.LoadFailed: StatusCode.INVALID_ARGUMENT,
    errors.NotInRepository: StatusCode.INTERNAL,
}

_MOST_CHARACTERS = 2000
"""Length of a message: it is a header, and clients limit those to 8 KiB."""

_log = logging.getLogger("cohabit.grpc")


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ends; `metadata` is sent with it."""

    code: StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...] = ()


class CallRefused(Exception):
    """A call ends with a status that no domain error has."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = Status(code, message)


def code_of(error: errors.RequestError) -> StatusCode:
    return next(CODES[cls] for cls in type(error).__mro__ if cls in CODES)


def status_of(error: Exception, call: str) -> Status:
    """Return how a call ends that raised this error, which is being handled."""
    match error:
        case errors.RequestError():
            metadata: tuple[tuple[str, str], ...] = ()
            if isinstance(error, errors.Overloaded):
                metadata = (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1e3)))),)
            return Status(code_of(error), str(error)[:_MOST_CHARACTERS], metadata)
        case CallRefused():
            return error.status
        case DecodeError():
            return Status(StatusCode.INVALID_ARGUMENT, f"the request is no {call}Request: {error}")
        case _:
            return Status(StatusCode.INTERNAL, log_internal_error(_log, call=call))
