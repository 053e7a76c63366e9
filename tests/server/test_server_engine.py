"""The engine tells the model that comes next, so that its copies begin beside the inference before it."""

import asyncio
import threading
from collections.abc import Callable

import numpy as np
from server_fakes import FakeServable, Gate, identity

from server.engine.doorbell import Doorbell
from server.engine.engine import Engine
from server.engine.statistics import ModelStatistics
from server.errors import InvalidRequest
from server.protocol.model import Array, Execution
from server.protocol.request import InferRequest
from server.scheduling.scheduler import Scheduler


def request(model: str, batch: int) -> InferRequest:
    return InferRequest(model, 1, {"x": np.zeros((batch, 4), np.float32)}, batch, ())


async def some_turns() -> None:
    """Let the event loop take what has come, and look at it at the end of the turn."""
    for _ in range(5):
        await asyncio.sleep(0)


async def run_three(
    prefetches: bool = True, tell: Callable[[Engine], None] = lambda engine: None
) -> tuple[FakeServable, FakeServable]:
    """A request for `first` waits at a gate until one for `second` and one more for `first` are queued.

    `tell` the engine something before the gate opens.
    """
    gate = Gate()
    first, second = FakeServable(identity("first", "FP32").info, gate), identity("second", "FP32")
    first.prefetches = second.prefetches = prefetches
    engine = Engine(Scheduler(8))
    for servable in (first, second):
        engine.add(servable, ModelStatistics())
    engine.start()
    answers = [asyncio.ensure_future(engine.infer(request("first", 1)))]
    await asyncio.to_thread(gate.entered.wait, 10)
    answers += [asyncio.ensure_future(engine.infer(request(m, b))) for m, b in (("second", 3), ("first", 2))]
    await some_turns()
    tell(engine)
    gate.open.set()
    await asyncio.gather(*answers)
    await engine.stop()
    assert (first.calls, second.calls) == ([1, 2], [3])
    return first, second


async def test_the_next_model_hears_of_its_turn_before_the_one_ahead_of_it_runs() -> None:
    first, second = await run_three()
    assert first.expected == [2], "while `second` ran"
    assert second.expected == [], "nothing was known when the first request began"


async def test_what_comes_when_nothing_is_executed_is_not_told() -> None:
    servable = identity("first", "FP32")
    engine = Engine(Scheduler(8))
    engine.add(servable, ModelStatistics())
    engine.start()
    for _ in range(5):
        await engine.infer(request("first", 1))
        engine._device.tell_late()
    await engine.stop()
    assert servable.expected == []


async def test_models_without_leading_copies_are_not_told_of_their_turn() -> None:
    first, second = await run_three(prefetches=False)
    for told in (first, second):
        assert told.expected == []


async def test_prefetching_may_be_ended_and_begun_at_any_time() -> None:
    def end_and_begin(engine: Engine) -> None:
        engine.prefetch(False)
        engine.prefetch(True)

    for tell, told in ((lambda engine: engine.prefetch(False), []), (end_and_begin, [2])):
        first, _ = await run_three(tell=tell)
        assert first.expected == told


def test_a_ring_that_nobody_waits_for_is_remembered_once() -> None:
    bell = Doorbell()
    bell.ring()
    bell.ring()
    bell.wait()
    waiter = threading.Thread(target=bell.wait)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive(), "two rings were one"
    bell.ring()
    waiter.join(10)
    assert not waiter.is_alive()


FASTER = {1: 1.0, 2: 1.1, 4: 1.2}


async def run_behind_a_gate(servable: FakeServable, values: list[float]) -> tuple[list[object], ModelStatistics]:
    """Answers (or errors) of requests that all wait while the engine is busy, and what was counted."""
    gate = Gate()
    engine, statistics = Engine(Scheduler(16)), ModelStatistics()
    engine.add(FakeServable(identity("busy", "FP32").info, gate), ModelStatistics())
    engine.add(servable, statistics)
    engine.start()
    busy = asyncio.ensure_future(engine.infer(request("busy", 1)))
    await asyncio.to_thread(gate.entered.wait, 10)
    rows = [np.full((1, 4), value, np.float32) for value in values]
    name = servable.info.name
    waiting = [asyncio.ensure_future(engine.infer(InferRequest(name, 1, {"x": x}, 1, ()))) for x in rows]
    await asyncio.sleep(0)
    gate.open.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    await busy
    await engine.stop()
    return list(outcomes), statistics


async def test_requests_that_wait_for_one_model_are_executed_together_and_get_their_own_rows() -> None:
    servable = identity("m", "FP32")
    servable.seconds_by_batch = FASTER
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    outcomes, statistics = await run_behind_a_gate(servable, values)
    assert servable.calls == [4, 2]
    for value, outcome in zip(values, outcomes, strict=True):
        assert isinstance(outcome, Execution)
        assert np.array_equal(outcome.outputs["y"], np.full((1, 4), value))
    assert (statistics.success.count, statistics.execution_count, statistics.inference_count) == (6, 2, 6)
    assert statistics.swapped_bytes == 2 * 1000


async def test_a_request_that_fails_takes_none_of_those_it_was_put_together_with_along() -> None:
    def refuse_seven(x: Array) -> dict[str, Array]:
        if (x == 7).any():
            raise InvalidRequest("7 is outside of the table")
        return {"y": x}

    servable = FakeServable(identity("m", "FP32").info, refuse_seven, seconds_by_batch=FASTER)
    outcomes, statistics = await run_behind_a_gate(servable, [1.0, 7.0, 3.0, 4.0])
    assert servable.calls == [4, 1, 1, 1, 1]
    assert [isinstance(o, InvalidRequest) for o in outcomes] == [False, True, False, False]
    assert (statistics.success.count, statistics.failures["OTHER"]) == (3, 1)
