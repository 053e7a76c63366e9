"""Several runs on one server: at given rates, or in search of the highest rate that meets the SLO."""

from collections.abc import Awaitable, Callable, Sequence

from cohabit.loadgen.report import Report

Measure = Callable[[float], Awaitable[Report]]
"""Run the load at a rate (requests per second)."""

PRECISION = 0.05
"""Relative width of the interval between a rate that meets the SLO and one that does not, at the end of the search."""
_DOUBLINGS = 10


async def sweep(measure: Measure, rates: Sequence[float]) -> list[Report]:
    """Measure every rate, in order; end after a run that was interrupted."""
    reports: list[Report] = []
    for rate in rates:
        reports.append(await measure(rate))
        if reports[-1].interrupted:
            break
    return reports


async def find_rate(
    measure: Measure, start_per_s: float, progress: Callable[[Report], None]
) -> tuple[float | None, list[Report]]:
    """Return the highest rate that meets the SLO, or None, and the reports of all runs.

    The rate is doubled or halved from `start_per_s` until one meets the SLO and one misses it, and then bisected.
    A run whose generator was late counts as a miss: a rate that cannot be sent cannot be claimed.
    """
    reports: list[Report] = []

    async def is_met(rate: float) -> bool:
        reports.append(await measure(rate))
        progress(reports[-1])
        return reports[-1].meets_slo and not reports[-1].generator_was_late

    low: float | None = None
    high: float | None = None
    rate = start_per_s
    for _ in range(_DOUBLINGS):
        if await is_met(rate):
            low, rate = rate, rate * 2
        else:
            high, rate = rate, rate / 2
        if reports[-1].interrupted or (low is not None and high is not None):
            break
    while low is not None and high is not None and high / low > 1 + PRECISION and not reports[-1].interrupted:
        middle = (low * high) ** 0.5
        if await is_met(middle):
            low = middle
        else:
            high = middle
    return low, reports
