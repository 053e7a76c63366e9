"""What clients write over and over: a ModelInferRequest up to its raw tensors, read once and remembered.

A client that sends one tensor after the other repeats all else to the byte, and writes the tensors last: the next
request is known by its length and its first bytes. See `server.http.forms`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from server.grpc.framing import Content
from server.grpc.wire import RawField
from server.protocol.datatypes import DTYPES
from server.protocol.model import Array, ModelInfo
from server.protocol.request import InferRequest

LONGEST_BYTES = 2 << 10
"""Of what stands before the first tensor's values."""
_MOST_LENGTHS = 256
"""When there are more, all are forgotten."""
_MOST_OF_A_LENGTH = 64


class _Place(msgspec.Struct, frozen=True, eq=False):
    """Where a tensor is in the message, behind what announces it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    announced_at: int
    announcement: bytes
    start: int


class Form(msgspec.Struct, frozen=True, eq=False):
    """All of a message but its tensors."""

    model: str
    version: str | None
    """As the client asks for it."""
    info: ModelInfo
    """The very model that it was found to fit."""
    empty: InferRequest
    """The request without tensors."""
    beginning: bytes
    places: tuple[_Place, ...]

    def fits(self, data: Content) -> bool:
        """Whether a message of the right length is this one with other tensors."""
        if bytes(data[: len(self.beginning)]) != self.beginning:
            return False
        others = self.places[1:]  # the first one's announcement ends the beginning
        return not others or all(bytes(data[p.announced_at : p.start]) == p.announcement for p in others)

    def request(self, data: Content) -> InferRequest:
        """The request, with tensors that are views of the message."""
        inputs: dict[str, Array] = {p.name: np.ndarray(p.shape, p.dtype, data, p.start) for p in self.places}
        return replace(self.empty, inputs=inputs)


class Forms:
    """Belongs to the event loop's thread."""

    def __init__(self) -> None:
        self._by_length: dict[int, list[Form]] = {}

    def find(self, data: Content) -> Form | None:
        for form in self._by_length.get(len(data), ()):
            if form.fits(data):
                return form
        return None

    def remember(
        self, data: Content, message: Any, fields: Sequence[RawField], request: InferRequest, info: ModelInfo
    ) -> None:
        """Remember a request, unless it has an id, or anything that is not in raw tensors at the message's end."""
        if request.id is not None or any(output.window is not None for output in request.outputs):
            return
        if not fields or len(fields) != len(message.inputs) or fields[0].start > LONGEST_BYTES:
            return
        places = []
        for tensor, field in zip(message.inputs, fields, strict=True):
            dtype = DTYPES.get(tensor.datatype)
            if dtype is None or field.start == field.end:
                return
            announcement = bytes(data[field.announced_at : field.start])
            shape = tuple(tensor.shape)
            places.append(_Place(tensor.name, shape, dtype, field.announced_at, announcement, field.start))
        version = message.model_version or None
        beginning = bytes(data[: fields[0].start])
        form = Form(message.model_name, version, info, replace(request, inputs={}), beginning, tuple(places))
        self._keep(len(data), form)

    def _keep(self, nbytes: int, form: Form) -> None:
        if len(self._by_length) >= _MOST_LENGTHS:
            self._by_length.clear()
        others = [known for known in self._by_length.get(nbytes, ()) if known.beginning != form.beginning]
        self._by_length[nbytes] = [form, *others[: _MOST_OF_A_LENGTH - 1]]
