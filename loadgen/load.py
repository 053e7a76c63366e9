"""What load to send: rate, duration, models and limits. Importing this imports neither numpy nor a client."""

from collections.abc import Mapping

import msgspec


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run's load. The defaults are those of the command line."""

    rate_per_s: float = 300.0
    duration_s: float = 20.0
    warmup_s: float = 2.0
    """Requests before the measured ones."""
    model_count: int | None = None
    """Take the first so many ready models; None for all."""
    weights: Mapping[str, float] = {}
    """Models by name with their weights; empty to take those that the server has ready."""
    zipf: float = 0.0
    """Without `weights`, the k-th model has the weight 1 / k**zipf."""
    seed: int = 0
    batch: int = 1
    slo_s: float = 0.1
    """Latency that goodput counts up to."""
    timeout_s: float = 30.0
    max_in_flight: int = 10_000
