"""A model's queueing policy from config.pbtxt, as data: priority levels, timeouts, batching, limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    limit: int | None = None
    """Maximum queue length; None for the server's limit per model."""
    timeout_s: float | None = None
    """Timeout of requests that have none of their own; None for no timeout."""
    timeout_may_shorten: bool = True
    """Whether a request may ask for less than `timeout_s`."""
    delays_late: bool = False
    """Whether a late request moves to the end of the queue instead of being refused."""

    def timeout_of(self, asked_s: float | None) -> float | None:
        """Return the timeout of a request that asks for `asked_s`, or for none."""
        if self.timeout_s is None:
            return asked_s
        if asked_s is None or not self.timeout_may_shorten:
            return self.timeout_s
        return min(asked_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of one model. Without a config: one level, no timeout, no batch delay."""

    levels: int = 1
    default_level: int = 1
    """Level of requests without a priority, or with one out of range. 1 is the most urgent."""
    default: LevelPolicy = LevelPolicy()
    by_level: Mapping[int, LevelPolicy] = field(default_factory=dict)
    preferred_batches: tuple[int, ...] = ()
    """Batch sizes that are dispatched as soon as they are reached; if empty, the estimates decide."""
    batch_delay_s: float = 0.0
    """Maximum delay of a request so that others can join its batch."""
    keeps_order: bool = False
    """Whether requests of a level keep their order."""
    concurrency: int | None = None
    """Maximum number of requests in flight."""
    rate_per_s: float | None = None
    """Maximum long-term rate of requests per second."""
    burst: int = 1
    """Capacity of the token bucket, if there is a rate."""

    def level_of(self, priority: int | None) -> int:
        return priority if priority is not None and 1 <= priority <= self.levels else self.default_level

    def of_level(self, level: int) -> LevelPolicy:
        return self.by_level.get(level, self.default)
