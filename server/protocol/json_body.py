"""JSON bodies: counted before any object is built, with the constants that JSON lacks and Triton accepts."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from cohabit.server.errors import InvalidRequest

_T = TypeVar("_T")
_UNCHECKED_BYTES = 64 << 10
_MOST_KEYS = 1 << 14
"""Maximum number of keys in bodies over `_UNCHECKED_BYTES`; a key takes many times its size in memory."""
_COUNTED_BYTES = 1 << 20
_CONSTANTS = (b"NaN", b"Infinity", b"Inf")
_BEFORE, _AFTER = frozenset(b"[,: \t\r\n"), frozenset(b"],} \t\r\n")
"""Characters that may surround a bare constant."""

Restore = Callable[[Raw], Raw]
"""Returns a value as the client sent it."""


def parse_json(body: memoryview, of_type: type[_T]) -> _T:
    """Parse a body; an empty one is `{}`. Raises InvalidRequest, also for a body with too many keys."""
    if len(body) > _UNCHECKED_BYTES:
        starts = range(0, len(body), _COUNTED_BYTES)
        if sum(bytes(body[start : start + _COUNTED_BYTES]).count(b":") for start in starts) > _MOST_KEYS:
            raise InvalidRequest(f"the request JSON has over {_MOST_KEYS} keys (or colons); send fewer tensors")
    try:
        return msgspec.json.decode(body or b"{}", type=of_type)
    except RecursionError as error:
        raise InvalidRequest("failed to parse the request JSON: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from error


def parse_with_constants(body: memoryview, of_type: type[_T]) -> tuple[_T, Restore]:
    """Parse a body that may have bare NaN and Infinity where `of_type` has `Raw`. Raises as `parse_json` does.

    Until restored, these values are valid JSON, with strings in place of the constants.
    """
    try:
        return parse_json(body, of_type), lambda raw: raw
    except InvalidRequest:
        sent = bytes(body)
        valid = _without_constants(sent)
        if valid == sent:
            raise
    parsed, begin = parse_json(memoryview(valid), of_type), _address(valid)

    def restore(raw: Raw) -> Raw:
        if not len(memoryview(raw)):
            return raw
        start = _address(raw) - begin
        return Raw(sent[start : start + len(memoryview(raw))])

    return parsed, restore


def _without_constants(sent: bytes) -> bytes:
    """Replace each bare constant by a string of the same length."""
    valid = bytearray(sent)
    for start, end in _constants(sent):
        valid[start:end] = b'"' + b" " * (end - start - 2) + b'"'
    return bytes(valid)


def _constants(sent: bytes) -> Iterator[tuple[int, int]]:
    for name in _CONSTANTS:
        end = 0
        while (at := sent.find(name, end)) >= 0:
            start, end = at - sent.startswith(b"-", max(at - 1, 0)), at + len(name)
            if start > 0 and sent[start - 1] in _BEFORE and end < len(sent) and sent[end] in _AFTER:
                yield start, end


def _address(text: bytes | Raw) -> int:
    return int(np.frombuffer(memoryview(text), np.uint8).ctypes.data)
