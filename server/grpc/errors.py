"""Statuses of gRPC calls."""

import logging
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from grpc import StatusCode

from cohabit.server import errors
from cohabit.server.log import log_internal_error

_MOST_CHARACTERS = 2000
"""Maximum length of a message: it is a header, and clients limit headers to 8 KiB."""

_log = logging.getLogger("cohabit.grpc")


@dataclass(frozen=True, slots=True)
class Status:
    """Final status of a call; `metadata` is sent with it."""

    code: StatusCode
    message: str
    metadata: tuple[tuple[str, str], ...] = ()


class CallRefused(Exception):
    """Ends a call with a status that no domain error has."""

    def __init__(self, code: StatusCode, message: str) -> None:
        super().__init__(message)
        self.status = Status(code, message)


def status_of(error: Exception, call: str) -> Status:
    """Return the status for the error that is being handled."""
    match error:
        case errors.RequestError():
            metadata: tuple[tuple[str, str], ...] = ()
            if isinstance(error, errors.Overloaded):
                metadata = (("grpc-retry-pushback-ms", str(max(1, round(error.retry_after_s * 1e3)))),)
            return Status(StatusCode[errors.statuses_of(error).grpc], str(error)[:_MOST_CHARACTERS], metadata)
        case CallRefused():
            return error.status
        case DecodeError():
            return Status(StatusCode.INVALID_ARGUMENT, f"the request is not a {call}Request: {error}")
        case _:
            return Status(StatusCode.INTERNAL, log_internal_error(_log, call=call))
