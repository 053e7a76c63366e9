"""The open loop: requests go out at their times, independently of answers."""

import asyncio
import time
from collections.abc import Callable

import pytest

from cohabit.loadgen.arrivals import RequestArrival
from cohabit.loadgen.openloop import NOT_SENT, RequestFailed, Tally, run_open_loop


def every(gap_s: float, count: int) -> list[RequestArrival]:
    return [RequestArrival(gap_s * k, "m") for k in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_nothing_waits_for_an_answer() -> None:
    """Answers come only when all requests are there: a closed loop would never get to the second."""
    started = 0
    all_there = asyncio.Event()

    async def send(arrival: RequestArrival) -> None:
        nonlocal started
        started += 1
        if started == 50:
            all_there.set()
        await all_there.wait()

    async with asyncio.timeout(20):
        outcomes = await run_open_loop(every(0.002, 50), send, max_in_flight=100)
    assert len(outcomes) == 50
    assert all(o.failure is None for o in outcomes)


async def test_latency_counts_from_the_intended_time() -> None:
    """The first request stalls the generator; requests that were due meanwhile count the delay."""

    async def send(arrival: RequestArrival) -> None:
        if arrival.model == "stall":
            time.sleep(0.3)  # noqa: ASYNC251

    arrivals = [RequestArrival(0.0, "stall"), *(RequestArrival(0.01 * k, "m") for k in range(1, 11))]
    outcomes = await run_open_loop(arrivals, send, max_in_flight=100)
    for outcome in outcomes:
        if outcome.arrival.model == "m":
            assert outcome.latency_s >= outcome.lag_s
            assert outcome.arrival.at_s + outcome.latency_s >= 0.3


async def test_no_request_is_sent_before_its_time() -> None:
    async def send(arrival: RequestArrival) -> None:
        pass

    outcomes = await run_open_loop(every(0.003, 30), send, max_in_flight=100)
    assert all(o.lag_s >= -1e-4 for o in outcomes)


async def test_requests_beyond_the_bound_are_counted_as_not_sent() -> None:
    release = asyncio.Event()
    tally = Tally()

    async def send(arrival: RequestArrival) -> None:
        await release.wait()

    run = asyncio.create_task(run_open_loop(every(0.001, 10), send, max_in_flight=3, tally=tally))
    await until(lambda: tally.failed[NOT_SENT] == 7)
    release.set()
    assert sum(o.failure is None for o in await run) == 3
    assert (tally.sent, tally.answered, tally.in_flight) == (3, 3, 0)


async def test_a_failure_is_recorded_and_the_run_goes_on() -> None:
    async def send(arrival: RequestArrival) -> None:
        if arrival.model == "bad":
            raise RequestFailed("HTTP 503", "queue full")

    outcomes = await run_open_loop([RequestArrival(0, "bad"), RequestArrival(0, "good")], send, max_in_flight=9)
    assert {o.arrival.model: o.failure and o.failure.kind for o in outcomes} == {"bad": "HTTP 503", "good": None}


async def test_cancelling_ends_the_requests_and_the_pacer() -> None:
    ended = 0

    async def send(arrival: RequestArrival) -> None:
        nonlocal ended
        try:
            await asyncio.Event().wait()
        finally:
            ended += 1

    tally = Tally()
    run = asyncio.create_task(run_open_loop([*every(0.001, 5), RequestArrival(3600, "m")], send, 9, tally))
    await until(lambda: tally.sent == 5)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert ended == 5
