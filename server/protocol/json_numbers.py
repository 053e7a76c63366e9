"""Arrays of numbers as JSON. Long arrays are read and written in pieces, so that other threads can run in between.

One call of a JSON library holds the interpreter lock until it ends: half a second for 64 MiB of numbers.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array
from cohabit.server.protocol.datatypes import DTYPES

_OPENING = re.compile(rb"[\s\[]*")
_BRACKETS = b"[]"
_STRUCTURE = b"[],"
VALUES = bytes(byte for byte in range(256) if byte not in _STRUCTURE)
"""What a JSON array has besides its structure."""
_PIECE_BYTES = 64 << 10
_PIECE_VALUES = 16 << 10


def decode(data: memoryview, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Read a flat array, or one nested like the shape. Raises InvalidRequest for anything else."""
    depth = _depth(data, name, rank=len(shape))
    if len(data) > 4 * _PIECE_BYTES:
        return _decode_in_pieces(data, name, datatype, shape, depth)
    array = _array(_decode(data, name, datatype, depth), name, datatype)
    count = math.prod(shape)
    if array.size != count:
        raise InvalidRequest(f"input '{name}' has {array.size} values, but its shape {list(shape)} takes {count}")
    if array.ndim > 1 and array.shape != tuple(shape):
        raise InvalidRequest(f"data of input '{name}' is nested as {list(array.shape)}, its shape is {list(shape)}")
    return array.reshape(shape)


def encode(array: Array) -> bytes:
    """Write a flat array, with bare NaN and Infinity, as Triton does."""
    flat = array.ravel()
    finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    dump: Callable[[list[Any]], bytes] = msgspec.json.encode if finite else _dump_with_constants
    if flat.size <= _PIECE_VALUES:
        return dump(flat.tolist())
    pieces = [b"["]
    for start in range(0, flat.size, _PIECE_VALUES):
        pieces += (dump(flat[start : start + _PIECE_VALUES].tolist())[1:-1], b",")
    pieces[-1] = b"]"
    return b"".join(pieces)


def _dump_with_constants(values: list[float]) -> bytes:
    return json.dumps(values).encode()


def nesting(data: memoryview) -> int:
    """Return how many brackets open before the first value."""
    opening = _OPENING.match(data)
    return opening[0].count(b"[") if opening else 0


def _depth(data: memoryview, name: str, rank: int) -> int:
    depth = nesting(data)
    if depth not in (1, rank):
        raise InvalidRequest(
            f"data of input '{name}' is nested {depth} deep; it must be a flat array"
            + (f", or nested {rank} deep like its shape" if rank > 1 else "")
        )
    return depth


def _decode_in_pieces(data: memoryview, name: str, datatype: str, shape: Sequence[int], depth: int) -> Array:
    """Read the values without the inner brackets, and check separately that these are in the right places."""
    flat = np.empty(math.prod(shape), DTYPES[datatype])
    structure = bytearray()
    done = 0
    for piece in _pieces(data, name):
        values = _decode(b"[%b]" % piece.translate(None, _BRACKETS), name, datatype, depth=1)
        if done + len(values) > flat.size:
            raise InvalidRequest(f"input '{name}' has more values than the {flat.size} of its shape {list(shape)}")
        flat[done : done + len(values)] = _array(values, name, datatype)
        done += len(values)
        structure += piece.translate(None, VALUES) + b","
    if done != flat.size:
        raise InvalidRequest(f"input '{name}' has {done} values, but its shape {list(shape)} takes {flat.size}")
    if structure[:-1] != _brackets(shape if depth > 1 else (flat.size,)):
        raise InvalidRequest(f"data of input '{name}' is not nested like its shape, {list(shape)}")
    return flat.reshape(shape)


def _pieces(data: memoryview, name: str) -> Iterator[bytes]:
    """Cut at commas, and leave these out."""
    start = 0
    while start < len(data):
        piece = bytes(data[start : start + _PIECE_BYTES])
        if start + len(piece) < len(data):
            comma = piece.rfind(b",")
            if comma < 0:
                raise InvalidRequest(f"data of input '{name}' has a value of over {_PIECE_BYTES} characters")
            piece = piece[:comma]
        yield piece
        start += len(piece) + 1


def _brackets(shape: Sequence[int]) -> bytes:
    """Return an array's JSON without its values."""
    text = b"[%b]" % (b"," * (shape[-1] - 1))
    for count in reversed(shape[:-1]):
        text = b"[%b]" % b",".join([text] * count)
    return text


def _decode(data: memoryview | bytes, name: str, datatype: str, depth: int) -> list[Any]:
    try:
        values: list[Any] = _decoder(datatype, depth).decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {error}") from error
    return values


@lru_cache(maxsize=64)
def _decoder(datatype: str, depth: int) -> msgspec.json.Decoder[Any]:
    nested: Any = {"b": bool, "f": float}.get(DTYPES[datatype].kind, int)
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested)


def _array(values: list[Any], name: str, datatype: str) -> Array:
    dtype = DTYPES[datatype]
    try:
        if dtype.kind != "f":
            return np.array(values, dtype)
        doubles: Array = np.array(values, np.float64)
    except OverflowError as error:
        raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {error}") from error
    except ValueError as error:
        raise InvalidRequest(f"data of input '{name}' is nested unevenly; rows must be of one length") from error
    with np.errstate(over="ignore"):
        array = doubles.astype(dtype)
    if not np.isfinite(array).all():
        beyond = doubles[~np.isfinite(array)][0]
        raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {beyond:g} is out of range")
    return array
