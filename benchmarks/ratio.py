"""Ratios of two things that were measured in turns, with an interval that says what chance may have done."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LIKELY = 0.95
"""How often the interval contains the mean ratio, if turns were drawn again."""
DRAWS = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """One over the other, from turn to turn."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: NDArray[np.float64]) -> "Ratio":
        """The geometric mean, and where it would be if other turns of the same kind were drawn (bootstrap)."""
        logs = np.log(ratios)
        drawn = np.random.default_rng(0).choice(logs, (DRAWS, len(logs))).mean(axis=1)
        low, high = np.exp(np.quantile(drawn, [(1 - LIKELY) / 2, (1 + LIKELY) / 2]))
        return cls(float(np.exp(logs.mean())), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} - {self.high:.3f})"
