"""Tensor data on the wire, by datatype: little-endian bytes or JSON, to and from numpy."""

import json
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from cohabit.server.errors import InvalidRequest, TensorMismatch
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Request, RequestedOutput
from cohabit.server.protocol.classification import classify
from cohabit.server.protocol.datatypes import BF16, BINARY_ONLY, BYTES, DTYPES, bf16_of_float32
from cohabit.server.protocol.json_structure import PIECE_BYTES, without_space
from cohabit.server.protocol.shared_memory import Window

MOST_JSON_VALUES = 1 << 18
"""Maximum number of values of a tensor in JSON: 1 MiB of FP32."""
_READ_TOGETHER_BYTES = 64 << 10
"""Bytes of JSON parsed per call. JSON libraries hold the GIL throughout, and build an object for each value."""
_WRITTEN_TOGETHER = 16 << 10
"""Number of values written as JSON per call, which holds the GIL."""
_LENGTH = struct.Struct("<I")
MOST_TEXTS = 2048
"""Maximum number of elements of a BYTES input."""
MOST_TEXT_BYTES = 1 << 20
"""Maximum size of a BYTES input on the wire: it is read on the event loop."""
_TEXTS = msgspec.json.Decoder(list[str | list[str]])
_OPENING = re.compile(rb"\[*")
_EMPTY = re.compile(rb"\[*\]")
_VALUES = bytes(byte for byte in range(256) if byte not in b"[],")
"""All bytes of a JSON array of numbers except its structure."""
_FLATTENED = bytes.maketrans(b"[]", b"  ")
_SPACE = b" \t\r\n"
_CONSTANTS = {b"NaN": math.nan, b"-NaN": math.nan} | {
    sign + name: float(sign + b"inf") for sign in (b"", b"-") for name in (b"Infinity", b"Inf")
}
"""Bare constants, which JSON lacks and Triton accepts."""


def from_binary(body: memoryview, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """View bytes as a tensor, without copying numbers. Raises InvalidRequest if their size does not match the shape."""
    check_size(len(body), name, datatype, shape)
    if datatype == BYTES:
        return _elements(body, name, shape)
    return np.frombuffer(body, DTYPES[datatype]).reshape(shape)


def from_window(window: Window, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Copy a tensor out of shared memory. Raises InvalidRequest, before reading, if the window's size is wrong."""
    check_size(window.nbytes, name, datatype, shape)
    return from_binary(window.read(), name, datatype, shape)


def check_size(nbytes: int, name: str, datatype: str, shape: Sequence[int]) -> None:
    """Raise InvalidRequest unless an input of this datatype and shape has `nbytes` bytes; BYTES may have fewer."""
    if datatype == BYTES:
        _require_few_texts(math.prod(shape), name)
        if nbytes > MOST_TEXT_BYTES:
            raise InvalidRequest(
                f"input '{name}' has {nbytes} bytes, BYTES takes {MOST_TEXT_BYTES} at most; send shorter texts"
            )
        return
    expected = math.prod(shape) * DTYPES[datatype].itemsize
    if expected != nbytes:
        raise TensorMismatch(
            f"input byte size mismatch for input '{name}': {datatype} {list(shape)} takes {expected} bytes,"
            f" got {nbytes}"
        )


def texts_from(elements: Sequence[bytes], name: str, shape: Sequence[int]) -> Array:
    """Return a BYTES tensor of these elements. Raises TensorMismatch if their number does not match the shape."""
    if len(elements) != math.prod(shape):
        raise TensorMismatch(
            f"input '{name}' has {len(elements)} elements, but its shape {list(shape)} takes {math.prod(shape)}"
        )
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(shape)


def texts_of_json(data: msgspec.Raw, name: str) -> list[str | list[str]]:
    """Read a flat array of JSON strings, or an array of such arrays. Raises InvalidRequest."""
    check_size(len(memoryview(data)), name, BYTES, ())
    sent = bytes(data)
    _require_few_texts((sent.count(b'"') - sent.count(b'\\"')) // 4, name)  # before any becomes an object
    try:
        return _TEXTS.decode(sent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"data of input '{name}' is not an array of strings: {error}") from error


def _elements(body: memoryview, name: str, shape: Sequence[int]) -> Array:
    """Read elements that each follow their length in four bytes."""
    elements: list[bytes] = []
    at = 0
    while at < len(body) and len(elements) <= MOST_TEXTS:
        length = _LENGTH.unpack_from(body, at)[0] if at + _LENGTH.size <= len(body) else len(body)
        at += _LENGTH.size
        if at + length > len(body):
            raise InvalidRequest(
                f"element {len(elements)} of input '{name}' is cut off; each element of BYTES follows its length in"
                " four bytes"
            )
        elements.append(bytes(body[at : at + length]))
        at += length
    return texts_from(elements, name, shape)


def _require_few_texts(count: int, name: str) -> None:
    if count > MOST_TEXTS:
        raise InvalidRequest(f"input '{name}' has over {MOST_TEXTS} elements of BYTES; send fewer texts")


def _from_json_texts(data: msgspec.Raw, name: str, shape: Sequence[int]) -> Array:
    read = texts_of_json(data, name)
    rows = [row for row in read if isinstance(row, list)]
    if rows and (len(rows) != len(read) or [len(rows), *{len(row) for row in rows}] != list(shape)):
        raise InvalidRequest(f"data of input '{name}' is not nested like its shape {list(shape)}")
    flat = [text for row in rows for text in row] if rows else [text for text in read if isinstance(text, str)]
    return texts_from([text.encode() for text in flat], name, shape)


def from_json(data: msgspec.Raw, name: str, datatype: str, shape: Sequence[int]) -> Array:
    """Read a flat array, or one nested like the shape, of JSON numbers and bare constants, or of strings.

    `data` has as many opening as closing brackets, and is checked here. Raises InvalidRequest for anything else, and
    for more than MOST_JSON_VALUES.
    """
    if datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input"
            f" '{name}'"
        )
    if datatype == BYTES:
        return _from_json_texts(data, name, shape)
    text = compact(data, name)
    depth, count = nesting(text), math.prod(shape)
    if depth not in (1, len(shape)):
        raise InvalidRequest(
            f"data of input '{name}' is nested {depth} deep; it must be a flat array"
            + (f", or nested {len(shape)} deep like its shape" if len(shape) > 1 else "")
        )
    _require_few(count, name)
    separated = count_separated(text, name)
    if separated > math.prod(max(size, 1) for size in shape):
        raise InvalidRequest(f"input '{name}' has {separated} values, but its shape {list(shape)} takes {count}")
    if depth > 1:
        _require_nested(text, depth, name, shape)
    elif _count(text, b"[") > 1:
        raise InvalidRequest(f"data of input '{name}' is nested unevenly; rows must be of one length")
    array = np.empty(count, DTYPES[datatype])
    read = 0
    for values in _flat_values(text, name, datatype):
        if read + values.size <= count:
            array[read : read + values.size] = values
        read += values.size
    if read != count:
        raise InvalidRequest(f"input '{name}' has {read} values, but its shape {list(shape)} takes {count}")
    return array.reshape(shape)


def count_separated(text: bytes, name: str) -> int:
    """Count comma-separated values, before any becomes an object. Raises InvalidRequest for too many."""
    separated = _count(text, b",") + 1
    _require_few(separated, name)
    return separated


def _require_few(values: int, name: str) -> None:
    if values > MOST_JSON_VALUES:
        raise InvalidRequest(
            f"input '{name}' has {values} values, and JSON takes {MOST_JSON_VALUES} at most, which are 1 MiB of FP32;"
            " send it as binary data"
        )


def compact(data: msgspec.Raw, name: str) -> bytes:
    """Return JSON of numbers without any white space. Raises InvalidRequest if only that separates two of them."""
    try:
        return without_space(memoryview(data))
    except ValueError as error:
        raise InvalidRequest(f"data of input '{name}' is not JSON: {error}") from error


def _count(text: bytes, byte: bytes) -> int:
    return sum(text.count(byte, start, start + PIECE_BYTES) for start in range(0, len(text), PIECE_BYTES))


def _translated(text: bytes, table: bytes | None, removed: bytes = b"") -> bytes:
    starts = range(0, len(text), PIECE_BYTES)
    return b"".join([text[start : start + PIECE_BYTES].translate(table, removed) for start in starts])


def nesting(text: bytes) -> int:
    """Return the number of brackets before the first value of compact JSON."""
    opening = _OPENING.match(text)
    return opening.end() if opening else 0


def _structure_of(text: bytes) -> bytes:
    """Return the brackets and commas of an array of numbers."""
    return _translated(text, None, _VALUES)


def nested_shape(text: bytes, depth: int) -> list[int]:
    """Return the length of each level's first array in compact JSON; `from_json` checks the others."""
    if _EMPTY.match(text):
        return [1] * (depth - 1) + [0]
    structure = _structure_of(text)
    shape = []
    for inner in range(depth - 1, -1, -1):
        end = structure.find(b"]" * (inner + 1))
        between = b"]" * inner + b"," + b"[" * inner
        shape.append(1 + structure.count(between, 0, end + inner))
    return shape


def _require_nested(text: bytes, depth: int, name: str, shape: Sequence[int]) -> None:
    """Raise InvalidRequest unless the brackets of valid JSON match an array of this shape."""
    structure = _structure_of(text)
    if _has_structure(structure, shape):
        return
    found = nested_shape(text, depth)
    if not _has_structure(structure, found):
        raise InvalidRequest(f"data of input '{name}' is nested unevenly; rows must be of one length")
    if (values := math.prod(found)) != (count := math.prod(shape)):
        raise InvalidRequest(f"input '{name}' has {values} values, but its shape {list(shape)} takes {count}")
    raise InvalidRequest(f"data of input '{name}' is nested as {found}, its shape is {list(shape)}")


def _has_structure(structure: bytes, shape: Sequence[int]) -> bool:
    length = 0
    for size in reversed(shape):
        length = 2 + max(size - 1, 0) + size * length
    if len(structure) != length:
        return False
    built = b""
    for size in reversed(shape):
        built = b"[" + b",".join([built] * size) + b"]"
    return built == structure


def _flat_values(text: bytes, name: str, datatype: str) -> Iterator[Array]:
    """Yield the values of an array of any nesting, piece by piece."""
    flat, start = _translated(text, _FLATTENED), 0
    if not flat.strip(b", "):
        return
    while start < len(flat):
        end = flat.find(b",", start + _READ_TOGETHER_BYTES)
        end = len(flat) if end < 0 else end
        piece = flat[start:end]
        start = end + 1
        try:
            yield _array(piece, datatype)
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"data of input '{name}' does not fit {datatype}: {error}") from error


def _array(piece: bytes, datatype: str) -> Array:
    """Read comma-separated values. Raises DecodeError, ValueError or OverflowError for values that do not fit."""
    dtype, decoder = DTYPES[datatype], _decoders[datatype]
    try:
        values = decoder.decode(b"[%b]" % piece)
    except msgspec.DecodeError:
        if dtype.kind != "f":
            raise
        values = _with_constants(piece, decoder)
    if dtype.kind != "f":
        return np.array(values, dtype)
    doubles: Array = np.array(values, np.float64)
    with np.errstate(over="ignore"):
        array = doubles.astype(dtype)
    beyond = doubles[np.isfinite(doubles) & ~np.isfinite(array)]
    if beyond.size:
        raise ValueError(f"{beyond[0]:g} is out of range")
    return array


def _with_constants(piece: bytes, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any]:
    fields = piece.split(b",")
    constants = {
        n: _CONSTANTS[bare] for n, field in enumerate(fields) if (bare := field.strip(_SPACE)) in _CONSTANTS
    }
    for n in constants:
        fields[n] = b"0"
    values = decoder.decode(b"[%b]" % b",".join(fields))
    for n, constant in constants.items():
        values[n] = constant
    return values


_TYPES: dict[str, Any] = {"b": list[bool], "f": list[float]}
_decoders: dict[str, msgspec.json.Decoder[list[Any]]] = {
    datatype: msgspec.json.Decoder(_TYPES.get(dtype.kind, list[int])) for datatype, dtype in DTYPES.items()
}


def filled(value: float, datatype: str, shape: Sequence[int]) -> Array:
    """Return a tensor filled with `value`. Raises OverflowError or ValueError if `value` does not fit the datatype."""
    dtype = DTYPES[datatype]
    if datatype == BF16:
        return np.full(shape, bf16_of_float32(np.array([value], np.float32))[0])
    if dtype.kind in "iub":
        exact = int(value)
        limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        if exact != value or not limits[0] <= exact <= limits[1]:
            raise ValueError(f"{value:g} is not a valid {datatype}")
        return np.full(shape, exact, dtype)
    return np.full(shape, value, dtype)


def answered(request: Request, answer: Answer, info: ModelInfo) -> Iterator[tuple[RequestedOutput, str, Array]]:
    """Yield each requested output, with its datatype and array as sent.

    Classifications are BYTES, whatever the model's datatype.
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
    """Write a flat array, with bare NaN and Infinity as Triton does. Bytes that are not UTF-8 become U+FFFD."""
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
