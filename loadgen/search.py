"""Several runs on one server: at given rates, or searching for the highest rate that meets the SLO."""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from cohabit.loadgen.report import Report

Measure = Callable[[float], Awaitable[Report]]
"""Runs the load at a rate (requests per second)."""

PRECISION = 0.05
"""Relative distance, at the end of the search, between a rate that meets the SLO and one that misses it."""
_DOUBLINGS = 10


async def sweep(measure: Measure, rates: Sequence[float]) -> list[Report]:
    """Measure every rate, in order. Stops after an interrupted run."""
    reports: list[Report] = []
    for rate in rates:
        reports.append(await measure(rate))
        if reports[-1].interrupted:
            break
    return reports


@dataclass(frozen=True, slots=True)
class FoundRate:
    """Result of a search."""

    rate_per_s: float | None
    """Highest measured rate that met the SLO; None if none did."""
    reports: list[Report]
    stopped: str | None = None
    """Why the search ended before reaching `PRECISION`; None if it did not."""


async def find_rate(measure: Measure, start_per_s: float, progress: Callable[[Report], None]) -> FoundRate:
    """Search for the highest rate that meets the SLO.

    The rate is doubled or halved from `start_per_s` until one rate meets the SLO and one misses it, then bisected. An
    inconclusive run ends the search: it was interrupted, its generator was late, or it had too few requests.
    """
    reports: list[Report] = []
    low: float | None = None
    high: float | None = None
    rate = start_per_s
    while low is None or high is None or high / low > 1 + PRECISION:
        if (low is None or high is None) and len(reports) == _DOUBLINGS:
            return FoundRate(low, reports, f"{_DOUBLINGS} rates from {start_per_s:g}/s on all did alike")
        reports.append(await measure(rate))
        progress(reports[-1])
        if (why := _says_nothing(reports[-1])) is not None:
            return FoundRate(low, reports, why)
        if reports[-1].meets_slo:
            low = rate
        else:
            high = rate
        rate = _following(rate, low, high)
    return FoundRate(low, reports)


def _following(rate: float, low: float | None, high: float | None) -> float:
    """Return the rate to measure after `rate`. At least one bound is known."""
    if low is None:
        return rate / 2
    return rate * 2 if high is None else (low * high) ** 0.5


def _says_nothing(report: Report) -> str | None:
    """Return why a run is inconclusive; None if it is not."""
    rate = f"{report.rate_per_s:.4g}/s"
    if report.interrupted:
        return "interrupted"
    if report.generator_was_late:
        return f"at {rate} the generator was late; give it more CPU or --processes"
    due, percentile = report.due, report.slo_percentile or 0.0
    needed = math.ceil(1 / max(1 - percentile / 100, 1e-9)) if percentile else 1
    if due < needed:
        return (
            f"at {rate} a run has {due} requests, of which one alone decides about {percentile:g} %; give"
            f" --duration {math.ceil(1.2 * needed / report.rate_per_s)}"
        )
    return None
