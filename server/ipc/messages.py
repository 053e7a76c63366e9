"""The messages between a front end and the engine's process.

They are sent over a Unix socket, each as four bytes of length (little-endian) and msgpack. Tensors are not part of
them: they lie in the front end's shared memory, and messages hold their offsets.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cohabit.server.errors import WireError
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.execution import DeviceSpan, ExecutionTiming
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.statistics import EngineReport


class SharedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the front end's shared memory. `dtype` is numpy's short name, such as `<f4`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Sent once, by the front end that supervises the engine: load the repository."""

    config: bytes
    """An encoded `ServeConfig`."""
    before: list[ModelEntry] | None = None
    """After a restart, the catalog of the process before, whose READY models are to be served again; None at first."""


class Infer(msgspec.Struct, frozen=True, tag="infer"):
    """Execute a request. It is answered by `Inferred` or `Failed`, even after `Cancel`."""

    id: int
    model: ModelKey
    inputs: list[SharedTensor]
    batch: int
    outputs: list[str]
    mark_offset: int
    """Offset of the mark that the engine sets at the start of the execution; see `server.ipc.shared_layout`."""
    output_bytes: int
    """Room for the outputs, after the mark."""
    request_id: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    arrived_s: float | None = None
    traced: bool = False
    sizes: tuple[int, ...] = ()


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


class LoadModel(msgspec.Struct, frozen=True, tag="load"):
    id: int
    model: str
    config: str | None
    """A ModelConfig as JSON, which replaces config.pbtxt."""


class UnloadModel(msgspec.Struct, frozen=True, tag="unload"):
    id: int
    model: str


class AskReport(msgspec.Struct, frozen=True, tag="report"):
    id: int


class CountRejection(msgspec.Struct, frozen=True, tag="rejected"):
    """A front end refused requests before the engine saw them."""

    model: ModelKey
    reason: str
    count: int


class ChangeLog(msgspec.Struct, frozen=True, tag="log"):
    """New log settings: the fields of `LogSettings`."""

    settings: dict[str, Any]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process after the current execution."""


ToEngine = Start | Infer | Cancel | LoadModel | UnloadModel | AskReport | CountRejection | ChangeLog | Stop


class EntryChanged(msgspec.Struct, frozen=True, tag="entry"):
    entry: ModelEntry


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    model: str
    stage: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Loading at the start has finished, perhaps with failures."""

    memory_map: str


class StartRefused(msgspec.Struct, frozen=True, tag="start_refused"):
    """The engine cannot serve this configuration, and ends."""

    error: WireError


class Inferred(msgspec.Struct, frozen=True, tag="inferred"):
    id: int
    outputs: list[SharedTensor]
    timing: ExecutionTiming


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request, a load or an unload has failed."""

    id: int
    error: WireError


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A load, an unload or a report has succeeded."""

    id: int
    report: EngineReport | None = None


class Traced(msgspec.Struct, frozen=True, tag="traced"):
    """Spans of a traced request, sent after its answer, perhaps in several messages."""

    id: int
    spans: list[DeviceSpan]


ToFrontend = EntryChanged | Progress | Started | StartRefused | Inferred | Failed | Done | Traced

LENGTH_BYTES = 4

_encoder = msgspec.msgpack.Encoder()
decode_to_engine: Callable[[memoryview], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_frontend: Callable[[memoryview], ToFrontend] = msgspec.msgpack.Decoder(ToFrontend).decode


def encode(message: Any) -> bytes:
    """Return a message as it is sent, with its length in front."""
    buffer = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, buffer, LENGTH_BYTES)
    buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
    return bytes(buffer)
