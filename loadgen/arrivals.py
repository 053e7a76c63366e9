"""Arrival times and models of all requests, drawn from a seed before the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class RequestArrival:
    at_s: float
    """Intended send time, from the start of the run."""
    model: str


def draw_arrivals(
    rate_per_s: float, duration_s: float, weights: Mapping[str, float], seed: int
) -> tuple[RequestArrival, ...]:
    """Draw a Poisson process: exponential gaps, each arrival for a model chosen in proportion to its weight.

    Times do not depend on the models, so runs with different models have the same times.
    """
    times_seed, models_seed = np.random.SeedSequence(seed).spawn(2)
    times_s = _times(np.random.default_rng(times_seed), rate_per_s, duration_s)
    shares = np.array(list(weights.values()), dtype=np.float64)
    choices = np.random.default_rng(models_seed).choice(len(shares), size=len(times_s), p=shares / shares.sum())
    names = list(weights)
    return tuple(RequestArrival(t, names[k]) for t, k in zip(times_s, choices.tolist(), strict=True))


def zipf_weights(models: Sequence[str], exponent: float) -> dict[str, float]:
    """Weigh the k-th model by 1 / k**exponent; exponent 0 is uniform."""
    return {model: k**-exponent for k, model in enumerate(models, start=1)}


def _times(rng: np.random.Generator, rate_per_s: float, duration_s: float) -> list[float]:
    times_s: list[float] = []
    now_s = 0.0
    while True:
        for gap_s in rng.exponential(1 / rate_per_s, size=1024).tolist():
            now_s += gap_s
            if now_s >= duration_s:
                return times_s
            times_s.append(now_s)
