"""A tensor's data on the wire: JSON numbers or little-endian bytes, to and from numpy."""

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from server import strings
from server.datatypes import BINARY_ONLY, BYTES, DTYPES
from server.errors import InvalidRequest
from server.model import Array

_LARGEST_INT64 = 2**63 - 1
_OPENING = re.compile(rb"[\s\[]*")


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
    values = _decode(data, name, datatype, rank=len(shape))
    array = _array(values, name, datatype)
    count = math.prod(shape)
    if array.size != count:
        raise InvalidRequest(f"input '{name}' has {array.size} values, but its shape {list(shape)} takes {count}")
    if array.ndim > 1 and array.shape != tuple(shape):
        raise InvalidRequest(f"data of input '{name}' is nested as {list(array.shape)}, its shape is {list(shape)}")
    return array.reshape(shape)


def to_binary(array: Array, datatype: str) -> bytes:
    if datatype == BYTES:
        return strings.to_binary(array)
    return array.astype(DTYPES[datatype], copy=False).tobytes()


def to_json(array: Array) -> msgspec.Raw:
    """Write a flat array; NaN and infinities stand bare, as Triton writes them."""
    if array.dtype.kind == "O":
        return strings.to_json(array)
    values = array.ravel().tolist()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return msgspec.Raw(json.dumps(values).encode())
    return msgspec.Raw(msgspec.json.encode(values))


def _decode(data: msgspec.Raw, name: str, datatype: str, rank: int) -> list[Any]:
    opening = _OPENING.match(memoryview(data))
    depth = opening[0].count(b"[") if opening else 0
    if depth not in (1, rank):
        raise InvalidRequest(
            f"data of input '{name}' is nested {depth} deep; it must be a flat array"
            + (f", or nested {rank} deep like its shape" if rank > 1 else "")
        )
    try:
        values: list[Any] = _decoder(datatype, depth).decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {error}") from error
    return values


@lru_cache(maxsize=64)
def _decoder(datatype: str, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = _element(DTYPES[datatype])
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _element(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "b":
        return bool
    if dtype.kind == "f":
        return float
    limits = np.iinfo(dtype)
    if limits.max > _LARGEST_INT64:  # beyond what msgspec can compare with; numpy refuses the rest
        return Annotated[int, Meta(ge=0)]
    return Annotated[int, Meta(ge=int(limits.min), le=int(limits.max))]


def _array(values: list[Any], name: str, datatype: str) -> Array:
    dtype = DTYPES[datatype]
    try:
        if dtype.kind != "f":
            return np.array(values, dtype)
        doubles: Array = np.array(values, np.float64)
    except OverflowError as error:
        raise InvalidRequest(
            f"data of input '{name}' does not fit {datatype}: an integer is out of range"
        ) from error
    except ValueError as error:
        raise InvalidRequest(f"data of input '{name}' is nested unevenly; rows must be of one length") from error
    with np.errstate(over="ignore"):
        array = doubles.astype(dtype)
    if not np.isfinite(array).all():
        beyond = doubles[~np.isfinite(array)][0]
        raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {beyond:g} is out of range")
    return array
