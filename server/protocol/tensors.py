"""Tensor data on the wire, by datatype: little-endian bytes or JSON, to and from numpy."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from server.errors import InvalidRequest
from server.protocol import json_numbers, strings
from server.protocol.datatypes import BINARY_ONLY, BYTES, DTYPES
from server.protocol.model import Array


def from_binary(body: memoryview, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """View bytes as a tensor, without copying. Raises InvalidRequest if they are not one of this shape."""
    if datatype == BYTES:
        return strings.from_binary(body, name, shape)
    dtype = DTYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if expected != len(body):
        raise InvalidRequest(
            f"input byte size mismatch for input '{name}': {datatype} {list(shape)} takes {expected} bytes,"
            f" got {len(body)}"
        )
    return np.frombuffer(body, dtype).reshape(shape)


def from_json(data: msgspec.Raw, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Read a flat array, or one nested like the shape. Raises InvalidRequest for all that is not exactly that."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" '{name}'"
        )
    if datatype == BYTES:
        return strings.from_json(data, name, shape)
    return json_numbers.decode(memoryview(data), name, datatype, shape)


def to_binary(array: Array, datatype: str) -> bytes | memoryview:
    """Return a tensor's bytes: a view of the array where it lies in one piece and has the type already."""
    if datatype == BYTES:
        return strings.to_binary(array)
    return np.ascontiguousarray(array, DTYPES[datatype]).reshape(-1).view(np.uint8).data


def to_json(array: Array) -> msgspec.Raw:
    """Write a flat array; NaN and infinities stand bare, as Triton writes them."""
    if array.dtype.kind == "O":
        return strings.to_json(array)
    return msgspec.Raw(json_numbers.encode(array))
