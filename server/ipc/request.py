"""An inference request and its answer: the same records in the front end, on the socket, and in the engine."""

import struct
from collections.abc import Mapping

import msgspec

from cohabit.server.ipc.model import Array, ModelKey

Parameters = dict[str, bool | int | float | str]
"""KServe's parameters of a request or of a tensor."""

NO_LANE = -1
"""`Timing.lane` of work in the front end."""
MARK_BYTES = 64
"""Size of the mark, which precedes the outputs in a request's output buffer."""
_MARK = struct.Struct("<2d")


class RequestedOutput(msgspec.Struct, frozen=True):
    """An output requested by the client: KServe's name and parameters."""

    name: str
    parameters: Parameters = {}

    @property
    def binary(self) -> bool:
        """Whether the answer has it as bytes; otherwise as JSON numbers."""
        return bool(self.parameters.get("binary_data"))

    @property
    def classes(self) -> int:
        """Number of largest values to send instead of the tensor; 0 sends the tensor."""
        return int(self.parameters.get("classification", 0))

    @property
    def in_region(self) -> bool:
        """Whether it is written to the client's shared memory instead of the answer."""
        return "shared_memory_region" in self.parameters


SequenceId = int | str


class SequenceStep(msgspec.Struct, frozen=True):
    """A request's position in a sequence, whose requests share state: Triton's correlation id, and the two flags."""

    id: SequenceId
    start: bool = False
    end: bool = False
    prefix: tuple[SequenceId, int] | None = None
    """Of the first request: another sequence, and the number of its growing states' entries to begin with."""


class Request(msgspec.Struct, frozen=True, eq=False, omit_defaults=True, tag="infer"):
    """An inference request that fits its model. Equal only to itself.

    Its arrays lie in the memory that the front end shares with the engine. On the socket an array is its dtype, shape
    and offset; see `server.ipc.shared_memory`.
    """

    model: ModelKey
    inputs: Mapping[str, Array]
    batch: int
    outputs: tuple[RequestedOutput, ...]
    """In the model's order."""
    id: str | None = None
    """The client's id for the request."""
    priority: int | None = None
    """Priority given by the client: 1 is the most urgent; None means the model's default."""
    timeout_s: float | None = None
    """Maximum seconds from the request's arrival until its answer is ready."""
    sizes: tuple[int, ...] = ()
    """Sizes of the model's dynamic dimensions; only requests of the same sizes are batched."""
    sequence: SequenceStep | None = None
    """Its position in a sequence; None for a model without sequences."""
    arrived_s: float | None = None
    """Arrival time by `time.monotonic`; None for now."""
    output_buffer: Array | None = None
    """Output buffer: bytes for the mark, then for the outputs in order. None leaves outputs in the engine's memory."""
    number: int = 0
    """Unique on its connection: identifies the request in `Answer`, `Failed`, `Cancel` and `Traced`."""
    traced: bool = False
    """Whether the engine sends its spans."""

    def mark(self, started_s: float, predicted_s: float) -> None:
        """Write the start of its execution, by `time.monotonic`, and its predicted seconds, for the watchdog."""
        if self.output_buffer is not None:
            _MARK.pack_into(self.output_buffer.data, 0, started_s, predicted_s)

    @property
    def marked(self) -> tuple[float, float]:
        """The last mark; zeros before the request's execution."""
        if self.output_buffer is None:
            return 0.0, 0.0
        started_s, predicted_s = _MARK.unpack_from(self.output_buffer.data)
        return started_s, predicted_s


class Timing(msgspec.Struct, frozen=True):
    """When one request was executed, and its cost. Times are by `time.monotonic`, common to all processes.

    The servable fills in the execution's cost, the compute lane the rest.
    """

    queued_s: float = 0.0
    """When the request entered the scheduler's queue."""
    started_s: float = 0.0
    busy_s: float = 0.0
    """Time that its execution occupied the compute lane."""
    compute_s: float = 0.0
    """From the first op until the outputs exist, including stalls."""
    stall_s: float = 0.0
    """Part of `compute_s` spent waiting for parameters."""
    output_s: float = 0.0
    """From the existence of the outputs until each request has its own."""
    swapped_bytes: int = 0
    rows: int = 1
    """Rows of the whole batch, including other requests' rows."""
    lane: int = 0


class Answer(msgspec.Struct, frozen=True, eq=False, tag="answer"):
    """Outputs by name, and timing: first of an execution, then of each of its requests."""

    model: ModelKey
    """The executed version."""
    outputs: Mapping[str, Array]
    timing: Timing
    number: int = 0
    """The request's number."""
