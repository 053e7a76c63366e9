"""Counts and durations per model, as Triton's statistics and metrics report them.

Each counter is written by one thread: `cancelled` and `rejected` by the event loop, the others by the compute lane's. A
reader may see a partly counted request; the next read is complete.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from cohabit.planner.shapes import Bucket
from cohabit.server.ipc.model import DeviceUse, GraphCapture, ModelKey
from cohabit.server.ipc.request import Timing

FailureReason = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]

REJECTIONS: Mapping[str, str] = {
    "QueueFull": "queue_full",
    "LevelFull": "queue_full",
    "RateLimited": "rate_limited",
    "RequestTimedOut": "deadline",
    "ShuttingDown": "draining",
    "DeviceUnavailable": "device_lost",
}
"""Reasons of refusals after which a retry can succeed, by `RequestError.kind`."""

INVALID = "invalid"
"""Reason for requests that do not fit their model, by shape, datatype or otherwise."""

SECONDS = (*(round(base * 10.0**power, 6) for power in range(-4, 1) for base in (1.0, 1.8, 3.2, 5.6)), 10.0)
"""A hundred microseconds to ten seconds, four bounds per decade."""
REQUEST_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Bounds of latencies for service level objectives: round numbers from a millisecond to ten seconds."""
_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's bounds."""


class Histogram(msgspec.Struct):
    """A histogram with cumulative buckets, as Prometheus defines it. Written by one thread.

    A reader may see the newest value in a bucket before it is in the sum.
    """

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    @classmethod
    def of(cls, bounds: tuple[float, ...]) -> "Histogram":
        return cls(bounds, [0] * (len(bounds) + 1))

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Yield the label `le` and the number of values up to each bound; the last one counts all."""
        total = 0
        for bound, count in zip((*(f"{b:g}" for b in self.bounds), "+Inf"), list(self.counts), strict=True):
            total += count
            yield bound, total


class StageTimes(msgspec.Struct):
    """Seconds by stage, summed over `count` requests or executions."""

    count: int = 0
    prepare_s: float = 0.0
    """From dispatch to the first op: Triton's compute_input."""
    compute_s: float = 0.0
    output_s: float = 0.0
    """From the existence of outputs until each request has its own: Triton's compute_output."""

    def add(self, count: int, prepare_s: float, compute_s: float, output_s: float) -> None:
        self.count += count
        self.prepare_s += prepare_s
        self.compute_s += compute_s
        self.output_s += output_s


class ModelStatistics(msgspec.Struct):
    """Counters of one version of a model, since it was loaded into this engine."""

    answered: StageTimes = msgspec.field(default_factory=StageTimes)
    """Stage times of answered requests."""
    queue_s: float = 0.0
    success_s: float = 0.0
    failed_count: int = 0
    failed_s: float = 0.0
    batches: dict[int, StageTimes] = msgspec.field(default_factory=dict)
    """Executions by batch size."""
    execution_count: int = 0
    inference_count: int = 0
    """Samples: a request of batch 8 counts 8."""
    last_inference_s: float = 0.0
    """Since the epoch; 0 before the first."""
    stall_s: float = 0.0
    swapped_bytes: int = 0
    queued: Histogram = msgspec.field(default_factory=lambda: Histogram.of(SECONDS))
    computed: Histogram = msgspec.field(default_factory=lambda: Histogram.of(SECONDS))
    """Compute times, one per execution."""
    response_ms: Histogram = msgspec.field(default_factory=lambda: Histogram.of(_RESPONSE_BOUNDS_MS))
    failures: dict[FailureReason, int] = msgspec.field(
        default_factory=lambda: {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    )
    rejections: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys((*REJECTIONS.values(), INVALID), 0)
    )

    def executed(self, timings: Sequence[Timing], wall_s: float) -> None:
        """Count an execution that ended at `wall_s`. `timings` has one entry per request."""
        t, count = timings[0], len(timings)
        prepare_s = max(0.0, t.busy_s - t.compute_s - t.output_s)
        self.execution_count += 1
        self.inference_count += t.rows
        self.last_inference_s = wall_s
        self.batches.setdefault(t.rows, StageTimes()).add(1, prepare_s, t.compute_s, t.output_s)
        self.answered.add(count, count * prepare_s, count * t.compute_s, count * t.output_s)
        queued_s = [timing.started_s - timing.queued_s for timing in timings]
        self.queue_s += sum(queued_s)
        self.success_s += sum(queued_s) + count * t.busy_s
        for queue_s in queued_s:
            self.queued.add(queue_s)
            self.response_ms.add((queue_s + t.busy_s) * 1e3)
        self.stall_s += t.stall_s
        self.swapped_bytes += t.swapped_bytes
        self.computed.add(t.compute_s)

    def failed(self, reason: FailureReason, seconds: float) -> None:
        self.failed_count += 1
        self.failed_s += seconds
        self.failures[reason] += 1

    def rejected(self, reason: str, count: int = 1) -> None:
        """Count requests that were refused for one of the reasons in `REJECTIONS`, or as `INVALID`."""
        self.rejections[reason] += count

    def cancelled(self) -> None:
        self.failures["CANCELED"] += 1


class ModelCounters(msgspec.Struct):
    """Counters and state of one READY model."""

    statistics: ModelStatistics
    pending: int = 0
    """Requests in the queue."""
    correction: float = 1.0
    """Measured over predicted seconds of recent executions."""
    captures: dict[Bucket, GraphCapture] = {}
    """How executions are issued on a device with graphs."""
    sequences: int = 0
    """Sequences whose states are kept."""
    state_bytes: int = 0


class EngineReport(msgspec.Struct):
    """The engine's counters at one moment."""

    models: dict[ModelKey, ModelCounters] = {}
    device: DeviceUse = DeviceUse()
