"""An inference request and its response, whatever protocol they travel by."""

from collections.abc import Mapping
from dataclasses import dataclass

from server.errors import ExecutionFailed
from server.model import Array, ModelInfo, TensorSpec


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that the client wants, as bytes or as JSON numbers."""

    tensor: TensorSpec
    binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that fits its model. `outputs` stand in the model's order."""

    model: str
    version: int
    inputs: Mapping[str, Array]
    batch: int
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None
    priority: int | None = None
    """As the client gave it: 1 is the most urgent. Models have one level, so it does not change the order."""
    timeout_s: float | None = None
    """How long the request may wait in the queue."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    tensor: TensorSpec
    array: Array
    binary: bool


@dataclass(frozen=True, slots=True)
class InferResponse:
    model: str
    version: int
    outputs: tuple[OutputTensor, ...]
    id: str | None = None


def respond(request: InferRequest, info: ModelInfo, arrays: Mapping[str, Array]) -> InferResponse:
    """Pick what the client asked for out of what the model returned."""
    missing = [o.tensor.name for o in request.outputs if o.tensor.name not in arrays]
    if missing:
        raise ExecutionFailed(info.name, f"it returned no {', '.join(missing)}")
    outputs = tuple(OutputTensor(o.tensor, arrays[o.tensor.name], o.binary) for o in request.outputs)
    return InferResponse(info.name, info.version, outputs, request.id)
