"""Counts and durations per model, as Triton's statistics and metrics report them.

Each counter is written by one thread: `cancelled` and `rejected` by the event loop, the others by the engine. A reader
may see a request half counted, which the next reading mends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server import errors
from server.engine.histogram import Histogram
from server.model import Execution

FailureReason = Literal["REJECTED", "CANCELED", "BACKEND", "OTHER"]

REJECTIONS: Mapping[type[errors.RequestError], str] = {
    errors.QueueFull: "queue_full",
    errors.RateLimited: "rate_limited",
    errors.RequestTimedOut: "deadline",
    errors.ShuttingDown: "draining",
    errors.DeviceLost: "device_lost",
}
"""Why a request is refused that could be answered at another time."""

_RESPONSE_BOUNDS_MS = (100.0, 500.0, 2000.0, 5000.0)
"""Triton's."""


@dataclass(slots=True)
class Total:
    """How often something happened, and how long it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, seconds: float, count: int = 1) -> None:
        """Note something that happened, or that happened `count` times and took so long in all."""
        self.count += count
        self.ns += round(seconds * 1e9)


@dataclass(slots=True)
class Parts:
    """What executions of one batch size took, whatever number of requests they answered."""

    prepare: Total = field(default_factory=Total)
    compute: Total = field(default_factory=Total)
    output: Total = field(default_factory=Total)


@dataclass(slots=True)
class ModelStatistics:
    success: Total = field(default_factory=Total)
    fail: Total = field(default_factory=Total)
    queue: Total = field(default_factory=Total)
    prepare: Total = field(default_factory=Total)
    """From leaving the queue until the model computes: Triton's compute_input."""
    compute: Total = field(default_factory=Total)
    output: Total = field(default_factory=Total)
    """From there being outputs until each request has its own: Triton's compute_output."""
    batches: dict[int, Parts] = field(default_factory=dict)
    """Executions by batch size."""
    execution_count: int = 0
    inference_count: int = 0
    """Samples: a request of batch 8 counts 8."""
    last_inference_ms: int = 0
    """Milliseconds since the epoch; 0 before the first."""
    stall_s: float = 0.0
    swapped_bytes: int = 0
    prefetch_hits: int = 0
    queue_s: Histogram = field(default_factory=Histogram)
    compute_s: Histogram = field(default_factory=Histogram)
    """Of executions, whatever number of requests they answer."""
    response_ms: Histogram = field(default_factory=lambda: Histogram(_RESPONSE_BOUNDS_MS))
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    )

    rejections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTIONS.values(), 0))

    def executed(
        self, rows: int, execution: Execution, busy_s: float, queued_s: Sequence[float], wall_ms: int
    ) -> None:
        """Count an execution that kept the device busy for `busy_s`, and its answers.

        Each of their requests had waited for what `queued_s` has of it.
        """
        self.execution_count += 1
        self.inference_count += rows
        self.last_inference_ms = wall_ms
        parts = self.batches.get(rows) or self.batches.setdefault(rows, Parts())
        prepare_s = max(0.0, busy_s - execution.compute_s - execution.output_s)
        count = len(queued_s)
        for own, of_batch, seconds in (
            (self.prepare, parts.prepare, prepare_s),
            (self.compute, parts.compute, execution.compute_s),
            (self.output, parts.output, execution.output_s),
        ):
            own.add(count * seconds, count)
            of_batch.add(seconds)
        self.queue.add(sum(queued_s), count)
        self.success.add(sum(queued_s) + count * busy_s, count)
        for queue_s in queued_s:
            self.queue_s.add(queue_s)
            self.response_ms.add((queue_s + busy_s) * 1e3)
        self.stall_s += execution.stall_s
        self.swapped_bytes += execution.swapped_bytes
        self.prefetch_hits += execution.prefetched
        self.compute_s.add(execution.compute_s)

    def failed(self, reason: FailureReason, seconds: float) -> None:
        self.fail.add(seconds)
        self.failures[reason] += 1

    def rejected(self, error: errors.RequestError) -> None:
        """Count a request that was refused, if it was for a reason that passes. Event loop's thread."""
        reason = REJECTIONS.get(type(error))
        if reason is not None:
            self.rejections[reason] += 1

    def cancelled(self) -> None:
        self.failures["CANCELED"] += 1
