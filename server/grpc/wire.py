"""ModelInferRequest from its bytes: tensors as views of them, all else by protobuf.

protobuf for Python copies a `bytes` field when it parses and again whenever it is read. A tensor is read here once,
and not copied at all.
"""

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest

from server.errors import InvalidRequest

_RAW_INPUT_CONTENTS = ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER
_MOST_FIELDS = 4096
"""Inputs, outputs, parameters and tensors, each of them, in one message."""
_SMALL_BYTES = 4 << 10
"""Where protobuf's copies are cheaper than looking."""
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _LENGTH_DELIMITED = 0, 2


class RawField(NamedTuple):
    """Where a raw tensor is in a message: what announces it, and its values."""

    announced_at: int
    start: int
    end: int


class Parsed(NamedTuple):
    """A request, in two parts: its raw tensors, and the message that has all else."""

    message: Any
    raw: list[memoryview]
    nbytes: int
    """Of both."""
    message_bytes: int


def parse(data: bytes | memoryview) -> Parsed:
    """Part a request from its raw tensors. Raises InvalidRequest for what is no ModelInferRequest."""
    nbytes = len(data)
    try:
        if nbytes <= _SMALL_BYTES:
            message = ModelInferRequest.FromString(data)
            return Parsed(message, [memoryview(raw) for raw in message.raw_input_contents], nbytes, nbytes)
        view = memoryview(data)
        others, tensors = _fields(view)
        rest = b"".join([view[start:end] for start, end in others])
        raw = [view[field.start : field.end] for field in tensors]
        return Parsed(ModelInferRequest.FromString(rest), raw, nbytes, len(rest))
    except (DecodeError, IndexError) as error:
        raise InvalidRequest(f"the request is no ModelInferRequest: {error}") from error


def raw_fields_at_the_end(data: bytes | memoryview) -> list[RawField]:
    """Where the raw tensors of a good request are; none if anything stands between or behind them."""
    others, tensors = _fields(memoryview(data))
    behind = any(start > tensors[0].announced_at for start, _ in others) if tensors else False
    return [] if behind else tensors


def _fields(data: memoryview) -> tuple[list[tuple[int, int]], list[RawField]]:
    """The top-level fields: those that are raw tensors, and from where to where the others are."""
    others: list[tuple[int, int]] = []
    tensors: list[RawField] = []
    start = 0
    for _ in range(_MOST_FIELDS):
        if start == len(data):
            return others, tensors
        tag, position = _varint(data, start)
        number, kind = tag >> 3, tag & 7
        if kind == _LENGTH_DELIMITED:
            length, position = _varint(data, position)
            end = position + length
        elif kind == _VARINT:
            _, end = _varint(data, position)
        elif kind in _FIXED_BYTES:
            end = position + _FIXED_BYTES[kind]
        else:
            raise DecodeError(f"wire type {kind} at byte {start}")
        if end > len(data):
            raise DecodeError(f"the field at byte {start} goes on for {end - len(data)} bytes after the end")
        if number == _RAW_INPUT_CONTENTS and kind == _LENGTH_DELIMITED:
            tensors.append(RawField(start, position, end))
        else:
            others.append((start, end))
        start = end
    raise InvalidRequest(f"the request has over {_MOST_FIELDS} inputs, outputs, parameters and tensors")


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read a number of at most 64 bits; returns it and where it ends. Raises IndexError at the end of the data."""
    value = 0
    for shift in range(0, 64, 7):
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError(f"the number before byte {position} has over 64 bits")
