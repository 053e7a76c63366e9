"""Messages between a front end and the engine's process, including `Request` and `Answer`.

Each is sent over a Unix socket as four bytes of length (little-endian) and msgpack. Tensors stay in the front end's
shared memory; messages hold their offsets.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cohabit.server.errors import WireError
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.shared_memory import SharedMemory
from cohabit.server.ipc.spans import DeviceSpan
from cohabit.server.ipc.statistics import EngineReport


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Sent once, by the front end that supervises the engine: load the repository."""

    config: bytes
    """An encoded `ServeConfig`."""
    before: list[ModelEntry] | None = None
    """After a restart, the previous process's catalog, whose READY models are to be served again; None at first."""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The client no longer wants an answer. The request is still answered, by `Answer` or `Failed`."""

    number: int


class Settle(msgspec.Struct, frozen=True, tag="settle"):
    """A request of a sequence has ended. Its state counts if its answer was `kept`: none failed after the execution."""

    number: int
    kept: bool


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
    model: ModelKey | None = None
    """Report this model's counters only, and nothing of the device."""


class CountRejection(msgspec.Struct, frozen=True, tag="rejected"):
    """A front end refused requests before the engine saw them."""

    model: ModelKey
    reason: str
    count: int


class EndSequence(msgspec.Struct, frozen=True, tag="end_sequence"):
    """A sequence has no further requests. A `spare` one is kept until its memory is needed, as others' prefix."""

    model: ModelKey
    sequence: SequenceId
    spare: bool = False


class ChangeLog(msgspec.Struct, frozen=True, tag="log"):
    """New log settings: the fields of `LogSettings`."""

    settings: dict[str, Any]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process after the current execution."""


ToEngine = (
    Start
    | Request
    | Cancel
    | Settle
    | LoadModel
    | UnloadModel
    | AskReport
    | CountRejection
    | EndSequence
    | ChangeLog
    | Stop
)


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


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A request, a load or an unload has failed."""

    id: int
    """The request's number, or the operation's id: they do not overlap."""
    error: WireError


class Done(msgspec.Struct, frozen=True, tag="done"):
    """A load, an unload or a report has succeeded."""

    id: int
    report: EngineReport | None = None


class Traced(msgspec.Struct, frozen=True, tag="traced"):
    """Spans of a traced request, sent after its answer, perhaps in several messages."""

    number: int
    spans: list[DeviceSpan]


ToFrontend = EntryChanged | Progress | Started | StartRefused | Answer | Failed | Done | Traced

LENGTH_BYTES = 4


def encoder(shared: SharedMemory) -> Callable[[ToEngine | ToFrontend], bytes]:
    """Return a function that encodes a message, prefixed with its length."""
    encode_into = msgspec.msgpack.Encoder(enc_hook=shared.place_of).encode_into

    def encode(message: ToEngine | ToFrontend) -> bytes:
        buffer = bytearray(LENGTH_BYTES)
        encode_into(message, buffer, LENGTH_BYTES)
        buffer[:LENGTH_BYTES] = (len(buffer) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little")
        return bytes(buffer)

    return encode


def decoder_to_engine(shared: SharedMemory) -> Callable[[memoryview], ToEngine]:
    """Return a function that decodes a message to the engine, without its length."""
    decode: Callable[[memoryview], ToEngine] = msgspec.msgpack.Decoder(ToEngine, dec_hook=shared.array_at).decode
    return decode


def decoder_to_frontend(shared: SharedMemory) -> Callable[[memoryview], ToFrontend]:
    """Return a function that decodes a message to a front end, without its length."""
    decode: Callable[[memoryview], ToFrontend] = msgspec.msgpack.Decoder(
        ToFrontend, dec_hook=shared.array_at
    ).decode
    return decode
