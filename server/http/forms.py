"""What clients write over and over: the JSON in front of binary tensors, read once and remembered.

A client that sends one tensor after the other repeats this JSON to the byte. What it says (names, datatypes, shapes,
outputs, where each tensor begins) fits the model or not, whatever the tensors are, and is not read again.
"""

from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from server.protocol.datatypes import DTYPES
from server.protocol.model import Array, ModelInfo
from server.protocol.request import InferRequest
from server.protocol.wire import RequestBody

LONGEST_BYTES = 2 << 10
"""Of a JSON that is remembered."""
_MOST = 1024
"""When there are more, all are forgotten."""


class _Place(msgspec.Struct, frozen=True, eq=False):
    """Where a tensor is, behind the JSON."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


class _Form(msgspec.Struct, frozen=True, eq=False):
    info: ModelInfo
    """The very model that it was found to fit."""
    request: InferRequest
    """Without tensors."""
    places: tuple[_Place, ...]
    nbytes: int
    """Of all tensors."""


class Forms:
    """Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], _Form] = {}

    def request(self, head: bytes, body: memoryview, info: ModelInfo) -> InferRequest | None:
        """The request whose `body` begins with this JSON, if it is known that it fits this model."""
        form = self._known.get((info.name, head))
        start = len(head)
        if form is None or form.info is not info or form.nbytes != len(body) - start:
            return None
        inputs: dict[str, Array] = {
            place.name: np.ndarray(place.shape, place.dtype, body, start + place.offset) for place in form.places
        }
        return replace(form.request, inputs=inputs)

    def remember(self, head: bytes, message: RequestBody, request: InferRequest, info: ModelInfo) -> None:
        """Remember what a JSON said, unless it has an id, or anything whose place is not in the body."""
        if request.id is not None or any(output.window is not None for output in request.outputs):
            return
        places, offset = [], 0
        for described in message.inputs:
            dtype, nbytes = DTYPES.get(described.datatype), described.parameters.get("binary_data_size")
            if dtype is None or not isinstance(nbytes, int) or nbytes == 0:
                return
            places.append(_Place(described.name, tuple(described.shape), dtype, offset))
            offset += nbytes
        if len(self._known) >= _MOST:
            self._known.clear()
        empty = replace(request, inputs={})
        self._known[info.name, head] = _Form(info, empty, tuple(places), offset)
