"""Tensor data on the wire, by datatype: little-endian bytes or JSON, to and from numpy."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, TensorMismatch
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Request, RequestedOutput
from cohabit.server.protocol.classification import classify
from cohabit.server.protocol.datatypes import BF16, BINARY_ONLY, BYTES, DTYPES, bf16_of_float32
from cohabit.server.protocol.shared_memory import Window

MOST_JSON_VALUES = 1 << 18
"""Of a tensor; 1 MiB of FP32. A JSON library holds the GIL for the whole of an array: 20 ms for this many."""
_WRITTEN_TOGETHER = 16 << 10
"""Values that are written as JSON while the GIL is held."""
_LENGTH = struct.Struct("<I")
_OPENING = re.compile(rb"[\s\[]*")


def from_binary(body: memoryview, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """View bytes as a tensor, without copying. Raises InvalidRequest if their number does not fit the shape."""
    check_size(len(body), name, datatype, shape)
    return np.frombuffer(body, DTYPES[datatype]).reshape(shape)


def from_window(window: Window, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Copy a tensor out of shared memory. Raises InvalidRequest before a read if the window does not fit the shape."""
    check_size(window.nbytes, name, datatype, shape)
    return from_binary(window.read(), name, datatype, shape)


def check_size(nbytes: int, name: str, datatype: str, shape: Sequence[int]) -> None:
    """Raise InvalidRequest if an input of this datatype and shape does not have this many bytes."""
    expected = math.prod(shape) * DTYPES[datatype].itemsize
    if expected != nbytes:
        raise TensorMismatch(
            f"input byte size mismatch for input '{name}': {datatype} {list(shape)} takes {expected} bytes,"
            f" got {nbytes}"
        )


def from_json(data: msgspec.Raw, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Read a flat array, or one nested like the shape.

    Raises InvalidRequest for anything else, and for more than MOST_JSON_VALUES.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" '{name}'"
        )
    depth, count = nesting(data), math.prod(shape)
    if depth not in (1, len(shape)):
        raise InvalidRequest(
            f"data of input '{name}' is nested {depth} deep; it must be a flat array"
            + (f", or nested {len(shape)} deep like its shape" if len(shape) > 1 else "")
        )
    if count > MOST_JSON_VALUES:
        raise InvalidRequest(
            f"input '{name}' has {count} values, and JSON takes {MOST_JSON_VALUES} at most, which are 1 MiB of FP32;"
            " send it as binary data"
        )
    separated = bytes(data).count(b",") + 1  # counted before the values become objects
    if separated > min(math.prod(max(size, 1) for size in shape), MOST_JSON_VALUES):
        raise InvalidRequest(f"input '{name}' has {separated} values, but its shape {list(shape)} takes {count}")
    array = _array(_decoded(data, name, datatype, depth), name, datatype)
    if array.size != count:
        raise InvalidRequest(f"input '{name}' has {array.size} values, but its shape {list(shape)} takes {count}")
    if array.ndim > 1 and array.shape != tuple(shape):
        raise InvalidRequest(f"data of input '{name}' is nested as {list(array.shape)}, its shape is {list(shape)}")
    return array.reshape(shape)


def nesting(data: msgspec.Raw) -> int:
    """Return how many brackets open before the first value."""
    opening = _OPENING.match(memoryview(data))
    return opening[0].count(b"[") if opening else 0


def _decoded(data: msgspec.Raw, name: str, datatype: str, depth: int) -> list[Any]:
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


def filled(value: float, datatype: str, shape: Sequence[int]) -> Array:
    """Return a tensor all of whose elements are `value`. Raises OverflowError or ValueError if that does not fit."""
    dtype = DTYPES[datatype]
    if datatype == BF16:
        return np.full(shape, bf16_of_float32(np.array([value], np.float32))[0])
    if dtype.kind in "iub":
        exact = int(value)
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if exact != value or not limits[0] <= exact <= limits[1]:
            raise ValueError(f"{value:g} is no {datatype}")
        return np.full(shape, exact, dtype)
    return np.full(shape, value, dtype)


def answered(request: Request, answer: Answer, info: ModelInfo) -> Iterator[tuple[RequestedOutput, str, Array]]:
    """Yield each output that the client asks for, with the datatype and the array that it gets.

    A classification is BYTES, whatever the model's datatype.
    """
    tensors = {tensor.name: tensor for tensor in info.outputs}
    for asked in request.outputs:
        tensor, array = tensors[asked.name], answer.outputs[asked.name]
        if asked.classes:
            yield asked, BYTES, classify(array, tensor, asked.classes, batched=info.max_batch_size > 0)
        else:
            yield asked, tensor.datatype, array


def to_binary(array: Array, datatype: str) -> bytes | memoryview:
    """Return a tensor's bytes: a view of the array if it is contiguous and has the datatype already.

    Each element of BYTES follows its length in four bytes.
    """
    if datatype == BYTES:
        return b"".join(_LENGTH.pack(len(element)) + element for element in array.ravel())
    return np.ascontiguousarray(array, DTYPES[datatype]).reshape(-1).view(np.uint8).data


def to_json(array: Array) -> msgspec.Raw:
    """Write a flat array, with bare NaN and Infinity, as Triton does. Bytes that are not UTF-8 become U+FFFD."""
    if array.dtype.kind == "O":
        return msgspec.Raw(msgspec.json.encode([element.decode(errors="replace") for element in array.ravel()]))
    flat = array.ravel()
    finite = array.dtype.kind != "f" or bool(np.isfinite(array).all())
    dump: Callable[[list[Any]], bytes] = msgspec.json.encode if finite else _dump_with_constants
    starts = range(0, flat.size, _WRITTEN_TOGETHER)
    return msgspec.Raw(
        b"[" + b",".join(dump(flat[start : start + _WRITTEN_TOGETHER].tolist())[1:-1] for start in starts) + b"]"
    )


def _dump_with_constants(values: list[float]) -> bytes:
    return json.dumps(values).encode()
