"""JSON error formats of HTTP, and the headers of some errors."""

import math
import re
from collections.abc import Mapping

import msgspec
from aiohttp import web

from cohabit.server import errors

_OPENAI = "/v1/"
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
_MOST_CHARACTERS = 2000
"""Maximum length of a message, which may contain names chosen by clients."""


def error_response(
    status: int,
    message: str,
    headers: Mapping[str, str] | None = None,
    *,
    path: str = "",
    kind: str | None = None,
) -> web.Response:
    """Return an error in OpenAI's format if `path` is one of OpenAI's, else in Triton's."""
    body = msgspec.json.encode({"error": _described(status, message, path, kind)})
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")


def _described(status: int, message: str, path: str, kind: str | None) -> object:
    if not path.startswith(_OPENAI):
        return message
    code = None if kind is None else _CAPITAL.sub("_", kind).lower()
    caused_by = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": caused_by, "param": None, "code": code}


def response_of(error: errors.RequestError, path: str = "") -> web.Response:
    status, message = errors.statuses_of(error).http, str(error)[:_MOST_CHARACTERS]
    return error_response(status, message, _headers_of(error), path=path, kind=error.kind)


def error_of(error: errors.RequestError, path: str) -> object:
    """Return the `error` value for an answer that has already started."""
    return _described(errors.statuses_of(error).http, str(error)[:_MOST_CHARACTERS], path, error.kind)


def _headers_of(error: errors.RequestError) -> Mapping[str, str] | None:
    """Return headers that tell a client what to do next."""
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
