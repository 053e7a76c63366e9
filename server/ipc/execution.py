"""The outcome of one execution: output arrays, timing, and spans of the device's lanes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from cohabit.server.ipc.model import Array


class ExecutionTiming(msgspec.Struct, frozen=True):
    """When one request was executed, and its cost. Times are those of `time.monotonic`, common to all processes."""

    queued_s: float
    """When the request entered the scheduler's queue."""
    started_s: float
    busy_s: float
    """How long its execution occupied the compute lane."""
    compute_s: float
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


class DeviceSpan(msgspec.Struct, frozen=True):
    """One step on one of the device's lanes. Times are those of `time.monotonic`."""

    model: str
    lane: Literal["compute", "swap_in", "swap_out"]
    name: str
    """The name of the op, or of the copied tensor."""
    start_s: float
    end_s: float
    nbytes: int = 0
    stalled: bool = False
    """Whether the span is a stall of the op, which waited for parameters."""
    compute_lane: int = 0
    """The compute lane that executed the request."""


OnSpans = Callable[[Sequence[DeviceSpan]], None]
"""Receives the spans of one execution after its last copy. Any thread."""


class InferResult(msgspec.Struct, frozen=True, eq=False):
    """The outputs of one request by name, and its timing."""

    outputs: Mapping[str, Array]
    timing: ExecutionTiming
