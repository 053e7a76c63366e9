"""BYTES tensors on the wire: length and bytes of one element after the other, or JSON strings."""

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from server.errors import InvalidRequest
from server.protocol.model import Array

_LENGTH = struct.Struct("<I")


def from_binary(body: memoryview, name: str, shape: Sequence[int]) -> Array:
    """Read elements, each behind its length in four little-endian bytes. Raises InvalidRequest."""
    return shaped(list(_elements(body, name)), name, shape)


def to_binary(array: Array) -> bytes:
    return b"".join(_LENGTH.pack(len(element)) + element for element in array.ravel())


def from_json(data: msgspec.Raw, name: str, shape: Sequence[int]) -> Array:
    """Read strings, flat or nested. Raises InvalidRequest for anything else."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"data of input '{name}' cannot be read: {error}") from error
    return shaped(list(_texts(values, name)), name, shape)


def to_json(array: Array) -> msgspec.Raw:
    """Write strings; bytes that are no UTF-8 become U+FFFD, because JSON has no other way."""
    return msgspec.Raw(msgspec.json.encode([element.decode(errors="replace") for element in array.ravel()]))


def _elements(body: memoryview, name: str) -> Iterator[bytes]:
    offset = 0
    while offset < len(body):
        start = offset + _LENGTH.size
        if start > len(body):
            raise InvalidRequest(f"input '{name}' ends within the length of a BYTES element, at byte {offset}")
        (length,) = _LENGTH.unpack_from(body, offset)
        offset = start + length
        if offset > len(body):
            raise InvalidRequest(
                f"input '{name}' has a BYTES element of {length} bytes at byte {start}, but only"
                f" {len(body) - start} bytes are left"
            )
        yield bytes(body[start:offset])


def _texts(values: Any, name: str) -> Iterator[bytes]:
    if isinstance(values, str):
        yield values.encode()
        return
    if not isinstance(values, list):
        raise InvalidRequest(f"data of input '{name}' must be strings, got {str(values)[:40]}")
    for value in values:
        yield from _texts(value, name)


def shaped(elements: Sequence[bytes], name: str, shape: Sequence[int]) -> Array:
    expected = math.prod(shape)
    if len(elements) != expected:
        raise InvalidRequest(
            f"expected {expected} string elements for inference input '{name}', got {len(elements)}"
        )
    array = np.empty(expected, object)
    array[:] = elements
    return array.reshape(shape)
