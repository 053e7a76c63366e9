"""Reading a request's body: limits on its size and on patience, gzip and deflate undone, one writable buffer."""

import asyncio
import zlib

from aiohttp import web

from server.errors import ClientTooSlow, InvalidRequest, PayloadTooLarge, UnknownEncoding
from server.protocol.body_memory import Share

_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_IDENTITY = frozenset({"", "identity"})
_PATIENCE_S = 30.0
_LEAST_BYTES_PER_S = 4096
"""What a client has to send on average, after the first `_PATIENCE_S`."""


async def read_body(
    request: web.Request, limit_bytes: int, share: Share, patience_s: float = _PATIENCE_S
) -> memoryview:
    """Read and inflate the body; its bytes are counted by `share`.

    The memory belongs to the caller, so that tensors can be views of it. Raises PayloadTooLarge, Overloaded,
    ClientTooSlow, UnknownEncoding or InvalidRequest.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _IDENTITY and encoding not in _WINDOW_BITS:
        raise UnknownEncoding(encoding[:40])
    if request.content_length is not None and request.content_length > limit_bytes:
        raise PayloadTooLarge(f"the request body of {request.content_length} bytes", limit_bytes)
    body = await _read(request, limit_bytes, share, patience_s)
    if encoding in _WINDOW_BITS and body:
        body = await asyncio.to_thread(_inflate, body, encoding, limit_bytes)
        share.take(len(body))
    return memoryview(body)


async def _read(request: web.Request, limit_bytes: int, share: Share, patience_s: float) -> bytes | bytearray:
    content = request.content
    if content.is_eof():  # it has come together with the headers
        whole: bytes = content.read_nowait()
        if len(whole) > limit_bytes:
            raise PayloadTooLarge("the request body", limit_bytes)
        share.take(len(whole))
        return whole
    body = bytearray()
    started_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(patience_s) as timeout:
            async for chunk in content.iter_any():
                share.take(len(chunk))
                body += chunk
                if len(body) > limit_bytes:
                    raise PayloadTooLarge("the request body", limit_bytes)
                timeout.reschedule(started_s + patience_s + len(body) / _LEAST_BYTES_PER_S)
    except TimeoutError as error:
        raise ClientTooSlow(len(body), asyncio.get_running_loop().time() - started_s) from error
    return body


def _inflate(body: bytes | bytearray, encoding: str, limit_bytes: int) -> bytearray:
    inflater = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        inflated = bytearray(inflater.decompress(body, limit_bytes + 1))
    except zlib.error as error:
        raise InvalidRequest(f"the request body is not {encoding}: {error}") from error
    if len(inflated) > limit_bytes:
        raise PayloadTooLarge("the inflated request body", limit_bytes)
    if not inflater.eof:
        raise InvalidRequest(f"the request body is not {encoding}: it ends too early")
    if inflater.unused_data:
        raise InvalidRequest(
            f"the request body is not {encoding}: {len(inflater.unused_data)} bytes follow its end"
        )
    return inflated
