"""How a model's requests queue: priority levels, timeouts, batching, limits. What config.pbtxt says of it, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LevelPolicy:
    """What holds for the requests of one priority level."""

    limit: int | None = None
    """How many may wait; None leaves it to the server's bound per model."""
    timeout_s: float | None = None
    """How long a request may take that says nothing itself; None is for ever."""
    timeout_may_shorten: bool = True
    """Whether a request may ask for less than `timeout_s`."""
    delays_late: bool = False
    """Whether a late request goes behind all others, instead of being refused."""

    def timeout_of(self, asked_s: float | None) -> float | None:
        """The timeout of a request that asks for one, or for none."""
        if self.timeout_s is None:
            return asked_s
        if asked_s is None or not self.timeout_may_shorten:
            return self.timeout_s
        return min(asked_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Policy:
    """What holds for one model. Without a config: one level, no timeout, batches without waiting for them."""

    levels: int = 1
    default_level: int = 1
    """Of requests that have no priority, or one that there is no level for. 1 is the most urgent."""
    default: LevelPolicy = LevelPolicy()
    by_level: Mapping[int, LevelPolicy] = field(default_factory=dict)
    preferred_batches: tuple[int, ...] = ()
    """Sizes to put requests together in as soon as they are reached; none leaves it to what pays."""
    batch_delay_s: float = 0.0
    """How long a request may be kept back for others to join it."""
    concurrency: int | None = None
    """Most requests that may wait and run at once."""
    rate_per_s: float | None = None
    """Most requests per second, in the long run."""
    burst: int = 1
    """Most requests at one instant, where there is a rate."""

    def level_of(self, priority: int | None) -> int:
        return priority if priority is not None and 1 <= priority <= self.levels else self.default_level

    def of_level(self, level: int) -> LevelPolicy:
        return self.by_level.get(level, self.default)
