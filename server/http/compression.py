"""Compressed answers: only if a client chose so, and never for errors. Large answers are compressed on a thread.

HTTP libraries (such as tritonclient's asyncio client) announce `gzip, deflate, br` by default, and gzip takes longer
over a tensor than most networks. A bare list is therefore answered uncompressed, as RFC 9110 allows. A single coding,
or weights, count as a choice and are honoured.
"""

import zlib
from collections.abc import Iterable

_LEVEL = 1
_PLAIN = "identity"
_WINDOW_BITS = {"gzip": zlib.MAX_WBITS | 16, "deflate": zlib.MAX_WBITS}


def chosen_encoding(accept: str | None) -> str | None:
    """Return `gzip`, `deflate` or None for an Accept-Encoding header."""
    if not accept:
        return None
    codings = [c for c in (part.strip() for part in accept.lower().split(",")) if c]
    if len(codings) > 1 and ";" not in accept:
        return None
    known = (*_WINDOW_BITS, _PLAIN)
    weights = {coding: weight for coding, weight in map(_weighted, codings) if coding in known}
    best = max(weights, key=weights.__getitem__, default=_PLAIN)
    return best if best != _PLAIN and weights[best] > 0 else None


def compress(parts: Iterable[bytes | memoryview], encoding: str) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    return b"".join([*map(compressor.compress, parts), compressor.flush()])


def _weighted(coding: str) -> tuple[str, float]:
    name, _, parameter = coding.partition(";")
    key, _, value = parameter.partition("=")
    try:
        return name.strip(), float(value) if key.strip() == "q" else 1.0
    except ValueError:
        return name.strip(), 0.0
