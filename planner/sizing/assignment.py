"""Assigns models to engines by the sizes of their weights and their request rates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelTraffic:
    """Size of a model's weights, and its request rate in one engine."""

    name: str
    weight_bytes: int
    rate_per_s: float


Assignment = tuple[tuple[ModelTraffic, ...], ...]
"""Models of each engine. A model with several copies has an equal part of its rate in each."""


def load_bytes_per_s(models: Sequence[ModelTraffic], memory_bytes: int) -> float:
    """Return the bytes that an engine reads and copies per second: a proxy for time before models are measured.

    An inference reads all weights once, and copies those that are not resident. Models with the highest rates become
    resident first, which minimises the copies.
    """
    load = 0.0
    left = memory_bytes
    for model in sorted(models, key=lambda m: -m.rate_per_s):
        resident = min(model.weight_bytes, left)
        left -= resident
        load += model.rate_per_s * (2 * model.weight_bytes - resident)
    return load


def assign(models: Sequence[ModelTraffic], engines: int, memory_bytes: int, copies: int = 1) -> Assignment:
    """Assign every model to at least one engine of `memory_bytes` each, so that the largest load is small.

    A model with a rate above the mean has at least `copies`. Models with more than an even part of the total load are
    split further if that lowers the largest load. No engine has two copies of one model.
    """
    assert engines >= 1
    traffic = [model.rate_per_s * model.weight_bytes for model in models]
    mean_rate = sum(model.rate_per_s for model in models) / max(len(models), 1)
    least = [min(engines, max(copies, 1)) if model.rate_per_s > mean_rate else 1 for model in models]
    even = max(sum(traffic) / engines, 1e-9)
    split = [min(engines, max(n, math.ceil(t / even * (1 - 1e-9)))) for n, t in zip(least, traffic, strict=True)]
    assignments = [_greedy(models, counts, engines, memory_bytes) for counts in (least, split)]
    return min(assignments, key=lambda a: max(load_bytes_per_s(held, memory_bytes) for held in a))


def _greedy(models: Sequence[ModelTraffic], counts: Sequence[int], engines: int, memory_bytes: int) -> Assignment:
    """Place `counts` copies of each model, largest load first, on the engines with the least resulting load."""
    parts = [replace(m, rate_per_s=m.rate_per_s / n) for m, n in zip(models, counts, strict=True)]
    held: list[list[ModelTraffic]] = [[] for _ in range(engines)]
    for i in sorted(range(len(parts)), key=lambda i: -parts[i].rate_per_s * parts[i].weight_bytes):
        with_it = [load_bytes_per_s([*models_of, parts[i]], memory_bytes) for models_of in held]
        for engine in sorted(range(engines), key=lambda e: (with_it[e], len(held[e])))[: counts[i]]:
            held[engine].append(parts[i])
    return tuple(tuple(models_of) for models_of in held)
