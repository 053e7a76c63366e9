"""Steps of a device's lanes for a traced request."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec


class DeviceSpan(msgspec.Struct, frozen=True):
    """One step on one of the device's lanes. Times are by `time.monotonic`."""

    model: str
    lane: Literal["compute", "swap_in", "swap_out"]
    name: str
    """Name of the op, or of the copied tensor."""
    start_s: float
    end_s: float
    nbytes: int = 0
    stalled: bool = False
    """Whether the span is a stall of the op, which waited for parameters."""
    compute_lane: int = 0
    """The compute lane that executed the request."""


OnSpans = Callable[[Sequence[DeviceSpan]], None]
"""Receives the spans of one execution after its last copy. Any thread."""
