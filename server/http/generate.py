"""Triton's generate extension: inputs by name as plain JSON values, outputs the same way."""

import re
from typing import Any

import msgspec

from server.errors import InvalidRequest, RequestError, Unsupported
from server.protocol.datatypes import BINARY_ONLY
from server.protocol.matching import fit
from server.protocol.model import Array, ModelInfo, TensorSpec
from server.protocol.request import InferRequest, InferResponse
from server.protocol.shared_memory import Regions
from server.protocol.tensors import from_json, to_json
from server.protocol.wire import InputBody, Parameters, RequestBody

_OURS = frozenset({"id", "parameters"})
_OPENING = re.compile(rb"[\s\[]*")


def decode_request(body: memoryview, info: ModelInfo, regions: Regions) -> InferRequest:
    """Turn `{"input": value, ...}` into a request of one sample. Raises RequestError, with the client's id in front.

    A value stands for a tensor of one element; an array is nested like the model's shape, with or without the batch.
    Keys that are no inputs are parameters.
    """
    given = _read(body)
    request_id = _typed(given.pop("id", msgspec.Raw(b'""')), str, "id")
    parameters = _typed(given.pop("parameters", msgspec.Raw(b"{}")), Parameters, "parameters")
    try:
        inputs = [
            _described(tensor, given.pop(tensor.name), info) for tensor in info.inputs if tensor.name in given
        ]
        parameters |= {key: _typed(raw, bool | int | float | str, key) for key, raw in given.items()}
        return fit(RequestBody(inputs, id=request_id, parameters=parameters), info, regions, _value, binary=True)
    except RequestError as error:
        error.of_request(request_id)
        raise


def encode_response(response: InferResponse) -> bytes:
    """Write outputs by name, flat; of one element, as a plain value."""
    written: dict[str, Any] = {"id": response.id} if response.id else {}
    written |= {"model_name": response.model, "model_version": str(response.version)}
    for output in response.outputs:
        if output.tensor.datatype in BINARY_ONLY:
            raise Unsupported(
                f"output '{output.tensor.name}' is {output.tensor.datatype}, which has no JSON form; use infer"
            )
        data = to_json(output.array)
        written[output.tensor.name] = msgspec.Raw(bytes(data)[1:-1]) if output.array.size == 1 else data
    return msgspec.json.encode(written)


def _read(body: memoryview) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, msgspec.Raw])
    except RecursionError as error:
        raise InvalidRequest("failed to parse the request JSON: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from error


def _typed(raw: msgspec.Raw, of_type: Any, key: str) -> Any:
    try:
        return msgspec.json.decode(raw, type=of_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{key[:80]}' is no input, and no parameter either: {error}") from error


def _described(tensor: TensorSpec, raw: msgspec.Raw, info: ModelInfo) -> InputBody:
    """Give a value the shape that its nesting says, the batch of one in front where it is left out."""
    shape = info.wire_shape(tensor)
    depth = _depth(raw)
    if depth == 0:
        return InputBody(tensor.name, tensor.datatype, [1] * len(shape), msgspec.Raw(b"[%b]" % bytes(raw)))
    nested = _nested_shape(raw, depth)
    if info.max_batch_size > 0 and depth == len(shape) - 1:
        nested, raw = [1, *nested], msgspec.Raw(b"[%b]" % bytes(raw))
    return InputBody(tensor.name, tensor.datatype, nested, raw)


def _depth(raw: msgspec.Raw) -> int:
    opening = _OPENING.match(memoryview(raw))
    return opening[0].count(b"[") if opening else 0


def _nested_shape(raw: msgspec.Raw, depth: int) -> list[int]:
    """How long the first array of each level is; that the others agree is checked with the values."""
    shape = []
    for _ in range(depth):
        items = msgspec.json.decode(raw, type=list[msgspec.Raw])
        shape.append(len(items))
        if not items:
            break
        raw = items[0]
    return shape + [0] * (depth - len(shape))


def _value(body: InputBody) -> Array:
    return from_json(body.data, body.name, body.datatype, body.shape)
