"""Triton's generate extension: inputs and outputs are plain JSON values by name."""

from typing import Any

import msgspec

from cohabit.server.errors import InvalidRequest, Refused
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Answer, Parameters, Request
from cohabit.server.protocol.datatypes import BINARY_ONLY, BYTES
from cohabit.server.protocol.json_body import parse_with_tensors
from cohabit.server.protocol.matching import InputBody, RequestBody, errors_of, fit
from cohabit.server.protocol.shared_memory import RegionUse
from cohabit.server.protocol.tensors import (
    answered,
    compact,
    count_separated,
    from_json,
    nested_shape,
    nesting,
    texts_of_json,
    to_json,
)

_MOST_DIMENSIONS = 64
_MOST_PARAMETER_BYTES = 64 << 10


def decode_request(body: memoryview, info: ModelInfo, regions: RegionUse) -> Request:
    """Decode `{"input": value, ...}` into a request of one sample.

    A value is a tensor of one element. An array is nested like the model's shape, with or without the batch. Other keys
    are parameters. Raises RequestError, prefixed with the client's request id.
    """
    sent, restore = parse_with_tensors(body, dict[str, msgspec.Raw])
    given = {key: restore(value) for key, value in sent.items()}
    request_id = _typed(given.pop("id", msgspec.Raw(b'""')), str, "id")
    parameters = _typed(given.pop("parameters", msgspec.Raw(b"{}")), Parameters, "parameters")
    with errors_of(request_id):
        inputs = [
            _described(tensor, given.pop(tensor.name), info) for tensor in info.inputs if tensor.name in given
        ]
        parameters |= {key: _typed(raw, bool | int | float | str, key) for key, raw in given.items()}
        return fit(RequestBody(inputs, id=request_id, parameters=parameters), info, regions, _value, binary=True)


def encode_response(request: Request, answer: Answer, info: ModelInfo) -> bytes:
    """Encode outputs by name: flat arrays, or a plain value for one element. Raises Refused."""
    written: dict[str, Any] = {"id": request.id} if request.id else {}
    written |= {"model_name": answer.model.name, "model_version": str(answer.model.version)}
    for asked, datatype, array in answered(request, answer, info):
        if datatype in BINARY_ONLY:
            text = f"output '{asked.name}' is {datatype}, which has no JSON form; use infer"
            raise Refused("Unsupported", text)
        data = to_json(array)
        written[asked.name] = msgspec.Raw(bytes(data)[1:-1]) if array.size == 1 else data
    return msgspec.json.encode(written)


def _typed(raw: msgspec.Raw, of_type: Any, key: str) -> Any:
    if (nbytes := len(memoryview(raw))) > _MOST_PARAMETER_BYTES:
        raise InvalidRequest(
            f"'{key[:80]}' is not an input, and has {nbytes} bytes; a parameter has at most {_MOST_PARAMETER_BYTES}"
        )
    try:
        return msgspec.json.decode(raw, type=of_type)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"'{key[:80]}' is neither an input nor a parameter: {error}") from error


def _described(tensor: TensorSpec, raw: msgspec.Raw, info: ModelInfo) -> InputBody[list[int]]:
    """Give a value the shape of its nesting; adds a missing batch dimension of one."""
    shape = info.wire_shape(tensor)
    if tensor.datatype == BYTES:
        given = bytes(raw).lstrip()
        raw = raw if given.startswith(b"[") else msgspec.Raw(b"[%b]" % given)
        count = len(texts_of_json(raw, tensor.name))
        return InputBody(tensor.name, BYTES, [1, count] if info.max_batch_size > 0 else [count], raw)
    text = compact(raw, tensor.name)
    depth = nesting(text)
    if depth == 0:
        return InputBody(tensor.name, tensor.datatype, [1] * len(shape), msgspec.Raw(b"[%b]" % bytes(raw)))
    if depth > _MOST_DIMENSIONS:
        raise InvalidRequest(
            f"the value of '{tensor.name}' is nested {depth} deep, the limit is {_MOST_DIMENSIONS}"
        )
    count_separated(text, tensor.name)
    nested = nested_shape(text, depth)
    if info.max_batch_size > 0 and depth == len(shape) - 1:
        nested, raw = [1, *nested], msgspec.Raw(b"[%b]" % bytes(raw))
    return InputBody(tensor.name, tensor.datatype, nested, raw)


def _value(body: InputBody[list[int]]) -> Array:
    return from_json(body.data, body.name, body.datatype, body.shape)
