"""An inference request and its response, independent of the protocol that carries them."""

from collections.abc import Callable, Mapping

import msgspec

from cohabit.server.errors import ExecutionFailed
from cohabit.server.ipc.execution import OnSpans
from cohabit.server.ipc.model import Array, ModelInfo, ModelKey, TensorSpec
from cohabit.server.protocol.classification import classify
from cohabit.server.protocol.datatypes import BYTES
from cohabit.server.protocol.shared_memory import Window


class RequestedOutput(msgspec.Struct, frozen=True, eq=False):
    """An output that the client wants: in the answer, as bytes or as JSON numbers, or in shared memory."""

    tensor: TensorSpec
    binary: bool
    classes: int = 0
    """How many of the largest values to name instead of sending all; 0 sends the tensor."""
    window: Window | None = None
    """Where to write it; None puts it into the answer."""


class InferRequest(msgspec.Struct, frozen=True, eq=False):
    """A request that fits its model. `outputs` are in the model's order."""

    model: ModelKey
    inputs: Mapping[str, Array]
    batch: int
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None
    priority: int | None = None
    """As the client gave it: 1 is the most urgent, None leaves it to the model."""
    timeout_s: float | None = None
    """Within which the answer must be ready, counted from the request's arrival."""
    arrived_s: float | None = None
    """When the request arrived, by `time.monotonic`; None for now."""
    start_mark: Callable[[float, float], None] | None = None
    """Called with the time and the prediction before the first op of its execution, by the compute lane's thread."""
    on_spans: OnSpans | None = None
    """Receives the spans of this request, if it is traced."""
    sizes: tuple[int, ...] = ()
    """Of the model's dynamic dimensions; requests of other sizes are executed apart."""


class OutputTensor(msgspec.Struct, frozen=True, eq=False):
    """A tensor of a response. Its datatype may differ from the model's: a classification is BYTES."""

    tensor: TensorSpec
    array: Array
    binary: bool
    window: Window | None = None


class InferResponse(msgspec.Struct, frozen=True, eq=False):
    """The answer to one request. Its arrays may be views of leased memory."""

    model: str
    version: int
    outputs: tuple[OutputTensor, ...]
    id: str | None = None


def respond(request: InferRequest, info: ModelInfo, arrays: Mapping[str, Array]) -> InferResponse:
    """Select the requested outputs of a model. Raises ExecutionFailed if one is missing."""
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
