"""Counts and durations per model, as Triton's statistics and metrics report them.

Each counter is written by one thread: `cancelled` and `rejected` by the event loop, the others by the engine. A reader
may see a request half counted, which the next reading mends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server import errors
from server.engine.histogram import Histogram
from server.protocol.model import Execution

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


@dataclass(frozen=True, slots=True)
class Total:
    """How often something happened, and how long it took in all."""

    count: int
    seconds: float

    @property
    def ns(self) -> int:
        return round(self.seconds * 1e9)


@dataclass(slots=True)
class Parts:
    """What a number of requests, or of executions, took."""

    count: int = 0
    prepare_s: float = 0.0
    compute_s: float = 0.0
    output_s: float = 0.0

    @property
    def prepare(self) -> Total:
        """From leaving the queue until the model computes: Triton's compute_input."""
        return Total(self.count, self.prepare_s)

    @property
    def compute(self) -> Total:
        return Total(self.count, self.compute_s)

    @property
    def output(self) -> Total:
        """From there being outputs until each request has its own: Triton's compute_output."""
        return Total(self.count, self.output_s)


@dataclass(slots=True)
class ModelStatistics:
    answered: Parts = field(default_factory=Parts)
    """Of requests that were answered."""
    queue_s: float = 0.0
    success_s: float = 0.0
    failed_count: int = 0
    failed_s: float = 0.0
    batches: dict[int, Parts] = field(default_factory=dict)
    """Executions by batch size."""
    execution_count: int = 0
    inference_count: int = 0
    """Samples: a request of batch 8 counts 8."""
    last_inference_s: float = 0.0
    """Since the epoch; 0 before the first."""
    stall_s: float = 0.0
    swapped_bytes: int = 0
    prefetch_hits: int = 0
    queued: Histogram = field(default_factory=Histogram)
    computed: Histogram = field(default_factory=Histogram)
    """Of executions, whatever number of requests they answer."""
    response_ms: Histogram = field(default_factory=lambda: Histogram(_RESPONSE_BOUNDS_MS))
    failures: dict[FailureReason, int] = field(
        default_factory=lambda: {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    )
    rejections: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REJECTIONS.values(), 0))

    @property
    def success(self) -> Total:
        return Total(self.answered.count, self.success_s)

    @property
    def fail(self) -> Total:
        return Total(self.failed_count, self.failed_s)

    @property
    def queue(self) -> Total:
        return Total(self.answered.count, self.queue_s)

    def executed(
        self, rows: int, execution: Execution, busy_s: float, queued_s: Sequence[float], wall_s: float
    ) -> None:
        """Count an execution that kept the device busy for `busy_s`, and its answers.

        Each of their requests had waited for what `queued_s` has of it.
        """
        compute_s, output_s, count = execution.compute_s, execution.output_s, len(queued_s)
        prepare_s = max(0.0, busy_s - compute_s - output_s)
        self.execution_count += 1
        self.inference_count += rows
        self.last_inference_s = wall_s
        parts = self.batches.get(rows) or self.batches.setdefault(rows, Parts())
        parts.count += 1
        parts.prepare_s += prepare_s
        parts.compute_s += compute_s
        parts.output_s += output_s
        answered = self.answered
        answered.count += count
        answered.prepare_s += count * prepare_s
        answered.compute_s += count * compute_s
        answered.output_s += count * output_s
        waited_s = sum(queued_s)
        self.queue_s += waited_s
        self.success_s += waited_s + count * busy_s
        for queue_s in queued_s:
            self.queued.add(queue_s)
            self.response_ms.add((queue_s + busy_s) * 1e3)
        self.stall_s += execution.stall_s
        self.swapped_bytes += execution.swapped_bytes
        self.prefetch_hits += execution.prefetched
        self.computed.add(compute_s)

    def failed(self, reason: FailureReason, seconds: float) -> None:
        self.failed_count += 1
        self.failed_s += seconds
        self.failures[reason] += 1

    def rejected(self, error: errors.RequestError) -> None:
        """Count a request that was refused, if it was for a reason that passes. Event loop's thread."""
        reason = REJECTIONS.get(type(error))
        if reason is not None:
            self.rejections[reason] += 1

    def cancelled(self) -> None:
        self.failures["CANCELED"] += 1
