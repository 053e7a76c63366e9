"""Codec for inference over gRPC: KServe v2's protobuf messages."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Parameters, Request, RequestedOutput
from cohabit.server.protocol.datatypes import BINARY_ONLY, BYTES, DTYPES
from cohabit.server.protocol.matching import (
    InputBody,
    RequestBody,
    errors_of,
    fit,
    window_of,
)
from cohabit.server.protocol.shared_memory import RegionUse
from cohabit.server.protocol.tensors import answered, check_size, from_binary, from_window, texts_from, to_binary

_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    BYTES: "bytes_contents",
}
_MOST_TENSORS = 4096
_EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"
_CHUNK = 1 << 14
"""Number of typed values converted at a time; other threads can run in between."""


def parse_request(data: bytes) -> Any:
    """Parse a ModelInferRequest. Raises InvalidRequest."""
    try:
        message = ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"the request is not a ModelInferRequest: {error}") from error
    if len(message.inputs) > _MOST_TENSORS or len(message.outputs) > _MOST_TENSORS:
        raise InvalidRequest(f"the request has over {_MOST_TENSORS} inputs or outputs")
    return message


def decode_request(message: Any, info: ModelInfo, regions: RegionUse) -> Request:
    """Decode a ModelInferRequest and match it with the model.

    Raises RequestError, prefixed with the client's request id.
    """
    with errors_of(message.id):
        request = RequestBody(
            inputs=[
                InputBody(t.name, t.datatype, list(t.shape), parameters=parameters_of(t.parameters))
                for t in message.inputs
            ],
            id=message.id,
            outputs=[RequestedOutput(t.name, parameters_of(t.parameters)) for t in message.outputs],
            parameters=parameters_of(message.parameters),
        )
        request.parameters.pop(_EMPTY_FINAL_RESPONSE, None)  # each request has one response, which is final
        return fit(request, info, regions, _Contents(message, info, regions).read, binary=True)


def encode_response(request: Request, answer: Answer, info: ModelInfo, regions: RegionUse) -> Any:
    """Make a ModelInferResponse. Outputs in shared memory are written there, and have empty entries here."""
    message = ModelInferResponse(
        model_name=answer.model.name, model_version=str(answer.model.version), id=request.id or ""
    )
    for asked, datatype, array in answered(request, answer, info):
        binary = to_binary(array, datatype)
        message.outputs.add(name=asked.name, datatype=datatype, shape=array.shape)
        if (window := window_of(asked.parameters, regions, asked.name)) is not None:
            window.write(memoryview(binary))
            binary = b""
        message.raw_output_contents.append(bytes(binary))
    return message


def parameters_of(parameters: Mapping[str, Any]) -> Parameters:
    """Return the values of a message's parameters. Raises InvalidRequest."""
    values: Parameters = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter '{key[:80]}' has no value of a type that this server knows")
        values[key] = getattr(parameter, choice)
    return values


class _Contents:
    """Input values: raw entries in the order of the inputs, typed contents, or shared memory."""

    def __init__(self, message: Any, info: ModelInfo, regions: RegionUse) -> None:
        self._model = info.name
        self._raw = message.raw_input_contents
        self._taken = 0
        self._typed = {t.name: t.contents for t in message.inputs if t.HasField("contents")}
        self._regions = regions

    def read(self, body: InputBody[list[int]]) -> Array:
        window = window_of(body.parameters, self._regions, f"input '{body.name}'") if body.parameters else None
        typed = self._typed.get(body.name)
        if typed is not None and self._raw:
            raise InvalidRequest(
                f"contents field must not be specified when using raw_input_contents for '{body.name}' for model"
                f" '{self._model}'"
            )
        if window is not None:
            if typed is not None:
                raise InvalidRequest(f"input '{body.name}' is in shared memory, and must not have contents as well")
            return from_window(window, body.name, body.datatype, body.shape)
        if typed is not None:
            return _from_typed(typed, body)
        return from_binary(self._next(body), body.name, body.datatype, body.shape)

    def _next(self, body: InputBody[list[int]]) -> memoryview:
        if self._taken == len(self._raw):
            raise InvalidRequest(
                f"unable to find data for inference input '{body.name}' for model '{self._model}': it has no contents,"
                f" and raw_input_contents has {len(self._raw)} entries"
            )
        raw = memoryview(self._raw[self._taken])
        self._taken += 1
        return raw


def _from_typed(contents: Any, body: InputBody[list[int]]) -> Array:
    """Read the field of the datatype. Raises InvalidRequest for values that do not fit."""
    if body.datatype in BINARY_ONLY:
        raise InvalidRequest(
            f"{body.datatype} data of input '{body.name}' must be in raw_input_contents: protobuf has no such type"
        )
    field = _CONTENTS[body.datatype]
    others = [descriptor.name for descriptor, _ in contents.ListFields() if descriptor.name != field]
    if others:
        raise InvalidRequest(
            f"input '{body.name}' is {body.datatype}, whose values go into {field}, not {others[0]}"
        )
    values = getattr(contents, field)
    if body.datatype == BYTES:
        check_size(sum(map(len, values)), body.name, BYTES, [len(values)])
        return texts_from(values, body.name, body.shape)
    dtype = DTYPES[body.datatype]
    check_size(len(values) * dtype.itemsize, body.name, body.datatype, body.shape)
    array = np.empty(len(values), dtype)
    for start in range(0, len(values), _CHUNK):
        try:
            array[start : start + _CHUNK] = np.array(values[start : start + _CHUNK], dtype)
        except OverflowError as error:
            raise InvalidRequest(f"data of input '{body.name}' does not fit {body.datatype}: {error}") from error
    return array.reshape(body.shape)
