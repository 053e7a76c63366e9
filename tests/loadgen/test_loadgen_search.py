"""The search for the highest rate that meets the SLO, on a server whose limit is known."""

import pytest

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.openloop import Outcome
from cohabit.loadgen.report import Report, RunDescription, make_report
from cohabit.loadgen.search import PRECISION, Measure, find_rate, sweep


def server(limit_per_s: float, late_above_per_s: float = float("inf")) -> Measure:
    async def measure(rate_per_s: float) -> Report:
        run = RunDescription(url="", rate_per_s=rate_per_s, warmup_s=0.0, slo_s=0.05, slo_percentile=99.0)
        latency_s = 0.01 if rate_per_s <= limit_per_s else 0.06
        lag_s = 0.02 if rate_per_s > late_above_per_s else 0.0
        return make_report(run, [Outcome(RequestArrival(1.0, "a"), lag_s, latency_s)], ["a"])

    return measure


@pytest.mark.parametrize("start_per_s", [1.0, 130.0, 5000.0])
async def test_the_highest_rate_that_meets_the_slo_is_found(start_per_s: float) -> None:
    shown: list[Report] = []
    found, reports = await find_rate(server(137.0), start_per_s, shown.append)
    assert found is not None
    assert found <= 137.0 <= found * (1 + PRECISION)
    assert shown == reports


async def test_a_server_that_never_meets_it_has_no_rate() -> None:
    assert (await find_rate(server(0.0), 100.0, lambda _: None))[0] is None


async def test_a_rate_that_the_generator_cannot_send_is_not_claimed() -> None:
    found, _ = await find_rate(server(1000.0, late_above_per_s=200.0), 100.0, lambda _: None)
    assert found is not None
    assert found <= 200.0


async def test_a_sweep_has_a_report_of_every_rate() -> None:
    reports = await sweep(server(150.0), [100.0, 200.0])
    assert [(r.rate_per_s, r.meets_slo) for r in reports] == [(100.0, True), (200.0, False)]
