"""JSON bodies: counted before any object is built, with the constants that JSON lacks and Triton accepts."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import Raw

from cohabit.server.errors import InvalidRequest
from cohabit.server.protocol.json_structure import Counts, counts_of, long_arrays

_T = TypeVar("_T")
_UNCOUNTED_BYTES = 4 << 10
"""A body up to this size cannot have too many objects."""
_MOST_KEYS = _MOST_CONTAINERS = 1 << 14
_MOST_STRINGS = 1 << 15
"""Maximum numbers of keys, of arrays and objects, and of strings; each takes many times its size in memory."""
_WHOLE_BYTES = 64 << 10
"""A body up to this size is parsed with its tensors."""
_MOST_DESCRIPTION_BYTES = 256 << 10
"""Maximum size of a body without its tensors. The parser holds the GIL meanwhile: up to 2 ms."""
_CONSTANTS = (b"NaN", b"Infinity", b"Inf")
_BEFORE, _AFTER = frozenset(b"[,: \t\r\n"), frozenset(b"],} \t\r\n")
"""Characters that may surround a bare constant."""
_CUT = b"null"
"""Stands for a tensor's array while the rest is parsed; no other field of a request takes it."""

Restore = Callable[[Raw], Raw]
"""Returns a value as the client sent it."""


def parse_json(body: memoryview, of_type: type[_T]) -> _T:
    """Parse a body; an empty one is `{}`. Raises InvalidRequest, also for a body with too many keys or arrays."""
    if len(body) > _UNCOUNTED_BYTES:
        counts = counts_of(body)
        _require_few(counts)
        if counts.containers > _MOST_CONTAINERS:
            raise _too_many(counts.containers, "arrays and objects", _MOST_CONTAINERS)
    try:
        return msgspec.json.decode(body or b"{}", type=of_type)
    except RecursionError as error:
        raise InvalidRequest("failed to parse the request JSON: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from error


def parse_with_tensors(body: memoryview, of_type: type[_T]) -> tuple[_T, Restore]:
    """Parse a body whose fields of type `Raw` may be long arrays, or have bare NaN and Infinity.

    Raises as `parse_json` does. Until restored, these values are others. Restored ones are JSON only if they are short.
    """
    if len(body) <= _WHOLE_BYTES:
        parsed, text = _parse_with_constants(body, of_type)
        return parsed, _whole if text is body else lambda raw: Raw(body[_place(raw, text)])
    _require_few(counts_of(body))
    arrays: dict[int, slice] = {}  # by the place of what stands for them
    parts: list[bytes | memoryview] = []
    size = end = 0
    for array in long_arrays(body):
        parts += [body[end : array.start], _CUT]
        size += array.start - end
        arrays[size] = array
        size += len(_CUT)
        end = array.stop
    parts.append(body[end:])
    size += len(body) - end
    if size > _MOST_DESCRIPTION_BYTES:
        raise InvalidRequest(
            f"the request JSON has {size} bytes in addition to arrays of numbers, the limit is"
            f" {_MOST_DESCRIPTION_BYTES}; send tensors as binary data"
        )
    described = memoryview(b"".join(parts))
    parsed, text = _parse_with_constants(described, of_type)

    def restore(raw: Raw) -> Raw:
        place = _place(raw, text)
        array = arrays.get(place.start) if len(memoryview(raw)) else None
        return Raw(described[place] if array is None else body[array])

    return parsed, restore


def _require_few(counts: Counts) -> None:
    if counts.keys > _MOST_KEYS:
        raise _too_many(counts.keys, "keys", _MOST_KEYS)
    if counts.strings > _MOST_STRINGS:
        raise _too_many(counts.strings, "strings", _MOST_STRINGS)


def _too_many(count: int, of_what: str, most: int) -> InvalidRequest:
    return InvalidRequest(f"the request JSON has {count} {of_what}, the limit is {most}; send less at once")


def _parse_with_constants(body: memoryview, of_type: type[_T]) -> tuple[_T, bytes | memoryview]:
    """Parse a body that may have bare NaN and Infinity where `of_type` has `Raw`. Raises as `parse_json` does.

    Returns the parsed text, too: that of the body, with strings of the same lengths in place of the constants.
    """
    try:
        return parse_json(body, of_type), body
    except InvalidRequest:
        sent = bytes(body)
        valid = _without_constants(sent)
        if valid == sent:
            raise
    return parse_json(memoryview(valid), of_type), valid


def _whole(raw: Raw) -> Raw:
    return raw


def _place(raw: Raw, text: bytes | memoryview) -> slice:
    """Return where a value is in the text that it was parsed from."""
    nbytes = len(memoryview(raw))
    start = _address(raw) - _address(text) if nbytes else 0
    return slice(start, start + nbytes)


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


def _address(text: bytes | memoryview | Raw) -> int:
    return int(np.frombuffer(memoryview(text), np.uint8).ctypes.data)
