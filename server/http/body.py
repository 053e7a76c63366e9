"""One request's body: bytes as they come, limits on their number and on patience, gzip and deflate undone."""

import asyncio
import zlib
from collections.abc import Callable

import numpy as np

from server.errors import ClientTooSlow, InvalidRequest, PayloadTooLarge, RequestError, UnknownEncoding
from server.protocol.body_memory import Share
from server.protocol.patience import patience_s

READ_AHEAD_BYTES = 256 << 10
"""Of a body that nobody has asked for yet; its client has to wait with the rest."""

_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_IDENTITY = frozenset({"", "identity"})


class Body:
    """Written by the connection, read by one handler. Belongs to the event loop's thread.

    A body whose length is known is received where it stays, so that tensors are views of what the kernel wrote.
    """

    __slots__ = (
        "_buffer",
        "_chunks",
        "_error",
        "_limit_bytes",
        "_on_change",
        "_share",
        "_waiter",
        "complete",
        "length",
        "nbytes",
        "unwanted",
    )

    def __init__(self, length: int | None, most_bytes: int, on_change: Callable[[], None]) -> None:
        """Expect `length` bytes, or chunks; `on_change` is called when more or less is wanted than before."""
        self.length = length
        self.nbytes = 0
        """Received so far."""
        self.complete = False
        self.unwanted = length is not None and length > most_bytes
        """Whether what comes is thrown away."""
        self._on_change = on_change
        self._buffer: memoryview | None = None
        """Of a body of known length."""
        self._chunks = bytearray()
        self._share: Share | None = None
        self._limit_bytes = most_bytes
        self._error: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def wants_more(self) -> bool:
        """Whether more should be received now."""
        return self._share is not None or self.unwanted or self.nbytes < READ_AHEAD_BYTES

    def room(self) -> memoryview:
        """Where the next bytes of a body of known length go. The memory is taken as bytes are written to it."""
        assert self.length is not None
        if self._buffer is None:
            self._buffer = np.empty(self.length, np.uint8).data
        room = self._buffer[self.nbytes :]
        return room[:READ_AHEAD_BYTES] if self._share is None else room

    def add(self, data: bytes) -> None:
        """Take bytes that were received elsewhere."""
        if self.unwanted:
            self.nbytes += len(data)
            return
        if self.length is None:
            self._chunks += data
        elif len(data) == self.length:
            self._buffer = memoryview(data)
        else:
            self.room()[: len(data)] = data
        self.received(len(data))

    def received(self, nbytes: int) -> None:
        """Hear that so many bytes have been written to `room`, or thrown away."""
        self.nbytes += nbytes
        if self._share is not None:
            self._account(nbytes)

    def end(self) -> None:
        """Hear that this was all of it."""
        self.complete = True
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Have `read` raise this."""
        self._error, self._share = error, None
        self._wake()

    def discard(self) -> None:
        """Throw away what has come and what still comes."""
        self.unwanted = True
        self._buffer, self._chunks = None, bytearray()
        self._on_change()

    def whole(self, most_bytes: int) -> memoryview | None:
        """All of it, if it has come without a fault and has at most so many bytes."""
        if self._buffer is None or not self.complete or self._error is not None or self.nbytes > most_bytes:
            return None
        return self._buffer

    async def read(self, limit_bytes: int, share: Share) -> memoryview:
        """Wait for all of it, counted by `share`. Raises PayloadTooLarge, Overloaded or ClientTooSlow."""
        if self.length is not None and self.length > limit_bytes:
            raise PayloadTooLarge(f"the request body of {self.length} bytes", limit_bytes)
        self._limit_bytes, self._share = limit_bytes, share
        self._account(self.nbytes)
        if not (self.complete or self._error):
            self._on_change()
            share.expect(1)
            try:
                await self._wait()
            finally:
                share.expect(-1)
        self._share = None
        if self._error is not None:
            raise self._error
        return memoryview(self._chunks) if self._buffer is None else self._buffer

    async def wait_for_end(self, seconds: float) -> None:
        """Wait until nothing more comes, though no longer than this."""
        if not self.complete:
            self._waiter = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._waiter], timeout=seconds)

    async def _wait(self) -> None:
        """Wait until it is complete or has failed; the longer, the more bytes have come."""
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        started_s = loop.time()
        end_s = started_s + patience_s(self.nbytes)
        while not self._waiter.done():
            if loop.time() >= end_s:
                self.fail(ClientTooSlow(self.nbytes, loop.time() - started_s))
                return
            await asyncio.wait([self._waiter], timeout=end_s - loop.time())
            end_s = started_s + patience_s(self.nbytes)

    def _account(self, nbytes: int) -> None:
        assert self._share is not None
        if self.nbytes > self._limit_bytes:
            self.fail(PayloadTooLarge("the request body", self._limit_bytes))
            return
        try:
            self._share.take(nbytes)
        except RequestError as error:
            self.fail(error)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def inflated(body: memoryview, encoding: str | None, limit_bytes: int, share: Share) -> memoryview:
    """Undo a Content-Encoding that has been checked. Raises PayloadTooLarge, Overloaded or InvalidRequest."""
    coding = _coding(encoding)
    if coding in _IDENTITY or not body:
        return body
    whole = await asyncio.to_thread(_inflate, body, coding, limit_bytes)
    share.take(len(whole))
    return memoryview(whole)


def check_encoding(encoding: str | None) -> None:
    """Raise UnknownEncoding for a Content-Encoding that is none of ours."""
    coding = _coding(encoding)
    if coding not in _IDENTITY and coding not in _WINDOW_BITS:
        raise UnknownEncoding(coding[:40])


def _coding(encoding: str | None) -> str:
    return (encoding or "").strip().lower()


def _inflate(body: memoryview, encoding: str, limit_bytes: int) -> bytearray:
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        whole = bytearray(inflater.decompress(body, limit_bytes + 1))
    except zlib.error as error:
        raise InvalidRequest(f"the request body is not {encoding}: {error}") from error
    if len(whole) > limit_bytes:
        raise PayloadTooLarge("the inflated request body", limit_bytes)
    if not inflater.eof:
        raise InvalidRequest(f"the request body is not {encoding}: it ends too early")
    if inflater.unused_data:
        raise InvalidRequest(
            f"the request body is not {encoding}: {len(inflater.unused_data)} bytes follow its end"
        )
    return whole
