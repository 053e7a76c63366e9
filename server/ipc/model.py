"""Description of a model for the front end: tensors, footprint, captured graphs. Plain data for IPC."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from cohabit.planner.shapes import STATIC, Bucket, DynamicShape, evaluate
from cohabit.server.activations import Activations

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = Mapping[str, Array]
"""A request's tensors by name."""


ENSEMBLE = "ensemble"
"""Platform of an entry without a program, whose requests run other models."""

TOKENIZER_BACKEND = "tokenizer"
"""Platform of an entry without a program, whose requests are texts that become token ids."""

TOKENIZER = "tokenizer.json"
"""File in a text model's folder: its tokenizer, in the format of Hugging Face's tokenizers library."""

POOLINGS = ("mean", "cls", "lasttoken", "max")
"""How the states of a text's tokens become its vector; the first one by default."""

GENERATION = "generation.json"
"""File in a language model's folder: a `LanguageDocument` in JSON."""


class LanguageDocument(msgspec.Struct, frozen=True):
    """A language model's stop tokens and chat template, which `cohabit import` writes and the front end reads."""

    stop_ids: tuple[int, ...] = ()
    """Tokens at which a text ends."""
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = {}
    """Special tokens that a chat template may use, such as `bos_token`."""
    cleans_up_spaces: bool = False
    """Whether transformers cleans up spaces in decoded texts."""


class ModelKey(NamedTuple):
    """A version of a model. Each has its own programs, queue and statistics."""

    name: str
    version: int

    @property
    def fields(self) -> dict[str, str | int]:
        """Fields of log lines."""
        return {"model": self.name, "version": self.version}


class TensorSpec(msgspec.Struct, frozen=True):
    """An input or output: a KServe datatype, and a shape in which -1 means any size.

    As in Triton's configuration, `shape` has no batch dimension.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    labels: tuple[str, ...] = ()
    """Names of an output's classes, by index; a class may have none."""
    sizes: tuple[int | str, ...] = ()
    """`shape`, with an expression for each dynamic size; empty if all are static."""
    default: float | None = None
    """Value that fills the input if a request omits it; None if the input is required."""
    rows: int | None = None
    """Rows of the table that the input's values index, so that values are from 0 to one less. None if unknown, or if
    the values are not indices."""

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
    """Maximum length of a growing state, such as the tokens of a text; 0 without one."""

    @property
    def key(self) -> ModelKey:
        return ModelKey(self.name, self.version)

    @property
    def has_program(self) -> bool:
        """Whether the engine executes its requests; otherwise the front end does."""
        return self.platform not in (ENSEMBLE, TOKENIZER_BACKEND)

    def wire_shape(self, tensor: TensorSpec) -> tuple[int, ...]:
        """Return the shape that clients send and receive, with -1 for the batch dimension, if any."""
        return (-1, *tensor.shape) if self.max_batch_size > 0 else tensor.shape


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
    """Bytes of the workspace used by activations and scratch, by bucket."""
    searches: dict[Bucket, tuple[str, int]] = {}
    """The search that found each plan, such as `best (genetic)`, and the number of candidates that it tried."""
    noise: float | None = None
    """Disturbance of the measured times by other work (`Profile.noise`); None if they are from a single run."""

    @property
    def fields(self) -> dict[str, object]:
        """Fields of log lines."""
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
    """Device memory of the graphs outside the arena, as the driver reports it."""
    refused: str | None


class ArenaExtent(msgspec.Struct, frozen=True, array_like=True):
    """A range of the device's memory, and its use."""

    use: Literal["workspace", "partition", "shared", "free"]
    offset: int
    nbytes: int
    model: ModelKey | None = None
    """Owner of the partition, or the first of several; None also while it is being loaded or unloaded."""
    others: int = 0
    """Number of further models in the partition, if it is a family's."""


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
    """Device memory of the process outside the arena; None on devices without any."""
    process_bytes: int = 0
    """RAM of the engine's process, including its pages of libraries and other files."""
    divisions: int | None = None
    """Number of new divisions of memory by measured request rates; None if disabled."""


def lane_name(kind: str, lane: int, lanes: int) -> str:
    """Return a lane's display name, numbered only if there are several lanes of a kind."""
    return kind if lanes == 1 else f"{kind}_{lane}"
