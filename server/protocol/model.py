"""What the server knows of a model: its tensors, how to execute it, and the memory it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from runtime.captures import Capture

if TYPE_CHECKING:
    from runtime.recording import Follow

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = Mapping[str, Array]
"""A request's tensors by name."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output: a KServe datatype, and a shape in which -1 stands for any size.

    As in Triton's configuration, `shape` leaves the batch out where the model has one.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model as clients see it. `max_batch_size` 0 means that its tensors have no batch dimension."""

    name: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    platform: str = "pytorch_pt2"

    def wire_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients send and receive: -1 in front where there is a batch."""
        return (-1, *tensor.shape) if self.max_batch_size > 0 else tensor.shape


class Execution(msgspec.Struct, frozen=True, eq=False):
    """One inference's outputs by name, and what it cost. The receiver owns the arrays.

    `compute_s` runs until the outputs are there; `stall_s` is the part of it that waited for parameters.
    """

    outputs: Mapping[str, Array]
    compute_s: float
    stall_s: float = 0.0
    swapped_bytes: int = 0
    prefetched: bool = False
    """Whether its leading copies had begun beside the execution before."""
    output_s: float = 0.0
    """From there being outputs until they are these arrays."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a model's swaps cost it, by the order of executions. Zero for one that is all resident."""

    prefix_s: float = 0.0
    """Saved where the leading copies were made beside the execution before."""
    recovery_s: float = 0.0
    """Lost right behind an execution of the same model, whose residents are still on their way back."""


class Servable(Protocol):
    """A model that is loaded."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def seconds_by_batch(self) -> Mapping[int, float]:
        """What one execution is expected to take, by the batch sizes that the model is prepared for."""
        ...

    @property
    def readiness(self) -> Readiness: ...

    @property
    def lost(self) -> str | None:
        """Why the device can execute nothing any more, or None while it is well."""
        ...

    @property
    def captures(self) -> Mapping[int, Capture]:
        """How executions are issued on a device that has graphs, by batch size. Any thread."""
        ...

    def execute(self, requests: Sequence[Inputs], rows: int, follow: "Follow | None" = None) -> Execution:
        """Run one inference; called by whoever has the device. `follow` gets what the device's lanes did for it.

        Every request has every input. Along the first dimension they follow each other in the model's batch, and
        make `rows` together; without a batch (`max_batch_size` is 0) there is one request, and `rows` is 1. Inputs
        are views of the request's body: little-endian, perhaps unaligned, and valid until the call returns. BF16
        arrays are uint16 here and in the outputs.

        Raises InvalidRequest for values that the model cannot take. Whatever else is raised becomes this
        request's error, and the engine lives on.
        """
        ...

    @property
    def only_computes(self) -> bool:
        """Whether `execute` waits for nothing, no copy and no other device, and may be called by any thread."""
        ...

    @property
    def prefetches(self) -> bool:
        """Whether `expect` may have something to do."""
        ...

    def expect(self, batch: int, followed: bool = False) -> None:
        """Hear that this model is next behind the one about to be executed, and copies may begin beside that one.

        Called on the engine's thread. It may turn out otherwise: the request can be cancelled. `followed` says that
        the next execution would be given a `follow`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory a loaded model holds, and what its plans promise: seconds per inference by batch size."""

    partition_bytes: int = 0
    parameter_bytes: int = 0
    resident_bytes: int = 0
    predicted_s: Mapping[int, float] = field(default_factory=dict)
    bound_s: Mapping[int, float] = field(default_factory=dict)
    """Lower bounds of these seconds for any plan in this memory."""
    lane: int = 0
    """The compute lane that executes the model."""


def lane_name(kind: str, lane: int, lanes: int) -> str:
    """What people call a lane of a kind: there is a number only where there are several."""
    return kind if lanes == 1 else f"{kind}_{lane}"


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What the device's memory is used for, and how long its lanes have worked since the start."""

    workspace_bytes: int = 0
    partition_bytes: int = 0
    free_bytes: int = 0
    lane_busy_s: Mapping[str, float] = field(default_factory=dict)
    pinned_total_bytes: int | None = None
    """Most host memory that may be pinned; None where nothing is pinned."""
    pinned_used_bytes: int = 0
