"""JSON bodies and answers of HTTP endpoints, and the model that a path names."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter

from cohabit.server.errors import ONLY_INFERENCE
from cohabit.server.frontend.memory import Lease
from cohabit.server.http.body import Heap, read_body
from cohabit.server.protocol.json_body import parse_json

JSON = "application/json"

_T = TypeVar("_T")
_PIECE_BYTES = 256 << 10
_UNCOUNTED_BYTES = 64 << 10
"""Answers up to this size do not count as request memory; a connection has one at a time."""


class LeasedResponse(web.StreamResponse):
    """An answer that holds its request's memory until the client has read it, which bounds unread answers.

    Parts in leased memory are sent from there piece by piece, because the connection copies its input. Other parts
    count as request memory.
    """

    _send_headers_immediately = False  # sent with the first piece, as web.Response does

    def __init__(self, lease: Lease, parts: Sequence[bytes | memoryview], headers: Mapping[str, str]) -> None:
        """Raises Overloaded if parts outside of leased memory exceed the request memory."""
        super().__init__(headers=headers)
        self.content_length = nbytes = sum(map(len, parts))
        if nbytes > _UNCOUNTED_BYTES:
            lease.reserve(sum(len(part) for part in parts if not lease.memory.holds(part)))
        lease.retain()
        self._lease: Lease | None = lease
        self._parts = parts

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        try:
            return await super().prepare(request)
        except BaseException:
            self._release()
            raise

    async def write_eof(self, data: bytes = b"") -> None:
        try:
            last = data
            for piece in _pieces(self._parts):
                if last:
                    await self.write(last)  # waits while the client does not read
                last = piece
            await super().write_eof(last)
        finally:
            self._parts = ()
            self._release()

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    if sum(map(len, parts)) <= _PIECE_BYTES:
        yield b"".join(parts)
        return
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            yield bytes(part[start : start + _PIECE_BYTES])


def json_response(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=JSON)


def model_of(request: web.Request) -> tuple[str, str | None]:
    """Return the model and version that a path names."""
    return request.match_info["model"], request.match_info.get("version")


async def read_json(request: web.Request, of_type: type[_T], limit_bytes: int = 64 << 10) -> _T:
    """Read a small body as JSON of this type; an empty one is `{}`. Raises as `read_body` does."""
    return parse_json(await read_body(request, Heap(), limit_bytes, ONLY_INFERENCE), of_type)
