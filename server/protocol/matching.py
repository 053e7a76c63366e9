"""KServe v2's inference messages, and their checks against a model: tensors, batch, outputs, parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta, Raw

from cohabit.server.errors import InvalidRequest, Refused, RequestError, TensorMismatch
from cohabit.server.ipc.model import Array, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Parameters, Request, RequestedOutput, SequenceStep
from cohabit.server.protocol.datatypes import BINARY_ONLY, BYTES, DTYPES
from cohabit.server.protocol.shared_memory import RegionUse, Window
from cohabit.server.protocol.tensors import filled

Dim = Annotated[int, Meta(ge=0, le=2**63 - 1)]
MOST_DIMS = 64
"""Maximum number of dimensions of a tensor, as in NumPy."""
_MOST_ID = 128
"""Maximum length of a sequence id, as in Triton."""
MOST_UNSIGNED = 2**64 - 1
"""Maximum of Triton's `timeout`, `priority` and sizes, which are uint64."""

NO_DATA = Raw(b"")
"""Marks a tensor without `data`; compared by identity."""


Shape = TypeVar("Shape", list[int], Raw)


class InputBody(msgspec.Struct, Generic[Shape]):
    """An input tensor of a request. `data` is `NO_DATA` if its values are not in the JSON.

    In JSON, the shape stays `Raw` until its length is checked.
    """

    name: str
    datatype: str
    shape: Shape
    data: Raw = NO_DATA
    parameters: Parameters = {}


class RequestBody(msgspec.Struct, Generic[Shape]):
    """A request as sent by the client, over any protocol."""

    inputs: list[InputBody[Shape]]
    id: str = ""
    outputs: list[RequestedOutput] = []
    parameters: Parameters = {}


Read = Callable[[InputBody[list[int]]], Array]
"""Returns the values of an input whose name, datatype and shape fit the model. Raises InvalidRequest."""


@contextmanager
def errors_of(request_id: str | None) -> Iterator[None]:
    """Prefix the message of every RequestError with the client's request id: see `of_request`."""
    try:
        yield
    except RequestError as error:
        error.of_request(request_id)
        raise


def fit(
    message: RequestBody[list[int]], info: ModelInfo, regions: RegionUse, read: Read, binary: bool = False
) -> Request:
    """Check a request against its model, then read its tensors.

    `binary` is the default format of outputs. Raises InvalidRequest or Refused.
    """
    parameters, priority, timeout_s = message.parameters, None, None
    if parameters:
        _check_parameters(parameters)
    _match_inputs(message.inputs, info)
    batch = _batch(message.inputs, info)
    sizes = _sizes(message.inputs, info) if info.dynamic.dimensions else ()
    sequence = _sequence(parameters, info, batch)
    inputs = {body.name: read(body) for body in message.inputs}
    for tensor in info.inputs:
        if tensor.default is not None and tensor.name not in inputs:
            shape = (batch, *tensor.shape) if info.max_batch_size > 0 else tensor.shape
            inputs[tensor.name] = filled(tensor.default, tensor.datatype, shape)
    if parameters:
        binary = _flag(parameters, "binary_data_output", binary)
        priority = unsigned(parameters, "priority", "the request") or None
        timeout_us = unsigned(parameters, "timeout", "the request")
        timeout_s = timeout_us / 1e6 if timeout_us else None  # 0 means none
    outputs = _outputs(message.outputs, info, regions, binary)
    return Request(info.key, inputs, batch, outputs, message.id or None, priority, timeout_s, sizes, sequence)


def window_of(parameters: Parameters, regions: RegionUse, where: str) -> Window | None:
    """Find the shared memory named by a tensor's parameters; None without one."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    if not isinstance(region, str):
        raise InvalidRequest(
            f"parameter 'shared_memory_region' of {where} must be a string, got {str(region)[:40]}"
        )
    size = unsigned(parameters, "shared_memory_byte_size", where)
    if size is None:
        raise InvalidRequest(f"'shared_memory_byte_size' is missing with 'shared_memory_region' of {where}")
    return regions.window(region, unsigned(parameters, "shared_memory_offset", where) or 0, size)


def unsigned(parameters: Mapping[str, object], key: str, where: str) -> int | None:
    """Return a uint64 parameter; None if it is not set. Raises InvalidRequest."""
    value = parameters.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_UNSIGNED:
        raise InvalidRequest(
            f"parameter '{key}' of {where} must be an unsigned integer of at most {MOST_UNSIGNED}, got"
            f" {value!r:.40}"
        )
    return value


def _match_inputs(bodies: Sequence[InputBody[list[int]]], info: ModelInfo) -> None:
    """Check names, datatypes and shapes. Raises InvalidRequest."""
    specs = {tensor.name: tensor for tensor in info.inputs}
    seen: set[str] = set()
    for body in bodies:
        if body.name not in specs:
            raise InvalidRequest(
                f"unexpected inference input '{body.name}' for model '{info.name}', whose inputs are {sorted(specs)}"
            )
        if body.name in seen:
            raise TensorMismatch(f"input '{body.name}' already exists in request")
        seen.add(body.name)
        _match_input(body, specs[body.name], info)
    missing = [tensor.name for tensor in info.inputs if tensor.name not in seen and tensor.default is None]
    if missing:
        raise TensorMismatch(
            f"expected {len(specs)} inputs but got {len(bodies)} inputs for model '{info.name}'. Got input(s)"
            f" {sorted(seen)}, but missing required input(s) {missing}. Please provide all required input(s)."
        )


def _match_input(body: InputBody[list[int]], tensor: TensorSpec, info: ModelInfo) -> None:
    if body.datatype != BYTES and body.datatype not in DTYPES:
        raise InvalidRequest(
            f"invalid datatype '{body.datatype[:40]}' of input '{body.name}'; the datatypes are"
            f" {', '.join((*DTYPES, BYTES))}"
        )
    if body.datatype != tensor.datatype:
        hint = "; PyTorch models have no string tensors" if body.datatype == BYTES else ""
        raise TensorMismatch(
            f"inference input '{body.name}' data-type is '{body.datatype}', but model '{info.name}' expects"
            f" '{tensor.datatype}'{hint}"
        )
    if len(body.shape) > MOST_DIMS:
        raise InvalidRequest(
            f"the shape of input '{body.name}' has {len(body.shape)} dimensions, at most {MOST_DIMS}"
            f" are allowed; the model takes {len(info.wire_shape(tensor))}"
        )
    expected = info.wire_shape(tensor)
    if not _fits(expected, body.shape):
        note = (
            ". NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be"
            " prepended to each input shape."
            if info.max_batch_size > 0
            else ""
        )
        raise TensorMismatch(
            f"unexpected shape for input '{body.name}' for model '{info.name}'. Expected {list(expected)}, got"
            f" {body.shape}{note}"
        )


def _fits(expected: Sequence[int], shape: Sequence[int]) -> bool:
    return len(expected) == len(shape) and all(w == g or w < 0 <= g for w, g in zip(expected, shape, strict=True))


def _batch(bodies: Sequence[InputBody[list[int]]], info: ModelInfo) -> int:
    if info.max_batch_size == 0:
        return 1
    batch = bodies[0].shape[0] if bodies else 1
    for body in bodies:
        if body.shape[0] != batch:
            raise TensorMismatch(
                f"input '{body.name}' batch size does not match other inputs for '{info.name}': {body.shape[0]},"
                f" and {batch} in '{bodies[0].name}'"
            )
    if not 1 <= batch <= info.max_batch_size:
        raise TensorMismatch(
            f"inference request batch-size must be <= {info.max_batch_size} for '{info.name}' and at least 1,"
            f" got {batch}"
        )
    if info.only_batches and batch not in info.only_batches:
        raise InvalidRequest(
            f"inference request batch-size must be one of {list(info.only_batches)} for '{info.name}', got {batch}:"
            " the rows of a batch influence one another there, so that requests are not padded. The operator can plan"
            " more sizes with --batch-sizes"
        )
    return batch


def _sizes(bodies: Sequence[InputBody[list[int]]], info: ModelInfo) -> tuple[int, ...]:
    """Return the sizes of the dynamic dimensions. Raises TensorMismatch for sizes that the model does not take."""
    given = {body.name: body.shape for body in bodies}
    sizes = []
    for d in info.dynamic.dimensions:
        name = info.inputs[d.input].name
        size = given[name][d.axis]
        if not d.allows(size):
            raise TensorMismatch(
                f"unexpected shape for input '{name}' for model '{info.name}': dimension {d.axis} is {size}, it can be"
                f" {d.range}"
            )
        sizes.append(size)
    symbols = info.dynamic.symbols(sizes)
    for tensor in info.inputs:
        got = given[tensor.name][-len(tensor.shape) :] if tensor.shape else []
        if list(tensor.at(symbols)) != got:
            raise TensorMismatch(
                f"unexpected shape for input '{tensor.name}' for model '{info.name}': with the other inputs' sizes, its"
                f" last dimensions must be {list(tensor.at(symbols))}, got {got}"
            )
    if (broken := info.dynamic.broken_constraint(symbols)) is not None:
        raise TensorMismatch(
            f"unexpected shapes {given} for model '{info.name}', which was exported under the condition {broken}, where"
            f" {', '.join(f'{symbol} is {value}' for symbol, value in symbols.items())}"
        )
    return tuple(sizes)


_FORMS: dict[bool, Parameters] = {binary: {"binary_data": binary} for binary in (False, True)}
"""Parameters of outputs for which the client gave none."""


def _outputs(
    bodies: Sequence[RequestedOutput], info: ModelInfo, regions: RegionUse, binary: bool
) -> tuple[RequestedOutput, ...]:
    """Return the requested outputs in the model's order; all outputs if the client names none."""
    if not bodies:
        return tuple([_output(RequestedOutput(tensor.name), tensor, regions, binary) for tensor in info.outputs])
    wanted: dict[str, RequestedOutput] = {}
    known = [tensor.name for tensor in info.outputs]
    for body in bodies:
        if body.name not in known:
            raise InvalidRequest(
                f"unexpected inference output '{body.name}' for model '{info.name}', whose outputs are {known}"
            )
        if body.name in wanted:
            raise TensorMismatch(f"output '{body.name}' already exists in request")
        wanted[body.name] = body
    return tuple([_output(wanted[t.name], t, regions, binary) for t in info.outputs if t.name in wanted])


def _output(asked: RequestedOutput, tensor: TensorSpec, regions: RegionUse, default: bool) -> RequestedOutput:
    """Check an output's parameters, and keep only those for its destination and format."""
    parameters = asked.parameters
    if not parameters and (default or tensor.datatype not in BINARY_ONLY):
        return RequestedOutput(tensor.name, _FORMS[default])
    where = f"output '{tensor.name}'"
    classes = unsigned(parameters, "classification", where) or 0
    binary = _flag(parameters, "binary_data", default)
    window = window_of(parameters, regions, where)
    if window is not None and classes:
        raise InvalidRequest(f"shared memory can't be set on {where} that is to be classified")
    if window is not None and parameters.get("binary_data"):
        raise InvalidRequest(f"'binary_data' and 'shared_memory_region' can't both be set on {where}")
    if classes and tensor.datatype == BYTES:
        raise InvalidRequest(f"{where} is BYTES, which cannot be classified")
    if tensor.datatype in BINARY_ONLY and not (binary or classes or window):
        raise InvalidRequest(
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary data"
            f" format for output '{tensor.name}'"
        )
    kept: Parameters = {key: value for key, value in parameters.items() if key.startswith("shared_memory_")}
    return RequestedOutput(tensor.name, {**kept, "binary_data": binary, "classification": classes})


def _check_parameters(parameters: Parameters) -> None:
    """Refuse reserved parameters. Accepts custom parameters, and ignores them."""
    for key in parameters:
        if key.startswith("triton_"):
            raise InvalidRequest(
                f"parameter keys starting with 'triton_' are reserved for Triton usage, got '{key}'"
            )


def _sequence(parameters: Parameters, info: ModelInfo, batch: int) -> SequenceStep | None:
    """Return a request's position in its sequence. Raises Refused for a model without sequences, and InvalidRequest."""
    sequence = parameters.get("sequence_id")
    start, end = (_flag(parameters, key, False) for key in ("sequence_start", "sequence_end"))
    if not info.sequences:
        if sequence or start or end:
            raise Refused(
                "Unsupported",
                f"sequence_id is set, but model '{info.name}' keeps no state between requests; send requests without a"
                " sequence, or say in its config.pbtxt what it keeps (sequence_batching)",
            )
        return None
    if isinstance(sequence, bool | float):
        raise InvalidRequest(f"parameter 'sequence_id' must be an integer or a string, got {sequence}")
    if not sequence:
        raise InvalidRequest(
            f"inference request to model '{info.name}' must specify a non-zero or non-empty correlation ID: its"
            " requests belong to sequences; send sequence_id, and with the first request sequence_start"
        )
    if isinstance(sequence, int) and not 0 < sequence <= MOST_UNSIGNED:
        raise InvalidRequest(f"parameter 'sequence_id' must be from 1 to {MOST_UNSIGNED}, got {sequence}")
    if isinstance(sequence, str) and len(sequence) > _MOST_ID:
        raise InvalidRequest(f"parameter 'sequence_id' has {len(sequence)} characters, the limit is {_MOST_ID}")
    if batch != 1:
        raise InvalidRequest(
            f"inference request to model '{info.name}' must specify batch-size 1, got {batch}: each row of a batch"
            " is of another sequence; the server makes batches of the requests that wait"
        )
    return SequenceStep(sequence, start, end)


def _flag(parameters: Mapping[str, object], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter '{key}' must be true or false, got {str(value)[:40]}")
    return value
