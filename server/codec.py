"""KServe v2 inference over HTTP: JSON with the binary tensor extension, to and from requests and responses."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from server.datatypes import BINARY_ONLY, BYTES, DTYPES
from server.errors import InvalidRequest, Unsupported
from server.model import Array, ModelInfo, TensorSpec
from server.request import InferRequest, InferResponse, OutputTensor, RequestedOutput
from server.tensors import from_binary, from_json, to_binary, to_json
from server.wire import InputBody, OutputBody, Parameters, RequestBody, ResponseBody, WantedBody, encoder
from server.wire import request_decoder as _decoder

_DIGITS = re.compile(r"[0-9]{1,18}", re.ASCII)
_EXPLAINED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """A body. `header_length` is the JSON's length where binary tensors follow it."""

    body: bytes
    header_length: int | None


def parse_header_length(text: str | None) -> int | None:
    """Read Inference-Header-Content-Length. Raises InvalidRequest for anything but a number of bytes."""
    if text is None:
        return None
    if not _DIGITS.fullmatch(text.strip()):
        raise InvalidRequest(f"Inference-Header-Content-Length '{text[:40]}' is not a number of bytes")
    return int(text)


def decode_request(body: memoryview, header_length: int | None, info: ModelInfo) -> InferRequest:
    """Turn a request's body into tensors that fit the model; binary ones are views of `body`.

    Raises InvalidRequest, or Unsupported for parts of the protocol that are not done here.
    """
    if not body:
        raise InvalidRequest(f"the request for model '{info.name}' has an empty body")
    if header_length == 0:
        return _raw_request(body, info)
    if header_length is not None and header_length > len(body):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {header_length}, but the body has only {len(body)} bytes"
        )
    json_length = len(body) if header_length is None else header_length
    message = _parse(body[:json_length])
    try:
        return _request(message, body[json_length:], info)
    except (InvalidRequest, Unsupported) as error:
        if not message.id:
            raise
        raise type(error)(f"[request id: {message.id}] {error}") from error


def encode_response(response: InferResponse) -> EncodedResponse:
    """Write JSON, followed by the binary tensors if there are any."""
    binaries = [to_binary(o.array, o.tensor.datatype) if o.binary else None for o in response.outputs]
    header = encoder.encode(
        ResponseBody(
            id=response.id or msgspec.UNSET,
            model_name=response.model,
            model_version=str(response.version),
            outputs=[_output_body(o, b) for o, b in zip(response.outputs, binaries, strict=True)],
        )
    )
    tail = [b for b in binaries if b is not None]
    return EncodedResponse(b"".join((header, *tail)), len(header) if tail else None)


def _output_body(output: OutputTensor, binary: bytes | None) -> OutputBody:
    return OutputBody(
        name=output.tensor.name,
        datatype=output.tensor.datatype,
        shape=output.array.shape,
        parameters=msgspec.UNSET if binary is None else {"binary_data_size": len(binary)},
        data=to_json(output.array) if binary is None else msgspec.UNSET,
    )


def _parse(header: memoryview) -> RequestBody:
    try:
        return _decoder.decode(header)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request's JSON has the wrong form: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("failed to parse the request JSON: it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        culprit = _input_with_constant(header)
        if culprit is not None:
            raise InvalidRequest(
                f"data of input '{culprit}' has NaN or Infinity, which JSON cannot express; send it as binary"
            ) from error
        raise InvalidRequest(f"failed to parse the request JSON: {error}") from error


def _input_with_constant(header: memoryview) -> str | None:
    """Name the input whose data has a bare NaN or Infinity; such JSON does not parse, so it is read leniently."""
    if len(header) > _EXPLAINED_BYTES:
        return None
    constant = object()
    try:
        message = json.loads(bytes(header), parse_constant=lambda _: constant)
        return next((str(i["name"]) for i in message["inputs"] if _contains(i.get("data"), constant)), None)
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return None


def _contains(data: Any, wanted: object) -> bool:
    return data is wanted or (isinstance(data, list) and any(_contains(d, wanted) for d in data))


def _request(message: RequestBody, binary: memoryview, info: ModelInfo) -> InferRequest:
    _refuse_reserved(message.parameters)
    _match_inputs(message.inputs, info)
    batch = _batch(message.inputs, info)
    inputs: dict[str, Array] = {}
    offset = 0
    for body in message.inputs:
        size = _binary_size(body, len(binary) - offset)
        if size is None:
            inputs[body.name] = from_json(body.data, body.name, body.datatype, body.shape)
        else:
            section = binary[offset : offset + size]
            inputs[body.name] = from_binary(section, body.name, body.datatype, body.shape)
            offset += size
    if offset != len(binary):
        raise InvalidRequest(
            f"unexpected additional input data for model '{info.name}': {len(binary) - offset} bytes follow the"
            " last binary input"
        )
    return InferRequest(
        model=info.name,
        version=info.version,
        inputs=inputs,
        batch=batch,
        outputs=_outputs(message, info),
        id=message.id or None,
        priority=_unsigned(message.parameters, "priority", "the request") or None,
        timeout_s=_seconds(_unsigned(message.parameters, "timeout", "the request")),
    )


def _raw_request(body: memoryview, info: ModelInfo) -> InferRequest:
    """A body that is nothing but the only input's bytes; its batch follows from its size."""
    if len(info.inputs) != 1:
        raise InvalidRequest(
            f"a raw binary request (Inference-Header-Content-Length: 0) needs a model with one input; model"
            f" '{info.name}' has {len(info.inputs)}"
        )
    (tensor,) = info.inputs
    shape = info.wire_shape(tensor)
    item_bytes = math.prod(d for d in shape if d >= 0) * DTYPES[tensor.datatype].itemsize
    free = sum(d < 0 for d in shape)
    if free > 1 or (free and (item_bytes == 0 or len(body) % item_bytes)):
        raise InvalidRequest(
            f"the shape of raw binary input '{tensor.name}' of {len(body)} bytes cannot be deduced:"
            f" {tensor.datatype} {list(shape)} takes {item_bytes} bytes at a time"
        )
    actual = [len(body) // item_bytes if d < 0 else d for d in shape]
    described = InputBody(tensor.name, tensor.datatype, actual)
    return InferRequest(
        model=info.name,
        version=info.version,
        batch=_batch([described], info),
        inputs={tensor.name: from_binary(body, tensor.name, tensor.datatype, actual)},
        outputs=tuple(RequestedOutput(o, binary=True) for o in info.outputs),
    )


def _match_inputs(bodies: Sequence[InputBody], info: ModelInfo) -> None:
    """Check names, datatypes and shapes; values come later."""
    specs = {tensor.name: tensor for tensor in info.inputs}
    seen: set[str] = set()
    for body in bodies:
        if body.name not in specs:
            raise InvalidRequest(
                f"unexpected inference input '{body.name}' for model '{info.name}', whose inputs are {sorted(specs)}"
            )
        if body.name in seen:
            raise InvalidRequest(f"input '{body.name}' already exists in request")
        seen.add(body.name)
        _match_input(body, specs[body.name], info)
    missing = [name for name in specs if name not in seen]
    if missing:
        raise InvalidRequest(
            f"expected {len(specs)} inputs but got {len(bodies)} inputs for model '{info.name}'. Got input(s)"
            f" {sorted(seen)}, but missing required input(s) {missing}. Please provide all required input(s)."
        )


def _match_input(body: InputBody, tensor: TensorSpec, info: ModelInfo) -> None:
    if body.datatype != tensor.datatype:
        hint = "; PyTorch models have no string tensors" if body.datatype == BYTES else ""
        raise InvalidRequest(
            f"inference input '{body.name}' data-type is '{body.datatype}', but model '{info.name}' expects"
            f" '{tensor.datatype}'{hint}"
        )
    expected = info.wire_shape(tensor)
    fits = len(expected) == len(body.shape) and all(e in (-1, d) for e, d in zip(expected, body.shape, strict=True))
    if not fits:
        note = (
            ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
            " prepended to each input shape."
            if info.max_batch_size > 0
            else ""
        )
        raise InvalidRequest(
            f"unexpected shape for input '{body.name}' for model '{info.name}'. Expected {list(expected)}, got"
            f" {body.shape}{note}"
        )


def _batch(bodies: Sequence[InputBody], info: ModelInfo) -> int:
    if info.max_batch_size == 0:
        return 1
    batch = bodies[0].shape[0]
    for body in bodies:
        if body.shape[0] != batch:
            raise InvalidRequest(
                f"input '{body.name}' batch size does not match other inputs for '{info.name}': {body.shape[0]},"
                f" and {batch} in '{bodies[0].name}'"
            )
    if not 1 <= batch <= info.max_batch_size:
        raise InvalidRequest(
            f"inference request batch-size must be <= {info.max_batch_size} for '{info.name}' and at least 1,"
            f" got {batch}"
        )
    return batch


def _binary_size(body: InputBody, left: int) -> int | None:
    """Return how many bytes of the binary section are this input's, or None if it is JSON."""
    if "shared_memory_region" in body.parameters:
        raise Unsupported(f"input '{body.name}' is in shared memory, which this server does not support yet")
    has_data = len(memoryview(body.data)) > 0
    size = _unsigned(body.parameters, "binary_data_size", f"input '{body.name}'")
    if has_data == (size is not None):
        raise InvalidRequest(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters',"
            f" 'shared_memory_region' in 'parameters'; input '{body.name}' sets {'two' if has_data else 'none'}"
        )
    if size is not None and size > left:
        raise InvalidRequest(
            f"input '{body.name}' has binary_data_size {size}, but only {left} bytes of binary data are left"
            " after the JSON; is Inference-Header-Content-Length the length of the JSON?"
        )
    return size


def _outputs(message: RequestBody, info: ModelInfo) -> tuple[RequestedOutput, ...]:
    default = _flag(message.parameters, "binary_data_output", False)
    wanted: dict[str, bool] = {}
    known = [tensor.name for tensor in info.outputs]
    for body in message.outputs:
        if body.name not in known:
            raise InvalidRequest(
                f"unexpected inference output '{body.name}' for model '{info.name}', whose outputs are {known}"
            )
        if body.name in wanted:
            raise InvalidRequest(f"output '{body.name}' already exists in request")
        wanted[body.name] = _wants_binary(body, default)
    chosen = wanted or dict.fromkeys(known, default)
    outputs = tuple(RequestedOutput(t, chosen[t.name]) for t in info.outputs if t.name in chosen)
    for output in outputs:
        if output.tensor.datatype in BINARY_ONLY and not output.binary:
            raise InvalidRequest(
                f"sending {output.tensor.datatype} data via JSON is not supported. Please use the binary data"
                f" format for output '{output.tensor.name}'"
            )
    return outputs


def _wants_binary(output: WantedBody, default: bool) -> bool:
    if "shared_memory_region" in output.parameters:
        raise Unsupported(f"output '{output.name}' wants shared memory, which this server does not support yet")
    if _unsigned(output.parameters, "classification", f"output '{output.name}'"):
        raise Unsupported(f"output '{output.name}' wants classification, which this server does not support yet")
    return _flag(output.parameters, "binary_data", default)


def _refuse_reserved(parameters: Parameters) -> None:
    for key in parameters:
        if key.startswith("triton_"):
            raise InvalidRequest(
                f"parameter keys starting with 'triton_' are reserved for Triton usage, got '{key}'"
            )


def _unsigned(parameters: Mapping[str, object], key: str, where: str) -> int | None:
    value = parameters.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"parameter '{key}' of {where} must be an unsigned integer, got {str(value)[:40]}")
    return value


def _flag(parameters: Mapping[str, object], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter '{key}' must be true or false, got {str(value)[:40]}")
    return value


def _seconds(microseconds: int | None) -> float | None:
    """A timeout of 0 is none."""
    return microseconds / 1e6 if microseconds else None
