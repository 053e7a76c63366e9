"""An HTTP request whose head has been read, and an answer."""

import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import formatdate
from functools import cache, lru_cache
from http import HTTPStatus

import msgspec

from server.http.body import Body, check_encoding, inflated
from server.protocol.body_memory import Share

JSON = "application/json"
_ENCODING = b"content-encoding"

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}


class Request:
    """What a handler gets. Its body may still be on its way."""

    __slots__ = ("body", "headers", "keep_alive", "method", "parameters", "target")

    def __init__(
        self, method: bytes, target: bytes, headers: Mapping[bytes, bytes], body: Body, keep_alive: bool
    ) -> None:
        self.method = method
        self.target = target
        """As the client wrote it."""
        self.headers = headers
        """By lower-case name; what stands there several times is joined by commas."""
        self.body = body
        self.keep_alive = keep_alive
        """Whether the client may ask more on this connection."""
        self.parameters: Mapping[str, str] = {}
        """What the path says where its route has names."""

    def header(self, name: bytes) -> str | None:
        """A header by its lower-case name."""
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1")

    def whole(self, most_bytes: int) -> memoryview | None:
        """The body, if all of it has come already, in so many bytes and as it is."""
        return None if _ENCODING in self.headers else self.body.whole(most_bytes)

    async def read(self, limit_bytes: int, share: Share) -> memoryview:
        """Read and inflate the body; its bytes are counted by `share`.

        Raises PayloadTooLarge, Overloaded, ClientTooSlow, UnknownEncoding or InvalidRequest.
        """
        if _ENCODING not in self.headers:
            return await self.body.read(limit_bytes, share)
        encoding = self.header(_ENCODING)
        check_encoding(encoding)
        return await inflated(await self.body.read(limit_bytes, share), encoding, limit_bytes, share)


class Response(msgspec.Struct):
    """A whole answer."""

    body: bytes = b""
    status: int = 200
    content_type: str | None = None
    headers: Mapping[str, str] = {}

    def head(self, connection: bytes) -> bytes:
        """Everything before the body; `connection` is a header line, or nothing."""
        lines = (_STATUS_LINES[self.status], _date_line(), connection, _content_line(self.content_type))
        headers = b"".join([_line(name, value) for name, value in self.headers.items()]) if self.headers else b""
        return b"%b%b%b%b%bContent-Length: %d\r\n\r\n" % (*lines, headers, len(self.body))


Handler = Callable[[Request], Awaitable[Response]]


@lru_cache(maxsize=1024)
def _line(name: str, value: str) -> bytes:
    return f"{name}: {value}\r\n".encode("latin-1")


@cache
def _content_line(content_type: str | None) -> bytes:
    return b"" if content_type is None else _line("Content-Type", content_type)


class _Date:
    """The line of the current second."""

    second = 0
    line = b""


def _date_line() -> bytes:
    second = int(time.time())
    if second != _Date.second:
        _Date.second, _Date.line = second, _line("Date", formatdate(second, usegmt=True))
    return _Date.line
