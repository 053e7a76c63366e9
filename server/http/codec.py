"""Codec for inference over HTTP: KServe v2's JSON with the binary tensor extension."""

import math
import re
from typing import Any

import msgspec

from cohabit.server.errors import InvalidRequest, TensorMismatch
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Request
from cohabit.server.protocol.datatypes import BYTES, DTYPES
from cohabit.server.protocol.json_body import parse_with_tensors
from cohabit.server.protocol.matching import (
    MOST_DIMS,
    NO_DATA,
    Dim,
    InputBody,
    RequestBody,
    errors_of,
    fit,
    unsigned,
    window_of,
)
from cohabit.server.protocol.shared_memory import RegionUse
from cohabit.server.protocol.tensors import (
    answered,
    check_size,
    from_binary,
    from_json,
    from_window,
    texts_from,
    to_binary,
    to_json,
)

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_MOST_SHAPE_BYTES = 32 * MOST_DIMS
"""Maximum size of a shape in JSON: for each dimension a number of 64 bits, a comma and some spaces."""
_shapes = msgspec.json.Decoder(list[Dim])


def parse_header_length(text: str | None) -> int | None:
    """Read Inference-Header-Content-Length. Raises InvalidRequest unless it is a number of bytes."""
    if text is None:
        return None
    if not _DIGITS.fullmatch(text.strip()):
        raise InvalidRequest(f"Inference-Header-Content-Length '{text[:40]}' is not a number of bytes")
    return int(text)


def decode_request(body: memoryview, header_length: int | None, info: ModelInfo, regions: RegionUse) -> Request:
    """Decode a request's body and match it with the model; binary tensors are views of `body`.

    Raises RequestError, prefixed with the client's request id.
    """
    if not body:
        raise InvalidRequest(f"the request for model '{info.name}' has an empty body")
    if header_length == 0:
        with errors_of(None):
            return _raw_request(body, info, regions)
    if header_length is not None and header_length > len(body):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {header_length}, but the body has only {len(body)} bytes"
        )
    json_length = len(body) if header_length is None else header_length
    message = _parse(body[:json_length])
    tail = _Tail(body[json_length:], regions)
    with errors_of(message.id):
        request = fit(message, info, regions, tail.read)
        tail.check_end(info)
    return request


def encode_response(
    request: Request, answer: Answer, info: ModelInfo, regions: RegionUse
) -> list[bytes | memoryview]:
    """Return the body in parts: JSON, then binary tensors, which may be views of leased memory.

    Writes outputs in shared memory there. Raises InvalidRequest for outputs that do not fit there.
    """
    described: list[dict[str, Any]] = []
    tail: list[bytes | memoryview] = []
    for asked, datatype, array in answered(request, answer, info):
        body: dict[str, Any] = {"name": asked.name, "datatype": datatype, "shape": array.shape}
        if (window := window_of(asked.parameters, regions, asked.name)) is not None:
            # Without parameters, as Triton: its C++ client takes any parameters for those of binary data.
            window.write(memoryview(to_binary(array, datatype)))
        elif asked.binary:
            tail.append(to_binary(array, datatype))
            body["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            body["data"] = to_json(array)
        described.append(body)
    written = {"model_name": answer.model.name, "model_version": str(answer.model.version), "outputs": described}
    return [msgspec.json.encode(written | ({"id": request.id} if request.id else {})), *tail]


class _Tail:
    """Binary inputs, which follow the JSON one after the other."""

    def __init__(self, binary: memoryview, regions: RegionUse) -> None:
        self._binary = binary
        self._regions = regions
        self._offset = 0

    def read(self, body: InputBody[list[int]]) -> Array:
        """Read one input from the JSON, the tail or shared memory, as its parameters specify."""
        where = f"input '{body.name}'"
        size = unsigned(body.parameters, "binary_data_size", where) if body.parameters else None
        window = window_of(body.parameters, self._regions, where) if body.parameters else None
        has_data = body.data is not NO_DATA
        if has_data + (size is not None) + (window is not None) != 1:
            raise InvalidRequest(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
                f" 'shared_memory_region' in 'parameters'; {where} sets"
                f" {'two' if has_data or window or size is not None else 'none'}"
            )
        if window is not None:
            return from_window(window, body.name, body.datatype, body.shape)
        if size is not None:
            return from_binary(self._next(body, size), body.name, body.datatype, body.shape)
        return from_json(body.data, body.name, body.datatype, body.shape)

    def check_end(self, info: ModelInfo) -> None:
        left = len(self._binary) - self._offset
        if left:
            raise InvalidRequest(
                f"unexpected additional input data for model '{info.name}': {left} bytes follow the last binary input"
            )

    def _next(self, body: InputBody[list[int]], size: int) -> memoryview:
        start, left = self._offset, len(self._binary) - self._offset
        if size > left:
            raise InvalidRequest(
                f"input '{body.name}' has binary_data_size {size}, but only {left} bytes of binary data are left"
                " after the JSON; is Inference-Header-Content-Length the length of the JSON?"
            )
        self._offset += size
        return self._binary[start : start + size]


msgspec.json.Decoder(RequestBody[msgspec.Raw])  # msgspec inspects the type now, not in two threads at once


def _parse(header: memoryview) -> RequestBody[list[int]]:
    sent, restore = parse_with_tensors(header, RequestBody[msgspec.Raw])
    inputs = [
        InputBody(
            i.name,
            i.datatype,
            _shape(i.name, restore(i.shape), n),
            i.data if i.data is NO_DATA else restore(i.data),
            i.parameters,
        )
        for n, i in enumerate(sent.inputs)
    ]
    return RequestBody(inputs, sent.id, sent.outputs, sent.parameters)


def _shape(name: str, sent: msgspec.Raw, index: int) -> list[int]:
    if (nbytes := len(memoryview(sent))) > _MOST_SHAPE_BYTES:
        raise InvalidRequest(
            f"the shape of input '{name[:80]}' has {nbytes} bytes of JSON, at most {_MOST_SHAPE_BYTES} are"
            f" allowed: a tensor has no more than {MOST_DIMS} dimensions"
        )
    try:
        return _shapes.decode(sent)
    except (msgspec.DecodeError, RecursionError) as error:
        where = str(error).replace("$", f"$.inputs[{index}].shape", 1)
        raise InvalidRequest(f"failed to parse the request JSON: {where}") from error


def _raw_request(body: memoryview, info: ModelInfo, regions: RegionUse) -> Request:
    """Read a body that consists of the only input's bytes; its size gives the batch."""
    if len(info.inputs) != 1:
        raise TensorMismatch(
            f"a raw binary request (Inference-Header-Content-Length: 0) needs a model with one input; model"
            f" '{info.name}' has {len(info.inputs)}"
        )
    (tensor,) = info.inputs
    shape = info.wire_shape(tensor)
    if tensor.datatype == BYTES:  # the body is one text
        check_size(len(body), tensor.name, BYTES, ())
        one = [1] * len(shape)
        text = texts_from([bytes(body)], tensor.name, one)
        sent = RequestBody([InputBody(tensor.name, BYTES, one)])
        return fit(sent, info, regions, lambda _: text, binary=True)
    item_bytes = math.prod(d for d in shape if d >= 0) * DTYPES[tensor.datatype].itemsize
    free = sum(d < 0 for d in shape)
    if free > 1 or (free and (item_bytes == 0 or len(body) % item_bytes)):
        raise TensorMismatch(
            f"the shape of raw binary input '{tensor.name}' of {len(body)} bytes cannot be deduced:"
            f" {tensor.datatype} {list(shape)} takes {item_bytes} bytes at a time"
        )
    described = InputBody(tensor.name, tensor.datatype, [len(body) // item_bytes if d < 0 else d for d in shape])

    def read(_: InputBody[list[int]]) -> Array:
        return from_binary(body, described.name, described.datatype, described.shape)

    return fit(RequestBody([described]), info, regions, read, binary=True)
