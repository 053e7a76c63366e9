"""What is measured is right: latencies that the server is known to have, stalls, and schedules that were not kept."""

import asyncio
import time

import numpy as np
import pytest
from msgspec.structs import replace

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import Outcome, run_open_loop
from cohabit.loadgen.report import RunDescription, make_report
from cohabit.loadgen.run import run_load, send_load
from tests.support.server.fake_kserve import FakeKServe, serving

LOAD = Load(rate_per_s=100, duration_s=3.0, warmup_s=0.0, slo_s=5.0, timeout_s=20.0, cv=0.0)


async def test_percentiles_are_those_of_the_servers_latencies_to_one_percent() -> None:
    """Latencies of seconds, so that a busy machine's scheduling between server and client is far below a percent."""
    known_s = np.random.default_rng(1).uniform(2.0, 6.0, 300)
    fake = FakeKServe(models=("a",), latency_s=lambda n: float(known_s[n]))
    async with serving(fake) as url:
        sent = await send_load(url, LOAD)
    assert len(fake.took_s) == len(sent.outcomes) >= 299
    assert min(fake.took_s) >= 2.0
    spread = sent.report.latency
    assert spread is not None
    lag_s = float(np.median([outcome.lag_s for outcome in sent.outcomes]))
    expected_s = np.percentile(fake.took_s, [50, 90, 99, 99.9, 99.99]) + lag_s
    measured_s = [spread.p50_s, spread.p90_s, spread.p99_s, spread.p999_s, spread.p9999_s]
    assert measured_s == pytest.approx(expected_s.tolist(), rel=0.01)


@pytest.mark.long
async def test_a_stall_of_a_second_is_in_the_latency_of_every_request_that_was_due_in_it() -> None:
    """A hundred of 300 requests are due in the stall, and wait for its end: a second to none, evenly."""
    fake = FakeKServe(models=("a",), stall_s=(1.0, 2.0))
    async with serving(fake) as url:
        report = await run_load(url, LOAD)
    assert report.latency is not None
    assert report.latency.max_s >= 0.98
    assert report.latency.p90_s >= 0.68, "the thirty that waited longest"
    assert sum(interval.completed for interval in report.intervals) == report.completed


async def test_requests_due_while_the_generator_is_stopped_count_from_their_schedule() -> None:
    async def send(arrival: RequestArrival) -> None:
        if arrival.model == "stall":
            time.sleep(1.0)  # noqa: ASYNC251

    arrivals = [RequestArrival(0.0, "stall"), *(RequestArrival(0.01 * k, "m") for k in range(1, 51))]
    outcomes = await run_open_loop(arrivals, send, max_in_flight=100)
    run = RunDescription(url="", rate_per_s=100, duration_s=0.51, warmup_s=0.0)
    report = make_report(run, outcomes, ["stall", "m"])
    assert report.generator_was_late
    assert report.send_lag is not None
    assert report.send_lag.max_s >= 0.98


def test_a_lag_that_is_small_beside_the_latency_does_not_make_a_run_invalid() -> None:
    run = RunDescription(url="", rate_per_s=1, duration_s=1.0, warmup_s=0.0)
    lagging = Outcome(RequestArrival(0.5, "a"), lag_s=0.02, latency_s=0.3)
    assert not make_report(run, [lagging], ["a"]).generator_was_late
    assert make_report(run, [lagging, *[Outcome(lagging.arrival, 0.2, 0.3)] * 9], ["a"]).generator_was_late


@pytest.mark.long
async def test_sender_processes_share_one_schedule() -> None:
    fake = FakeKServe(models=("a", "b"))
    async with serving(fake) as url:
        one = await run_load(url, replace(LOAD, rate_per_s=50, duration_s=1.0))
        several = await run_load(url, replace(LOAD, rate_per_s=50, duration_s=1.0, processes=3))
    assert several.all_answered
    assert several.completed == one.completed >= 49
    assert {m.model: m.sent for m in several.models} == {m.model: m.sent for m in one.models}


@pytest.mark.long
async def test_a_closed_loop_has_as_many_requests_in_flight_as_clients() -> None:
    fake = FakeKServe(models=("a",), answer_after=5)
    async with serving(fake) as url:
        report = await run_load(url, replace(LOAD, concurrency=5, duration_s=0.5))
    assert report.all_answered
    assert report.completed == len(fake.arrived) >= 5
    fewer = FakeKServe(models=("a",), answer_after=5)
    async with serving(fewer) as url:
        run = asyncio.create_task(run_load(url, replace(LOAD, concurrency=4, duration_s=0.5, timeout_s=1.0)))
        report = await run
    assert report.errors == {"timeout": 4}, "four clients never make the fifth request that answers wait for"
