"""Limits of a ModelInferRequest, checked on its encoded bytes before protobuf builds objects."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import numpy as np

from cohabit.server.errors import InvalidRequest
from cohabit.server.protocol.matching import MOST_DIMS

UNCHECKED_BYTES = 64 << 10
"""A message up to this size cannot become too large when parsed."""
_MOST_FIELDS = 1 << 14
"""Maximum number of fields of a message and its tensors: names, parameters, entries of contents."""
_MOST_SHAPE_BYTES = 10 * MOST_DIMS
"""Maximum size of a shape: a dimension has at most ten bytes."""
_MOST_TYPED = 1 << 20
"""Maximum number of varint-encoded typed values of a request: each byte may become eight."""
_MOST_CONTROL_FIELDS = 256
"""Maximum number of fields of a message that is parsed on the event loop."""
_NAMES_WITHIN = 64
"""Number of leading fields searched for a message's names, which writers put first."""
_MODEL, _VERSION, _ID, _PARAMETERS, _INPUTS, _OUTPUTS, _RAW, _SHAPE, _CONTENTS = 1, 2, 3, 4, 5, 6, 7, 3, 5
_KEY, _VALUE, _SEQUENCE_ID = 1, 2, b"sequence_id"
"""Fields of a parameter."""
_VARINTS = frozenset(range(1, 6))
"""Varint fields of contents."""
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


def described_bytes(data: bytes) -> int:
    """Return the size of a message without its raw tensors. Raises InvalidRequest for one that would grow too large."""
    if len(data) <= UNCHECKED_BYTES:
        return len(data)
    described, fields, typed = len(data), 0, 0
    for number, start, end in _fields(data, 0, len(data)):
        fields += 1
        if number == _RAW:
            described -= end - start
        elif number in (_INPUTS, _OUTPUTS):
            shape_bytes = 0
            for inner, inner_start, inner_end in _fields(data, start, end):
                fields += 1
                if number == _INPUTS and inner == _SHAPE:
                    shape_bytes += max(inner_end - inner_start, 1)
                if number == _INPUTS and inner == _CONTENTS:
                    for kind, first, last in islice(_fields(data, inner_start, inner_end), _MOST_FIELDS):
                        fields += 1
                        if kind in _VARINTS:
                            typed += _varints(data, first, last)
                if typed > _MOST_TYPED:
                    raise InvalidRequest(
                        f"the request has over {_MOST_TYPED} typed values of integers; send raw_input_contents"
                    )
                if shape_bytes > _MOST_SHAPE_BYTES:
                    raise InvalidRequest(
                        f"the shape of an input has over {_MOST_SHAPE_BYTES} bytes: a tensor has no more than"
                        f" {MOST_DIMS} dimensions"
                    )
                if fields > _MOST_FIELDS:
                    break
        if fields > _MOST_FIELDS:
            raise InvalidRequest(f"the request has over {_MOST_FIELDS} tensors, parameters and other fields")
    return described


def require_few_fields(data: bytes) -> None:
    """Raise InvalidRequest for a message with more fields than any call other than an inference needs.

    The parser refuses what is not a message.
    """
    fields = 0
    with suppress(InvalidRequest):
        for _ in islice(_fields(data, 0, len(data)), _MOST_CONTROL_FIELDS + 1):
            fields += 1
    if fields > _MOST_CONTROL_FIELDS:
        raise InvalidRequest(f"the message has over {_MOST_CONTROL_FIELDS} fields")


def names_of(data: bytes) -> tuple[str, str, str]:
    """Return a message's model, version and id without parsing it; missing ones are empty. Raises InvalidRequest."""
    names = dict.fromkeys((_MODEL, _VERSION, _ID), b"")
    for number, start, end in islice(_fields(data, 0, len(data)), _NAMES_WITHIN):
        if number in names:
            names[number] = data[start:end]
    model, version, request_id = (name.decode(errors="replace") for name in names.values())
    return model, version, request_id


def sequence_of(data: bytes) -> bytes:
    """Return a message's encoded sequence id without parsing it; empty without one. Raises InvalidRequest."""
    for number, start, end in islice(_fields(data, 0, len(data)), _NAMES_WITHIN):
        if number == _PARAMETERS:
            entry = {field: data[first:last] for field, first, last in islice(_fields(data, start, end), 2)}
            if entry.get(_KEY) == _SEQUENCE_ID:
                return entry.get(_VALUE, b"")
    return b""


def _varints(data: bytes, start: int, end: int) -> int:
    return int(np.count_nonzero(np.frombuffer(data, np.uint8, end - start, start) < 0x80))


def _fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the number, and the start and end of the contents, of each field of a message."""
    try:
        while start < end:
            key, start = _varint(data, start)
            kind = key & 7
            if kind == _LENGTH:
                length, start = _varint(data, start)
            elif kind == _VARINT:
                length = _varint(data, start)[1] - start
            elif kind in (_FIXED32, _FIXED64):
                length = 4 if kind == _FIXED32 else 8
            else:
                raise ValueError(f"wire type {kind}")
            if start + length > end:
                raise ValueError("a field is cut off")
            yield key >> 3, start, start + length
            start += length
    except (IndexError, ValueError) as error:
        raise InvalidRequest(f"the request is not a valid protobuf message: {error}") from error


def _varint(data: bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = data[start]
        start += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, start
        shift += 7
    raise ValueError("a number has over 64 bits")
