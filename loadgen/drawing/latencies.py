"""Latencies of runs: the curves to draw, and differences of two runs."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from cohabit.loadgen.report import Report

LIKELY = 0.95
"""Confidence level of the intervals of differences."""
_DRAWS = 1000
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_CDF_POINTS = 200

Series = Mapping[str, Sequence[Report]]
"""Runs by file name. The others are compared with the first."""


class LatencyCurves(msgspec.Struct, frozen=True):
    """A run's latencies in milliseconds."""

    run: Report
    cdf: list[tuple[float, float]]
    """Latencies, and the share of due requests answered within each."""
    timeline: list[tuple[float, float | None, float | None]]
    """Start in seconds of each interval, p50 and p99; None without answers."""


def latency_curves(report: Report) -> LatencyCurves:
    counts = _counts(report)
    values_ms, totals = counts.values_s * 1e3, counts.by_interval.sum(axis=0)
    shares = np.cumsum(totals) / max(1, report.due)
    steps = np.unique(
        np.searchsorted(shares, 1 - np.geomspace(1, 1 / max(2, report.due), _CDF_POINTS)).clip(0, len(shares) - 1)
    )
    return LatencyCurves(
        report,
        [(float(values_ms[k]), float(shares[k])) for k in steps] if len(values_ms) else [],
        [
            (interval.start_s, *_p50_and_p99(row, values_ms))
            for interval, row in zip(report.intervals, counts.by_interval, strict=True)
        ],
    )


class LatencyCounts(msgspec.Struct, frozen=True):
    """Histogram of latencies per interval of the run."""

    values_s: NDArray[np.float64]
    """Ascending; shape [values]."""
    by_interval: NDArray[np.int64]
    """Shape [intervals, values]."""


@functools.lru_cache(maxsize=256)
def _decoded(histogram: str) -> Mapping[int, int]:
    """Return the counts by latency in nanoseconds."""
    decoded = HdrHistogram.decode(histogram)
    counts = np.array(decoded.counts[: decoded.counts_len])
    return {decoded.get_value_from_index(int(k)): int(counts[k]) for k in np.flatnonzero(counts)}


def _counts(report: Report) -> LatencyCounts:
    decoded = [_decoded(interval.histogram) for interval in report.intervals]
    values = sorted(set().union(*decoded)) if decoded else []
    table = np.array([[counts.get(v, 0) for v in values] for counts in decoded], dtype=np.int64)
    return LatencyCounts(np.array(values) / 1e9, table.reshape(len(decoded), len(values)))


def _p50_and_p99(counts: NDArray[Any], values: NDArray[np.float64]) -> tuple[float | None, float | None]:
    """Return percentiles of counted values; None if there are no counts."""
    total = counts.sum()
    if not total:
        return None, None
    p50, p99 = np.searchsorted(np.cumsum(counts), np.array([0.5, 0.99]) * total - 1e-9)
    return float(values[min(p50, len(values) - 1)]), float(values[min(p99, len(values) - 1)])


class PercentileDifference(msgspec.Struct, frozen=True):
    """A percentile of two runs, and the bootstrap interval of its difference."""

    name: str
    first_s: float
    other_s: float
    low_s: float
    high_s: float
    undecided: str
    """Why the runs cannot be compared at this percentile; empty if they can."""

    @property
    def is_clear(self) -> bool:
        return not self.undecided and (self.low_s > 0 or self.high_s < 0)


def differences(first: Report, other: Report, seed: int = 0) -> list[PercentileDifference]:
    """Compare percentiles of two runs; none if one of them has no answers.

    The bootstrap draws intervals of the run with replacement, not requests: latencies of neighbours are correlated, so
    drawing requests would make the interval too narrow.
    """
    rng = np.random.default_rng(seed)
    drawn = [_resampled(_counts(report), rng) for report in (first, other)]
    samples = [sample for sample in drawn if sample is not None]
    exact = [report.latency for report in (first, other)]
    if len(samples) < 2 or exact[0] is None or exact[1] is None:
        return []
    count = min(map(len, samples))  # draws without any answer are left out
    lows_s, highs_s = np.quantile(
        samples[1][:count] - samples[0][:count], [(1 - LIKELY) / 2, (1 + LIKELY) / 2], axis=0
    ).tolist()
    rows = []
    for percentile, low_s, high_s in zip(_PERCENTILES, lows_s, highs_s, strict=True):
        name = f"p{percentile:g}"
        first_s, other_s = (getattr(spread, name.replace(".", "") + "_s") for spread in exact)
        rows.append(
            PercentileDifference(name, first_s, other_s, low_s, high_s, _undecided(first, other, percentile))
        )
    return rows


_LEAST_BEYOND = 10
"""Minimum requests of each run beyond a percentile for a meaningful interval."""


def _undecided(first: Report, other: Report, percentile: float) -> str:
    """Return why a percentile of two runs cannot be compared; empty if it can."""
    if first.generator_was_late or other.generator_was_late:
        return "a run is invalid"
    beyond = min(first.completed, other.completed) * (1 - percentile / 100)
    return "too few requests" if beyond < _LEAST_BEYOND - 1e-9 else ""


def _resampled(counts: LatencyCounts, rng: np.random.Generator) -> NDArray[np.float64] | None:
    """Return percentiles [draws, percentiles] of runs resampled from this one's intervals; None without latencies."""
    count = len(counts.by_interval)
    if not len(counts.values_s):
        return None
    drawn = rng.multinomial(count, [1 / count] * count, size=_DRAWS).astype(np.float64)
    sums = np.cumsum(drawn @ counts.by_interval.astype(np.float64), axis=1)
    sums = sums[sums[:, -1] > 0]
    columns = [(sums < p / 100 * sums[:, -1:] - 1e-9).sum(axis=1) for p in _PERCENTILES]
    sampled_s: NDArray[np.float64] = counts.values_s[np.stack(columns, axis=1)]
    return sampled_s
