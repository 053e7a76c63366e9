"""Tensor data on the wire, by datatype: little-endian bytes or JSON, to and from numpy."""

import math
import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, TensorMismatch
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Request, RequestedOutput
from cohabit.server.protocol import json_numbers
from cohabit.server.protocol.classification import classify
from cohabit.server.protocol.datatypes import BF16, BINARY_ONLY, BYTES, DTYPES, bf16_of_float32
from cohabit.server.protocol.shared_memory import Window

_LENGTH = struct.Struct("<I")


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
    """Read a flat array, or one nested like the shape. Raises InvalidRequest for anything else."""
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" '{name}'"
        )
    return json_numbers.decode(memoryview(data), name, datatype, shape)


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
    return msgspec.Raw(json_numbers.encode(array))
