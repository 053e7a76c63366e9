"""The description of a model for the front end: tensors, footprint, captured graphs. Plain data for IPC."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from cohabit.planner.shapes import STATIC, Bucket, DynamicShape, evaluate
from cohabit.server.activations import Activations

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = Mapping[str, Array]
"""A request's tensors by name."""


TOKENIZER = "tokenizer.json"
"""In a text model's folder: its tokenizer, as Hugging Face's library of that name writes it."""

GENERATION = "generation.json"
"""In a language model's folder: where its texts stop, and how a conversation becomes one."""


class ModelKey(NamedTuple):
    """A version of a model. Each has its own partition, programs, queue and statistics."""

    name: str
    version: int

    @property
    def fields(self) -> dict[str, str | int]:
        """The fields of log lines."""
        return {"model": self.name, "version": self.version}


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output: a KServe datatype, and a shape in which -1 stands for any size.

    As in Triton's configuration, `shape` has no batch dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    labels: tuple[str, ...] = ()
    """Names of an output's classes, by index; a class may have none."""
    sizes: tuple[int | str, ...] = ()
    """`shape`, with an expression for each dynamic size; empty where there is none."""
    default: float | None = None
    """What fills an input that a request omits; None for one that every request must have."""
    rows: int | None = None
    """How many rows the table has that an input's values index, so that they are 0 to one less; None where that is not
    known, or for values that are no indices."""

    def at(self, symbols: Mapping[str, int]) -> tuple[int, ...]:
        """Return its shape without the batch, given the values of the symbols in its sizes."""
        if not self.sizes:
            return self.shape
        return tuple(evaluate(size, symbols) if isinstance(size, str) else size for size in self.sizes)


class ModelInfo(msgspec.Struct, frozen=True):
    """A model's description for clients. `max_batch_size` is 0 if its tensors have no batch dimension."""

    name: str
    version: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    platform: str = "pytorch_pt2"
    only_batches: tuple[int, ...] = ()
    """The batch sizes that requests may have, if rows influence one another. Empty: all up to the largest."""
    dynamic: DynamicShape = STATIC
    sequences: bool = False
    """Whether requests belong to sequences, whose state the server keeps."""
    context: int = 0
    """How far a growing state grows, such as the tokens of a text; 0 where there is none."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version)

    def wire_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients send and receive, with -1 for the batch dimension if there is one."""
        return (-1, *tensor.shape) if self.max_batch_size > 0 else tensor.shape

    def sizes_of(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the sizes of the dynamic dimensions of a request that fits the model."""
        return tuple(inputs[self.inputs[d.input].name].shape[d.axis] for d in self.dynamic.dimensions)


class ModelFootprint(msgspec.Struct, frozen=True):
    """A loaded model's memory, and its plans' predicted seconds per inference by bucket."""

    partition_bytes: int = 0
    parameter_bytes: int = 0
    resident_bytes: int = 0
    predicted_s: dict[Bucket, float] = {}
    bound_s: dict[Bucket, float] = {}
    """Lower bounds of these seconds for any plan in this memory."""
    lane: int = 0
    """The compute lane that executes the model."""
    activation_bytes: dict[Bucket, int] = {}
    """What activations and scratch take of the workspace, by bucket."""

    @property
    def fields(self) -> dict[str, object]:
        """Return what a log line has of it."""
        return {
            "partition_bytes": self.partition_bytes,
            "parameter_bytes": self.parameter_bytes,
            "resident_bytes": self.resident_bytes,
            "predicted_s": {str(bucket): seconds for bucket, seconds in self.predicted_s.items()},
            "activation_bytes": {str(bucket): nbytes for bucket, nbytes in self.activation_bytes.items()},
        }

    def activations(self, model: str) -> list[Activations]:
        return [Activations(model, b.batch, str(b), nbytes) for b, nbytes in self.activation_bytes.items()]


class GraphCapture(msgspec.Struct, frozen=True):
    """How a program is issued on a device with graphs. `refused` is the reason why it was not captured."""

    graphs: int
    graph_bytes: int
    """Device memory of the graphs outside of the arena, as the driver reports it."""
    refused: str | None


class ArenaExtent(msgspec.Struct, frozen=True, array_like=True):
    """A range of the device's memory, and what it is for."""

    use: Literal["workspace", "partition", "shared", "free"]
    offset: int
    nbytes: int
    model: ModelKey | None = None
    """Whose partition it is; None while it is being loaded or unloaded, too."""


class DeviceUse(msgspec.Struct, frozen=True):
    """The use of the device's memory, and the busy seconds of its lanes since the start."""

    workspace_bytes: int = 0
    partition_bytes: int = 0
    free_bytes: int = 0
    lane_busy_s: dict[str, float] = {}
    pinned_total_bytes: int | None = None
    """Limit of pinned host memory; None on devices that pin none."""
    pinned_used_bytes: int = 0
    extents: tuple[ArenaExtent, ...] = ()
    """The arena's address map."""
    outside_bytes: int | None = None
    """Device memory that the process takes outside of the arena; None on devices where it takes none."""
    process_bytes: int = 0
    """RAM of the engine's process, its pages of libraries and other files included."""
    divisions: int | None = None
    """Times that memory was divided again by measured request rates; None where it never is."""


def lane_name(kind: str, lane: int, lanes: int) -> str:
    """Return a lane's display name, numbered only if there are several lanes of a kind."""
    return kind if lanes == 1 else f"{kind}_{lane}"
