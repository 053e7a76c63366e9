"""Timelines: when each step ran, simulated or measured."""

import msgspec

from cohabit.planner.plan import Lane


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step on its lane. Times in seconds from the start of the inference."""

    step: int
    lane: Lane
    start_s: float
    end_s: float


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All spans of one inference, in step order; from the simulator or from a device."""

    spans: tuple[Span, ...]
    latency_s: float
    """End of the last compute step."""
    period_s: float | None
    """Time from one inference's start to the next when they run back to back; None if not determined."""
    link_bytes: int
    """Bytes copied in either direction, epilogue included."""
