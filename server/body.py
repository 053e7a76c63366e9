"""Reading a request's body: a limit on its size, gzip and deflate undone, one writable buffer."""

import asyncio
import zlib

from aiohttp import web

from server.errors import InvalidRequest, PayloadTooLarge, UnknownEncoding

_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "x-gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}
_IDENTITY = frozenset({"", "identity"})


async def read_body(request: web.Request, limit_bytes: int) -> memoryview:
    """Read and inflate the body. Raises PayloadTooLarge, UnknownEncoding or InvalidRequest.

    The memory is writable and belongs to the caller, so that tensors can be views of it.
    """
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in _IDENTITY and encoding not in _WINDOW_BITS:
        raise UnknownEncoding(encoding[:40])
    if request.content_length is not None and request.content_length > limit_bytes:
        raise PayloadTooLarge(f"the request body of {request.content_length} bytes", limit_bytes)
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            raise PayloadTooLarge("the request body", limit_bytes)
    if encoding in _WINDOW_BITS and body:
        body = await asyncio.to_thread(_inflate, body, encoding, limit_bytes)
    return memoryview(body)


def _inflate(body: bytearray, encoding: str, limit_bytes: int) -> bytearray:
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
