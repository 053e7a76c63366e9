"""An inference request and its response, whatever protocol they travel by."""

from collections.abc import Mapping

import msgspec

from server.errors import ExecutionFailed
from server.protocol.classification import classify
from server.protocol.datatypes import BYTES
from server.protocol.model import Array, ModelInfo, TensorSpec
from server.protocol.request_trace import RequestTrace
from server.protocol.shared_memory import Window


class RequestedOutput(msgspec.Struct, frozen=True, eq=False):
    """An output that the client wants: in the answer, as bytes or as JSON numbers, or in shared memory."""

    tensor: TensorSpec
    binary: bool
    classes: int = 0
    """How many of the largest values to name instead of sending all; 0 sends the tensor."""
    window: Window | None = None
    """Where to write it; None puts it into the answer."""


class InferRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that fits its model. `outputs` stand in the model's order."""

    model: str
    version: int
    inputs: Mapping[str, Array]
    batch: int
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None
    priority: int | None = None
    """As the client gave it: 1 is the most urgent, None leaves it to the model."""
    timeout_s: float | None = None
    """How long the request may wait in the queue."""
    trace: RequestTrace | None = None
    """Where its times are noted, if somebody follows it."""


class OutputTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor of a response. Its datatype may differ from the model's: a classification is BYTES."""

    tensor: TensorSpec
    array: Array
    binary: bool
    window: Window | None = None


class InferResponse(msgspec.Struct, frozen=True, eq=False):
    model: str
    version: int
    outputs: tuple[OutputTensor, ...]
    id: str | None = None


def respond(request: InferRequest, info: ModelInfo, arrays: Mapping[str, Array]) -> InferResponse:
    """Pick what the client asked for out of what the model returned. Raises ExecutionFailed if that has less."""
    outputs = []
    for wanted in request.outputs:
        if wanted.tensor.name not in arrays:
            missing = [o.tensor.name for o in request.outputs if o.tensor.name not in arrays]
            raise ExecutionFailed(info.name, f"it returned no {', '.join(missing)}")
        outputs.append(_output(wanted, arrays[wanted.tensor.name], info))
    return InferResponse(info.name, info.version, tuple(outputs), request.id)


def _output(wanted: RequestedOutput, array: Array, info: ModelInfo) -> OutputTensor:
    if not wanted.classes:
        return OutputTensor(wanted.tensor, array, wanted.binary, wanted.window)
    labels = classify(array, wanted.tensor, wanted.classes, batched=info.max_batch_size > 0)
    return OutputTensor(TensorSpec(wanted.tensor.name, BYTES, labels.shape), labels, wanted.binary)
