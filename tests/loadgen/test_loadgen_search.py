"""The search for the highest rate that meets the SLO, on a server whose limit is known."""

import pytest

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.openloop import Outcome
from cohabit.loadgen.report import Report, RunDescription, make_report
from cohabit.loadgen.search import PRECISION, Measure, find_rate, sweep


def server(limit_per_s: float, late_above_per_s: float = float("inf"), requests: int = 200) -> Measure:
    async def measure(rate_per_s: float) -> Report:
        run = RunDescription(url="", rate_per_s=rate_per_s, warmup_s=0.0, slo_s=0.05, slo_percentile=99.0)
        latency_s = 0.01 if rate_per_s <= limit_per_s else 0.06
        lag_s = 0.02 if rate_per_s > late_above_per_s else 0.0
        return make_report(run, [Outcome(RequestArrival(1.0, "a"), lag_s, latency_s)] * requests, ["a"])

    return measure


@pytest.mark.parametrize("start_per_s", [1.0, 130.0, 5000.0])
async def test_the_highest_rate_that_meets_the_slo_is_found(start_per_s: float) -> None:
    shown: list[Report] = []
    found = await find_rate(server(137.0), start_per_s, shown.append)
    assert found.rate_per_s is not None
    assert found.rate_per_s <= 137.0 <= found.rate_per_s * (1 + PRECISION)
    assert found.stopped is None
    assert shown == found.reports


async def test_a_server_that_never_meets_it_has_no_rate() -> None:
    found = await find_rate(server(0.0), 100.0, lambda _: None)
    assert found.rate_per_s is None
    assert found.stopped == "10 rates from 100/s on all did alike"


async def test_a_rate_that_the_generator_cannot_send_ends_the_search() -> None:
    """It says nothing about the server; lower rates were searched for before, down to a tenth of a request."""
    found = await find_rate(server(1000.0, late_above_per_s=200.0), 100.0, lambda _: None)
    assert found.rate_per_s == 200.0
    assert found.stopped == "at 400/s the generator was late; give it more CPU or --processes"
    found = await find_rate(server(1000.0, late_above_per_s=1.0), 100.0, lambda _: None)
    assert found.rate_per_s is None
    assert len(found.reports) == 1


async def test_a_run_of_too_few_requests_ends_the_search() -> None:
    found = await find_rate(server(1000.0, requests=4), 10.0, lambda _: None)
    assert found.rate_per_s is None
    assert found.stopped is not None
    assert found.stopped.startswith(
        "at 10/s a run has 4 requests, of which one alone decides about 99 %; give --dur"
    )
    assert len(found.reports) == 1


async def test_a_sweep_has_a_report_of_every_rate() -> None:
    reports = await sweep(server(150.0), [100.0, 200.0])
    assert [(r.rate_per_s, r.meets_slo) for r in reports] == [(100.0, True), (200.0, False)]
