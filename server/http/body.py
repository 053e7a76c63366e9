"""Receiving and decompressing request bodies, limited in size and time."""

import asyncio
import zlib

from aiohttp import StreamReader, hdrs, web

from cohabit.server.errors import InvalidRequest, Refused, too_large
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.threads import call

PATIENCE_S = 30.0
LEAST_BYTES_PER_S = 4096
"""Minimum average rate of a client after the first `PATIENCE_S`."""

_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_IDENTITY = frozenset({"", "identity"})
_FIRST_BYTES = 64 << 10
"""First block of a body of unknown length."""
_FILLED_AHEAD_BYTES = 1 << 20
_PIECE_BYTES = 256 << 10
"""Input of one call of zlib, which runs on a thread."""
_INFLATED_BYTES = 1 << 20
"""Maximum output of one call of zlib."""


class Heap:
    """Process memory in place of a lease, for the small bodies of control calls."""

    def reserve(self, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))

    def fill(self, view: memoryview) -> None:
        pass

    def free(self, view: memoryview) -> None:
        pass


async def read_body(request: web.Request, memory: Lease | Heap, limit_bytes: int, way_out: str = "") -> memoryview:
    """Receive a body into `memory`, and decompress it there.

    `way_out` is a hint for a body over the limit, if the limit is not --max-body. Sends 100 Continue first to a client
    that expects it. Raises Refused if the body is too large, too slow or of an unknown encoding, Overloaded, and
    InvalidRequest.
    """
    encoding = request.headers.get(hdrs.CONTENT_ENCODING, "").strip().lower()
    if encoding not in _IDENTITY and encoding not in _WINDOW_BITS:
        text = f"Unable to decompress request body, unknown Content-Encoding '{encoding[:40]}'"
        raise Refused("UnknownEncoding", text)
    length = request.content_length or 0
    if length > limit_bytes:
        raise too_large(f"the request body of {length} bytes", limit_bytes, way_out)
    body = BodyBuffer(memory, too_large("the request body", limit_bytes, way_out), limit_bytes, length)
    if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp reads any other value as a started answer
    await _receive(request.content, body)
    if encoding in _IDENTITY or not body.nbytes:
        return body.view
    inflated = BodyBuffer(memory, too_large("the inflated request body", limit_bytes, way_out), limit_bytes)
    await _inflate(body.view, encoding, inflated)
    body.free()
    return inflated.view


class BodyBuffer:
    """A block of memory that is replaced by a larger one when full."""

    def __init__(self, memory: Lease | Heap, over_limit: Refused, limit_bytes: int, capacity: int = 0) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._over_limit = over_limit
        self._block = memory.reserve(capacity)
        self._filled = 0
        self.nbytes = 0

    @property
    def view(self) -> memoryview:
        return self._block[: self.nbytes]

    def append(self, data: bytes) -> None:
        """Raises Refused beyond the limit, and Overloaded."""
        end = self.nbytes + len(data)
        if end > self._limit_bytes:
            raise self._over_limit
        if end > len(self._block):
            self._grow(end)
        if end > self._filled:
            self._fill(end)
        self._block[self.nbytes : end] = data
        self.nbytes = end

    def free(self) -> None:
        self._memory.free(self._block)

    def _grow(self, needed: int) -> None:
        larger = self._memory.reserve(min(max(_FIRST_BYTES, 2 * len(self._block), needed), self._limit_bytes))
        if self.nbytes:
            self._memory.fill(larger[: self.nbytes])
        larger[: self.nbytes] = self.view
        self.free()
        self._block, self._filled = larger, self.nbytes

    def _fill(self, end: int) -> None:
        """Get memory for the received bytes, and some ahead."""
        filled = min(end + _FILLED_AHEAD_BYTES, len(self._block))
        self._memory.fill(self._block[self._filled : filled])
        self._filled = filled


async def _receive(content: StreamReader, body: BodyBuffer) -> None:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    try:
        async with asyncio.timeout(None if content.is_eof() else PATIENCE_S) as timeout:
            while not content.at_eof():
                chunk, _ = await content.readchunk()
                body.append(chunk)
                if not content.is_eof():
                    timeout.reschedule(started_s + PATIENCE_S + body.nbytes / LEAST_BYTES_PER_S)
    except TimeoutError as error:
        waited_s = loop.time() - started_s
        text = f"the request body came too slowly: {body.nbytes} bytes in {waited_s:.3g} s"
        raise Refused("ClientTooSlow", text) from error


async def _inflate(data: memoryview, encoding: str, body: BodyBuffer) -> None:
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    start = 0
    try:
        while start < len(data) and not inflater.eof:
            piece: memoryview | bytes = data[start : start + _PIECE_BYTES]
            start += len(piece)
            inflated = b""
            while piece or len(inflated) == _INFLATED_BYTES:
                inflated = await call(True, inflater.decompress, piece, _INFLATED_BYTES)
                body.append(inflated)
                piece = inflater.unconsumed_tail
    except zlib.error as error:
        raise InvalidRequest(f"the request body is not {encoding}: {error}") from error
    if not inflater.eof:
        raise InvalidRequest(f"the request body is not {encoding}: it ends too early")
    surplus = len(inflater.unused_data) + len(data) - start
    if surplus:
        raise InvalidRequest(f"the request body is not {encoding}: {surplus} bytes follow its end")
