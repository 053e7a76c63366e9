"""Reads a model's queueing policy from its ModelConfig."""

from collections.abc import Collection

from cohabit.server.config.values import integer, rate
from cohabit.server.errors import RepositoryError
from cohabit.server.scheduling.policy import LevelPolicy, Policy
from cohabit.server.triton.config_fields import parameter_of
from cohabit.server.triton.config_messages import ModelConfig, ModelDynamicBatching, ModelQueuePolicy

CONCURRENCY, RATE, BURST = "max_concurrency", "max_requests_per_second", "max_burst"
"""Keys of `parameters` in a ModelConfig, for settings without a field."""

_MOST_LEVELS = 1024
_count = integer(1, 1 << 20)


def policy_of(config: ModelConfig) -> Policy:
    """Read a policy. Raises RepositoryError, naming the field, for contradictory values."""
    batching = config.dynamic_batching
    sequences = config.sequence_batching
    delays_us = (s.max_queue_delay_microseconds for s in (batching, sequences.direct, sequences.oldest))
    levels, default_level = _levels(batching)
    default = _level_policy(batching.default_queue_policy)
    rate_per_s = parameter_of(config, RATE, rate)
    return Policy(
        levels=levels,
        default_level=default_level,
        default=default,
        by_level=_by_level(batching, levels),
        preferred_batches=_preferred(
            {*batching.preferred_batch_size, *sequences.oldest.preferred_batch_size}, config.max_batch_size
        ),
        batch_delay_s=max(delays_us) / 1e6,
        keeps_order=batching.preserve_ordering or sequences.oldest.preserve_ordering,
        concurrency=parameter_of(config, CONCURRENCY, _count),
        rate_per_s=rate_per_s,
        burst=parameter_of(config, BURST, _count) or max(1, round(rate_per_s or 0.0)),
    )


def _levels(batching: ModelDynamicBatching) -> tuple[int, int]:
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > _MOST_LEVELS:
        raise RepositoryError(f"config.pbtxt: priority_levels is {levels}, the most is {_MOST_LEVELS}")
    if levels == 0:
        if default or batching.priority_queue_policy:
            raise RepositoryError(
                "config.pbtxt: there are priorities, but priority_levels is 0; say how many there are"
            )
        return 1, 1
    if not 1 <= default <= levels:
        raise RepositoryError(f"config.pbtxt: default_priority_level is {default}, it must be from 1 to {levels}")
    if batching.preserve_ordering and levels > 1:
        raise RepositoryError("config.pbtxt: preserve_ordering leaves nothing for priority_levels to do; drop one")
    return levels, default


def _by_level(batching: ModelDynamicBatching, levels: int) -> dict[int, LevelPolicy]:
    policies = {level: _level_policy(policy) for level, policy in batching.priority_queue_policy.items()}
    for level in policies:
        if not 1 <= level <= levels:
            raise RepositoryError(
                f"config.pbtxt: priority_queue_policy has level {level}, the last one is {levels}"
            )
    delays = any(p.delays_late for p in (*policies.values(), _level_policy(batching.default_queue_policy)))
    if batching.preserve_ordering and delays:
        raise RepositoryError("config.pbtxt: timeout_action DELAY changes the order that preserve_ordering keeps")
    return policies


def _level_policy(policy: ModelQueuePolicy) -> LevelPolicy:
    timeout_us = policy.default_timeout_microseconds
    return LevelPolicy(
        limit=policy.max_queue_size or None,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        timeout_may_shorten=policy.allow_timeout_override or not timeout_us,
        delays_late=policy.timeout_action == ModelQueuePolicy.DELAY,
    )


def _preferred(given: Collection[int], max_batch: int) -> tuple[int, ...]:
    sizes = tuple(sorted(given))
    for size in sizes:
        if size < 1 or (max_batch and size > max_batch):
            raise RepositoryError(
                f"config.pbtxt: preferred_batch_size has {size}, it must be from 1 to max_batch_size {max_batch}"
            )
    return sizes
