"""What the engine does besides inferences: chores between them, versions that replace each other, faults of its own."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from server.engine.engine import Engine
from server.engine.statistics import ModelStatistics
from server_fakes import FakeServable, Gate, identity

from server.errors import DeviceLost, ModelNotFound, RequestTimedOut, ShuttingDown
from server.protocol.model import Array
from server.protocol.request import InferRequest
from server.scheduling.scheduler import Scheduler


def request(model: str = "m", value: float = 0.0, timeout_s: float | None = None) -> InferRequest:
    return InferRequest(model, 1, {"x": np.full((1, 4), value, np.float32)}, 1, (), timeout_s=timeout_s)


@asynccontextmanager
async def engine_of(*servables: FakeServable) -> AsyncIterator[Engine]:
    engine = Engine(Scheduler(64))
    for servable in servables:
        engine.add(servable, ModelStatistics())
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def gated(name: str = "m") -> tuple[FakeServable, Gate]:
    gate = Gate()
    return FakeServable(identity(name, "FP32").info, gate), gate


class Steps:
    """A chore of so many pieces, which notes what had been executed before each."""

    def __init__(self, count: int, servable: FakeServable) -> None:
        self.left, self.servable = count, servable
        self.executed: list[int] = []

    def advance(self) -> bool:
        assert threading.current_thread().name == "engine"
        self.executed.append(len(self.servable.calls))
        self.left -= 1
        return self.left == 0


async def test_chores_are_done_a_piece_between_every_two_inferences() -> None:
    servable, gate = gated()
    async with engine_of(servable) as engine:
        answers = [asyncio.ensure_future(engine.infer(request())) for _ in range(5)]
        await asyncio.to_thread(gate.entered.wait, 10)
        chore = Steps(3, servable)
        done = asyncio.ensure_future(engine.perform(chore))
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(done, *answers)
        assert chore.executed == [1, 2, 3]


async def test_chores_go_on_when_there_is_nothing_else_to_do() -> None:
    servable = identity("m", "FP32")
    async with engine_of(servable) as engine:
        chore = Steps(50, servable)
        await engine.perform(chore)
        assert chore.executed == [0] * 50
        assert await engine.between(lambda: threading.current_thread().name) == "engine"


async def test_chore_that_fails_fails_alone() -> None:
    async with engine_of(identity("m", "FP32")) as engine:

        def fail() -> None:
            raise ValueError("no such thing")

        with pytest.raises(ValueError, match="no such thing"):
            await engine.between(fail)
        assert await engine.between(lambda: 1) == 1
        await engine.infer(request())


async def test_requests_are_executed_by_the_version_that_they_came_for() -> None:
    old, gate = gated()
    new = FakeServable(old.info, lambda x: {"y": x + 100})
    async with engine_of(old) as engine:
        for_old = [asyncio.ensure_future(engine.infer(request(value=v))) for v in (1.0, 2.0)]
        await asyncio.to_thread(gate.entered.wait, 10)
        engine.add(new, ModelStatistics())
        for_new = asyncio.ensure_future(engine.infer(request(value=3.0)))
        finished = asyncio.ensure_future(engine.finish("m", 5.0, older_only=True))
        await asyncio.sleep(0)
        assert not finished.done()
        gate.open.set()
        assert [a.outputs["y"][0, 0] for a in await asyncio.gather(*for_old, for_new)] == [1.0, 2.0, 103.0]
        assert await finished


async def test_replaced_version_that_takes_too_long_refuses_what_it_has_not_begun() -> None:
    old, gate = gated()
    async with engine_of(old) as engine:
        running, waiting = (asyncio.ensure_future(engine.infer(request())) for _ in range(2))
        await asyncio.to_thread(gate.entered.wait, 10)
        engine.add(identity("m", "FP32"), ModelStatistics())
        assert not await engine.finish("m", 0.01, older_only=True)
        with pytest.raises(ModelNotFound, match="replaced"):
            await waiting
        gate.open.set()
        await running


async def test_removed_model_refuses_what_waited_and_what_comes() -> None:
    servable, gate = gated()
    async with engine_of(servable, identity("other", "FP32")) as engine:
        running, waiting = (asyncio.ensure_future(engine.infer(request())) for _ in range(2))
        await asyncio.to_thread(gate.entered.wait, 10)
        engine.remove("m")
        with pytest.raises(ModelNotFound, match="unloaded"):
            await waiting
        with pytest.raises(ModelNotFound):
            await engine.infer(request())
        gate.open.set()
        await running
        await engine.infer(request("other"))


async def test_held_model_waits_while_the_others_are_served() -> None:
    async with engine_of(identity("m", "FP32"), identity("other", "FP32")) as engine:
        engine.hold("m", True)
        kept = asyncio.ensure_future(engine.infer(request()))
        await engine.infer(request("other"))
        assert not kept.done()
        engine.hold("m", False)
        await kept


async def test_hopeless_requests_are_refused_while_the_device_is_busy() -> None:
    servable, gate = gated()
    async with engine_of(servable) as engine:
        running = asyncio.ensure_future(engine.infer(request()))
        await asyncio.to_thread(gate.entered.wait, 10)
        with pytest.raises(RequestTimedOut):
            await engine.infer(request(timeout_s=0.02))
        assert not running.done()
        gate.open.set()
        await running


async def test_lost_device_is_said_to_everybody_at_once() -> None:
    servable, gate = gated()
    async with engine_of(servable) as engine:
        running, waiting = (asyncio.ensure_future(engine.infer(request())) for _ in range(2))
        await asyncio.to_thread(gate.entered.wait, 10)
        servable.lost = "it fell off the bus"
        gate.open.set()
        await running
        with pytest.raises(DeviceLost, match="fell off the bus"):
            await waiting
        with pytest.raises(DeviceLost):
            await engine.infer(request())
        assert engine.lost == "it fell off the bus"


async def test_fault_of_the_engine_itself_leaves_nobody_waiting() -> None:
    class Treacherous(Scheduler):
        def finished(self, *args: object) -> None:
            raise KeyError("a bug")

    engine = Engine(Treacherous(64))
    engine.add(identity("m", "FP32"), ModelStatistics())
    engine.start()
    first, second = (asyncio.ensure_future(engine.infer(request())) for _ in range(2))
    with pytest.raises(DeviceLost, match="the engine has failed: KeyError"):
        await second
    with pytest.raises(DeviceLost):
        await first
    assert engine.lost is not None
    assert await engine.stop()


async def test_stopping_refuses_chores_and_requests_alike() -> None:
    servable, gate = gated()
    engine = Engine(Scheduler(64))
    engine.add(servable, ModelStatistics())
    engine.start()
    running = asyncio.ensure_future(engine.infer(request()))
    await asyncio.to_thread(gate.entered.wait, 10)
    waiting = asyncio.ensure_future(engine.infer(request()))
    chore = asyncio.ensure_future(engine.between(lambda: None))
    await asyncio.sleep(0)
    assert not await engine.stop(0.05), "it is still executing"
    for refused in (running, waiting, chore):
        with pytest.raises(ShuttingDown):
            await refused
    with pytest.raises(ShuttingDown):
        await engine.between(lambda: None)
    gate.open.set()


async def test_unanswered_work_of_a_client_that_left_is_counted_once() -> None:
    def explode(x: Array) -> dict[str, Array]:
        raise RuntimeError("fire")

    statistics = ModelStatistics()
    engine = Engine(Scheduler(64))
    engine.add(FakeServable(identity("m", "FP32").info, explode), statistics)
    engine.start()
    with pytest.raises(Exception, match="fire"):
        await engine.infer(request())
    engine.hold("m", True)
    leaving = asyncio.ensure_future(engine.infer(request()))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.sleep(0)
    assert statistics.failures == {"REJECTED": 0, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
    assert engine.pending("m") == 0
    await engine.stop()
