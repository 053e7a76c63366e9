"""An inference request and its answer: the same records in the front end, on the socket, and in the engine."""

import struct
from collections.abc import Mapping

import msgspec

from cohabit.server.ipc.model import Array, ModelKey

Parameters = dict[str, bool | int | float | str]
"""KServe's parameters of a request or of a tensor."""

MARK_BYTES = 64
"""What a mark takes of a request's room."""
_MARK = struct.Struct("<2d")


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output that the client asks for: KServe's name and parameters."""

    name: str
    parameters: Parameters = {}

    @property
    def binary(self) -> bool:
        """Whether the answer has it as bytes; otherwise it has JSON numbers."""
        return bool(self.parameters.get("binary_data"))

    @property
    def classes(self) -> int:
        """How many of the largest values to name instead of sending all; 0 sends the tensor."""
        return int(self.parameters.get("classification", 0))

    @property
    def in_region(self) -> bool:
        """Whether it is written to the client's shared memory instead of the answer."""
        return "shared_memory_region" in self.parameters


SequenceId = int | str


class SequenceStep(msgspec.Struct, frozen=True):
    """A request's place in a sequence, whose requests share state: Triton's correlation id, and the two flags."""

    id: SequenceId
    start: bool = False
    end: bool = False


class Request(msgspec.Struct, frozen=True, eq=False, omit_defaults=True, tag="infer"):
    """An inference request that fits its model. Equal only to itself.

    Its arrays are places in the memory that the front end shares with the engine. On the socket an array is its dtype,
    shape and offset; see `server.ipc.shared_memory`.
    """

    model: ModelKey
    inputs: Mapping[str, Array]
    batch: int
    outputs: tuple[RequestedOutput, ...]
    """In the model's order."""
    id: str | None = None
    """The client's name for it."""
    priority: int | None = None
    """As the client gave it: 1 is the most urgent, None leaves it to the model."""
    timeout_s: float | None = None
    """Within which the answer must be ready, counted from the request's arrival."""
    sizes: tuple[int, ...] = ()
    """Of the model's dynamic dimensions; only requests of the same sizes are batched."""
    sequence: SequenceStep | None = None
    """Its place in a sequence; None for a model without them."""
    arrived_s: float | None = None
    """When the request arrived, by `time.monotonic`; None for now."""
    room: Array | None = None
    """Bytes for its mark, then for the outputs, one after the other. None leaves the outputs in the engine's memory."""
    number: int = 0
    """Unique on its connection: `Answer`, `Failed`, `Cancel` and `Traced` name it."""
    traced: bool = False
    """Whether the engine sends its spans."""

    def mark(self, started_s: float, predicted_s: float) -> None:
        """Note for the watchdog when its execution began, by `time.monotonic`, and its predicted seconds."""
        if self.room is not None:
            _MARK.pack_into(self.room.data, 0, started_s, predicted_s)

    @property
    def marked(self) -> tuple[float, float]:
        """What was noted last; zeros before its execution."""
        if self.room is None:
            return 0.0, 0.0
        started_s, predicted_s = _MARK.unpack_from(self.room.data)
        return started_s, predicted_s


class Timing(msgspec.Struct, frozen=True):
    """When one request was executed, and its cost. Times are those of `time.monotonic`, common to all processes.

    The servable fills in the cost of the execution, the compute lane the rest.
    """

    queued_s: float = 0.0
    """When the request entered the scheduler's queue."""
    started_s: float = 0.0
    busy_s: float = 0.0
    """How long its execution occupied the compute lane."""
    compute_s: float = 0.0
    """From the first op until the outputs exist, stalls included."""
    stall_s: float = 0.0
    """The part of `compute_s` that waited for parameters."""
    output_s: float = 0.0
    """From the existence of the outputs until each request has its own."""
    swapped_bytes: int = 0
    rows: int = 1
    """Rows of the whole batch, other requests' included."""
    lane: int = 0
    """The compute lane."""


class Answer(msgspec.Struct, frozen=True, eq=False, tag="answer"):
    """The outputs by name, and the timing: of an execution, then of each of its requests."""

    model: ModelKey
    """The version that was executed."""
    outputs: Mapping[str, Array]
    timing: Timing
    number: int = 0
    """The request's."""
