"""One compute lane: batches, background work, versions, deadlines, and faults of the device."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from cohabit.planner.shapes import Bucket
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.errors import (
    ExecutionFailed,
    InvalidRequest,
    ModelNotFound,
    RequestError,
    RequestTimedOut,
)
from cohabit.server.ipc.model import Array, Inputs, ModelKey
from cohabit.server.ipc.request import MARK_BYTES, Answer, Request
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.scheduling.scheduler import Scheduler
from tests.support.server.server_fakes import FakeServable, Gate, identity, refused

pytestmark = pytest.mark.process

FASTER = {Bucket(1): 1.0, Bucket(2): 1.1, Bucket(4): 1.2}
"""Predicted seconds of a model for which batches pay."""


def request(model: str = "m", value: float = 0.0, batch: int = 1, timeout_s: float | None = None) -> Request:
    inputs = {"x": np.full((batch, 4), value, np.float32)}
    return Request(ModelKey(model, 1), inputs, batch, (), timeout_s=timeout_s)


def gated(name: str = "m") -> tuple[FakeServable, Gate]:
    gate = Gate()
    return FakeServable(identity(name, "FP32").info, gate), gate


def infer(lane: ComputeLane, model: str = "m", value: float = 0.0, batch: int = 1) -> "asyncio.Task[Answer]":
    return asyncio.create_task(lane.infer(request(model, value, batch)))


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 20)


async def queued(lane: ComputeLane, model: str, count: int) -> None:
    """Let the requests that were made enter the queue, which must then have so many of a model."""
    await asyncio.sleep(0)
    assert lane.pending(ModelKey(model, 1)) == count


@asynccontextmanager
async def lane_of(*servables: FakeServable) -> AsyncIterator[ComputeLane]:
    lane = ComputeLane(Scheduler(64))
    for servable in servables:
        lane.add(servable, ModelStatistics())
    lane.start()
    try:
        yield lane
    finally:
        await lane.stop()


def test_a_lane_says_when_requests_begin_to_wait_and_when_none_does() -> None:
    async def run() -> list[bool]:
        servable, gate = gated()
        said: list[bool] = []
        async with lane_of(servable) as lane:
            lane.on_waiting = said.append
            first = infer(lane)
            await entered(gate)
            second = infer(lane)
            await queued(lane, "m", 1)
            gate.open.set()
            await asyncio.gather(first, second)
            await infer(lane)
        return said

    assert asyncio.run(run()) == [True, False, True, False]


# Batches.


async def run_queued(servable: FakeServable, values: list[float]) -> tuple[list[object], ModelStatistics]:
    """Return the outcomes of requests that are all queued while the lane is busy, and the model's counters."""
    busy, gate = gated("busy")
    async with lane_of(busy) as lane:
        statistics = ModelStatistics()
        lane.add(servable, statistics)
        running = infer(lane, "busy")
        await entered(gate)
        waiting = [infer(lane, servable.info.name, value) for value in values]
        await queued(lane, servable.info.name, len(values))
        gate.open.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await running
    return list(outcomes), statistics


async def test_queued_requests_are_executed_as_batches_and_get_their_own_rows() -> None:
    servable = replace(identity("m", "FP32"), predicted_s=FASTER)
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    outcomes, statistics = await run_queued(servable, values)
    assert servable.calls == [4, 2]
    for value, rows, outcome in zip(values, [4] * 4 + [2] * 2, outcomes, strict=True):
        assert isinstance(outcome, Answer)
        assert np.array_equal(outcome.outputs["y"], np.full((1, 4), value))
        assert (outcome.timing.rows, outcome.timing.swapped_bytes) == (rows, 1000)
        assert outcome.timing.queued_s <= outcome.timing.started_s
    assert (statistics.answered.count, statistics.execution_count, statistics.inference_count) == (6, 2, 6)
    assert statistics.swapped_bytes == 2 * 1000


async def test_the_device_learns_what_is_queued_before_each_execution() -> None:
    first, gate = gated("first")
    second, third = identity("second", "FP32"), replace(identity("third", "FP32"), predicted_s=FASTER)
    async with lane_of(first, second, third) as lane:
        running = [infer(lane, "first")]
        await entered(gate)
        running += [infer(lane, "second")]
        await queued(lane, "second", 1)
        running += [infer(lane, "third") for _ in range(4)]
        await queued(lane, "third", 4)
        gate.open.set()
        await asyncio.gather(*running)
    assert (first.foreseen, second.foreseen) == ([], []), "nothing was queued when the first one began"
    assert third.foreseen == [4], "as the batch that follows the second one"


async def test_a_request_that_fails_in_a_batch_fails_alone() -> None:
    def refuse_seven(x: Array) -> dict[str, Array]:
        if (x == 7).any():
            raise InvalidRequest("7 is outside of the table")
        return {"y": x}

    servable = FakeServable(identity("m", "FP32").info, refuse_seven, predicted_s=FASTER)
    outcomes, statistics = await run_queued(servable, [1.0, 7.0, 3.0, 4.0])
    assert servable.calls == [4, 1, 1, 1, 1]
    assert [isinstance(o, InvalidRequest) for o in outcomes] == [False, True, False, False]
    assert (statistics.answered.count, statistics.failures["OTHER"]) == (3, 1)


async def test_the_start_of_an_execution_is_marked_with_its_prediction() -> None:
    async with lane_of(replace(identity("m", "FP32"), predicted_s=FASTER)) as lane:
        asked = structs.replace(request(batch=2), output_buffer=np.zeros(MARK_BYTES, np.uint8))
        timing = (await lane.infer(asked)).timing
    assert asked.marked == (timing.started_s, FASTER[Bucket(2)])


# Chores.


class Steps:
    """A background of so many pieces, which notes how often its model had been executed before each."""

    def __init__(self, count: int, servable: FakeServable) -> None:
        self.left, self.servable = count, servable
        self.executed: list[int] = []
        self.threads: set[int] = set()

    def advance(self) -> bool:
        self.threads.add(threading.get_ident())
        self.executed.append(len(self.servable.calls))
        self.left -= 1
        return self.left == 0


async def test_chores_are_done_a_piece_between_every_two_executions_and_go_on_when_idle() -> None:
    servable, gate = gated()
    async with lane_of(servable) as lane:
        answers = [infer(lane) for _ in range(5)]
        await entered(gate)
        await queued(lane, "m", 4)
        background = Steps(3, servable)
        done = asyncio.create_task(lane.perform(background.advance))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(done, *answers)
        assert background.executed == [1, 2, 3]
        idle = Steps(50, servable)
        await lane.perform(idle.advance)
        assert idle.executed == [5] * 50
        assert {await lane.call_on_lane(threading.get_ident)} == background.threads == idle.threads


async def test_a_chore_that_fails_fails_alone() -> None:
    async with lane_of(identity("m", "FP32")) as lane:

        def fail() -> None:
            raise ValueError("no such thing")

        with pytest.raises(ValueError, match="no such thing"):
            await lane.call_on_lane(fail)
        assert await lane.call_on_lane(lambda: 1) == 1
        await lane.infer(request())


# Models that are replaced, removed and held.


async def test_requests_are_executed_by_the_version_that_they_came_for() -> None:
    old, gate = gated()
    new = FakeServable(old.info, lambda x: {"y": x + 100})
    async with lane_of(old) as lane:
        for_old = [infer(lane, value=value) for value in (1.0, 2.0)]
        await entered(gate)
        await queued(lane, "m", 1)
        lane.add(new, ModelStatistics())
        for_new = infer(lane, value=3.0)
        finished = asyncio.create_task(lane.finish(ModelKey("m", 1), 20.0, older_only=True))
        await queued(lane, "m", 2)
        assert not finished.done()
        gate.open.set()
        assert [a.outputs["y"][0, 0] for a in await asyncio.gather(*for_old, for_new)] == [1.0, 2.0, 103.0]
        assert await finished


@pytest.mark.parametrize("event", ["replaced", "unloaded"])
async def test_requests_that_still_wait_for_a_replaced_or_removed_model_are_refused(event: str) -> None:
    servable, gate = gated()
    async with lane_of(servable, identity("other", "FP32")) as lane:
        running, waiting = infer(lane), infer(lane)
        await entered(gate)
        await queued(lane, "m", 1)
        if event == "replaced":
            lane.add(identity("m", "FP32"), ModelStatistics())
            assert not await lane.finish(ModelKey("m", 1), 0.0, older_only=True)
        else:
            lane.remove(ModelKey("m", 1))
            with pytest.raises(ModelNotFound):
                await lane.infer(request())
        with pytest.raises(ModelNotFound, match=event):
            await waiting
        gate.open.set()
        await running
        await lane.infer(request("other"))


async def test_a_batch_of_a_model_that_is_removed_before_it_is_executed_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The batch has left its queue: removing the model finds no request to refuse."""
    async with lane_of(identity("m", "FP32"), identity("other", "FP32")) as lane:
        begin, loop = lane.device._begin, asyncio.get_running_loop()

        async def remove() -> None:
            lane.remove(ModelKey("m", 1))

        def removing(*arguments: Any, **options: Any) -> Any:
            monkeypatch.undo()
            asyncio.run_coroutine_threadsafe(remove(), loop).result(20)
            return begin(*arguments, **options)

        monkeypatch.setattr(lane.device, "_begin", removing)
        answer = await lane.infer(request(value=2.0))
        assert answer.outputs["y"][0, 0] == 2.0
        await lane.infer(request("other"))
        assert lane.lost is None


async def test_a_held_model_waits_while_the_others_are_served() -> None:
    async with lane_of(identity("m", "FP32"), identity("other", "FP32")) as lane:
        lane.pause(ModelKey("m", 1))
        kept = infer(lane)
        await lane.infer(request("other"))
        assert not kept.done()
        lane.resume(ModelKey("m", 1))
        await kept


# Requests that are not executed.


async def test_hopeless_requests_are_refused_while_the_device_is_busy() -> None:
    servable, gate = gated()
    async with lane_of(servable) as lane:
        running = infer(lane)
        await entered(gate)
        with pytest.raises(RequestTimedOut):
            await lane.infer(request(timeout_s=0.02))
        assert not running.done()
        gate.open.set()
        await running


async def test_failed_and_cancelled_requests_are_counted_once() -> None:
    def explode(x: Array) -> dict[str, Array]:
        raise RuntimeError("fire")

    statistics = ModelStatistics()
    async with lane_of() as lane:
        lane.add(FakeServable(identity("m", "FP32").info, explode), statistics)
        with pytest.raises(ExecutionFailed, match="fire"):
            await lane.infer(request())
        lane.pause(ModelKey("m", 1))
        leaving = infer(lane)
        await queued(lane, "m", 1)
        leaving.cancel()
        await asyncio.wait({leaving})
        assert statistics.failures == {"REJECTED": 0, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
        assert lane.pending(ModelKey("m", 1)) == 0


async def test_stopping_refuses_chores_and_requests_alike() -> None:
    servable, gate = gated()
    lane = ComputeLane(Scheduler(64))
    lane.add(servable, ModelStatistics())
    lane.start()
    running, waiting = infer(lane), infer(lane)
    await entered(gate)
    background = asyncio.create_task(lane.call_on_lane(lambda: None))
    await queued(lane, "m", 1)
    assert not await lane.stop(0.0), "it is still executing"
    for call in (running, waiting, background):
        with refused("ShuttingDown"):
            await call
    with refused("ShuttingDown"):
        await lane.call_on_lane(lambda: None)
    gate.open.set()
    assert await lane.stop()


# Faults.


async def test_a_lost_device_refuses_everything_and_is_reported_once() -> None:
    servable, gate = gated()
    reported: list[str] = []
    lane = ComputeLane(Scheduler(64), on_lost=reported.append)
    lane.add(servable, ModelStatistics())
    lane.start()
    running, waiting = infer(lane), infer(lane)
    await entered(gate)
    await queued(lane, "m", 1)
    servable.lost = "it fell off the bus"
    gate.open.set()
    await running
    with refused("DeviceUnavailable", match="fell off the bus"):
        await waiting
    for call in (lane.infer(request()), lane.call_on_lane(lambda: None)):
        with refused("DeviceUnavailable"):
            await call
    lane.device_lost("again")
    assert [lane.lost] == reported == ["it fell off the bus"]
    assert await lane.stop()


async def test_a_fault_of_the_lane_itself_leaves_no_request_waiting() -> None:
    class Faulty(Scheduler):
        def finished(self, *args: object) -> None:
            raise KeyError("a bug")

    lane = ComputeLane(Faulty(64))
    lane.add(identity("m", "FP32"), ModelStatistics())
    lane.start()
    for answer in [infer(lane), infer(lane)]:
        with refused("DeviceUnavailable", match="the engine has failed: KeyError"):
            await answer
    assert lane.lost is not None
    assert await lane.stop()


# Executions that are begun ahead.


class Ahead(FakeServable):
    """A model of a device that goes on by itself: `begin` returns a function that waits for a gate."""

    events: list[str]
    gate: Gate
    is_ready = True

    def launches_ahead(self, inputs: Inputs, rows: int) -> bool:
        return self.is_ready

    def begin(self, requests: Sequence[Inputs], rows: int, on_recording: Any = None) -> Any:
        name = self.info.name
        self.events.append(f"{name} begins")
        kept = [{"x": inputs["x"].copy()} for inputs in requests]

        def finish() -> Answer:
            self.gate(kept[0]["x"])
            self.events.append(f"{name} ends")
            return self.execute(kept, rows, on_recording)

        return finish


def ahead(events: list[str], name: str, **changes: Any) -> Ahead:
    made = Ahead(identity(name, "FP32").info, lambda x: {"y": x}, **changes)
    made.events, made.gate = events, Gate()
    return made


async def test_the_next_request_is_begun_while_the_device_executes() -> None:
    events: list[str] = []
    a, b, c = (ahead(events, name) for name in "abc")
    async with lane_of(a, b, c) as lane:
        first = infer(lane, "a", 1.0)
        await entered(a.gate)
        rest = [infer(lane, name, value) for name, value in (("b", 2.0), ("c", 3.0), ("a", 4.0))]
        await queued(lane, "c", 1)
        for servable in (a, b, c):
            servable.gate.open.set()
        answers = await asyncio.gather(first, *rest)
    assert [float(answer.outputs["y"][0, 0]) for answer in answers] == [1.0, 2.0, 3.0, 4.0]
    # The first one was waited for before there was another.
    assert events == [
        *("a begins", "a ends"),
        *("b begins", "c begins", "b ends", "a begins", "c ends", "a ends"),
    ]
    started = [answer.timing.started_s for answer in answers]
    assert started == sorted(started)
    busy = [(answer.timing.started_s, answer.timing.started_s + answer.timing.busy_s) for answer in answers]
    assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(busy)), "the lane's times do not overlap"


async def overtaken(second: Ahead, value: float = 2.0) -> list[str]:
    """Return the order of events of two requests that wait while the lane does something else."""
    events, other = second.events, ahead(second.events, "first")
    busy, gate = gated("busy")
    for servable in (second, other):
        servable.gate.open.set()
    async with lane_of(busy, other, second) as lane:
        running = infer(lane, "busy")
        await entered(gate)
        waiting = [infer(lane, "first"), infer(lane, second.info.name, value)]
        await queued(lane, second.info.name, 1)
        gate.open.set()
        await asyncio.gather(running, *waiting)
    return events


async def test_what_the_device_cannot_have_now_begins_after_the_execution() -> None:
    assert await overtaken(ahead([], "m")) == ["first begins", "m begins", "first ends", "m ends"]
    late = ahead([], "m")
    late.is_ready = False
    in_turn = ["first begins", "first ends", "m begins", "m ends"]
    assert await overtaken(late) == in_turn


async def test_a_batch_that_more_requests_would_make_cheaper_is_not_begun_ahead() -> None:
    in_turn = ["first begins", "first ends", "m begins", "m ends"]
    assert await overtaken(ahead([], "m", predicted_s=FASTER)) == in_turn
    same = {Bucket(1): 1.0, Bucket(2): 2.0}
    assert await overtaken(ahead([], "m", predicted_s=same)) == [
        *("first begins", "m begins", "first ends", "m ends"),
    ]


async def test_background_work_finds_the_device_idle() -> None:
    events: list[str] = []
    a, b = ahead(events, "a"), ahead(events, "b")
    async with lane_of(a, b) as lane:
        first = infer(lane, "a")
        await entered(a.gate)
        second = infer(lane, "b")
        await queued(lane, "b", 1)
        done = asyncio.create_task(lane.call_on_lane(lambda: events.append("background")))
        await asyncio.sleep(0)
        a.gate.open.set()
        b.gate.open.set()
        await asyncio.gather(first, second, done)
    assert events.index("background") == 2
    assert set(events[:2]) in ({"a begins", "a ends"}, {"b begins", "b ends"})


async def test_an_execution_that_fails_leaves_the_one_begun_after_it_alone() -> None:
    events: list[str] = []
    a, b = ahead(events, "a"), ahead(events, "b")
    busy, gate = gated("busy")

    def fail(x: Array) -> dict[str, Array]:
        raise InvalidRequest("no such row")

    a.function = fail
    async with lane_of(busy, a, b) as lane:
        running = infer(lane, "busy")
        await entered(gate)
        tasks = [infer(lane, "a"), infer(lane, "b", 5.0)]
        await queued(lane, "b", 1)
        for one in (a.gate, b.gate, gate):
            one.open.set()
        failed, answered = await asyncio.gather(*tasks, return_exceptions=True)
        await running
        assert (await infer(lane, "b", 6.0)).outputs["y"][0, 0] == 6.0
    assert isinstance(failed, InvalidRequest)
    assert isinstance(answered, Answer)
    assert answered.outputs["y"][0, 0] == 5.0
    assert events[:4] == ["a begins", "b begins", "a ends", "b ends"]


async def test_a_lane_that_stops_waits_for_what_the_device_has() -> None:
    events: list[str] = []
    a = ahead(events, "a")
    async with lane_of(a) as lane:
        first = infer(lane, "a")
        await entered(a.gate)
        stopping = asyncio.create_task(lane.stop())
        await asyncio.sleep(0)
        a.gate.open.set()
        assert await stopping
        with pytest.raises(RequestError, match="is stopping"):
            await first
    assert events == ["a begins", "a ends"]
