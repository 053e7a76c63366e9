"""Measurements in turns: what else the machine does falls on all contestants, and ratios hold within a round."""

import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

LIKELY = 0.95
"""How often the interval contains the mean ratio, if turns were drawn again."""
DRAWS = 10_000

K = TypeVar("K")
R = TypeVar("R")


def turns(contestants: Collection[K], rounds: int) -> Iterator[tuple[int, K]]:
    """Yield every contestant once per round, with the round's number. Each round begins with the next one."""
    ordered = list(contestants)
    for number in range(rounds):
        first = number % len(ordered)
        for contestant in ordered[first:] + ordered[:first]:
            yield number, contestant


def in_turns(ways: Mapping[K, Callable[[], R]], rounds: int) -> dict[K, list[R]]:
    """Call every way once per round. Returns what each call returned, by way and round."""
    found: dict[K, list[R]] = {way: [] for way in ways}
    for _, way in turns(ways, rounds):
        found[way].append(ways[way]())
    return found


def seconds_of(call: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of the fastest of several calls."""
    fastest_s = float("inf")
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        fastest_s = min(fastest_s, time.perf_counter() - start_s)
    return fastest_s


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Of one over the other, from round to round."""

    low: float
    middle: float
    high: float

    @classmethod
    def of_ratios(cls, ones: Sequence[float], others: Sequence[float]) -> "Quartiles":
        """Divide the figures of the same rounds."""
        ratios = [one / other for one, other in zip(ones, others, strict=True)]
        return cls(*statistics.quantiles(ratios, n=4)) if len(ratios) > 1 else cls(*ratios * 3)

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f}-{self.high:.2f})"


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
