"""The outcome of one execution: output arrays, where the time went, and what the device's lanes did."""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from server.ipc.model import Array


class ExecutionTiming(msgspec.Struct, frozen=True):
    """When one request was executed, and its cost. Times are those of `time.monotonic`, common to all processes."""

    queued_s: float
    """When the request entered the scheduler's queue."""
    started_s: float
    busy_s: float
    """How long its execution kept the compute lane."""
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
    """Of the op, of the first and last op of a segment, or of the tensor that was copied."""
    start_s: float
    end_s: float
    nbytes: int = 0
    stalled: bool = False
    """The op did not run yet: it waited for parameters."""
    ahead: bool = False
    """A copy that began before its own execution did."""
    ops: int = 1
    """How many ops ran as one segment."""
    compute_lane: int = 0
    """The compute lane that executed the request."""


OnSpans = Callable[[Sequence[DeviceSpan]], None]
"""Receives what the lanes did for one execution, some time after its last copy. Any thread."""


class InferResult(msgspec.Struct, frozen=True, eq=False):
    """The outputs of one request by name, and its timing."""

    outputs: Mapping[str, Array]
    timing: ExecutionTiming
