"""What is over sooner than it is handed over is executed by the event loop, while the engine's thread is idle."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from server.engine.engine import Engine
from server.engine.statistics import ModelStatistics
from server_fakes import FakeServable, Gate, identity

from runtime.binding.program import Bases
from runtime.lowering.lower import Lowered, lower
from runtime.profiling.profile import resident_plan
from server.engine.device_thread import BRIEF_S
from server.engine.servable import ProgramServable, describe
from server.errors import DeviceLost, ExecutionFailed
from server.protocol.model import Array, Execution
from server.protocol.request import InferRequest
from server.scheduling.policy import Policy
from server.scheduling.scheduler import Scheduler
from tests.runtime import models
from tests.runtime.backends import Bench, cpu, opened
from tests.runtime.plans import streaming_plan

BRIEF = {1: 0.8 * BRIEF_S, 4: BRIEF_S}


def request(value: float = 1.0, model: str = "m") -> InferRequest:
    return InferRequest(model, 1, {"x": np.full((1, 4), value, np.float32)}, 1, ())


class Where:
    """A model that notes on which threads it is executed."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.servable = FakeServable(identity("m", "FP32").info, self, seconds_by_batch=BRIEF, only_computes=True)

    def __call__(self, x: Array) -> dict[str, Array]:
        self.threads.append(threading.current_thread())
        if (x == 7).any():
            raise RuntimeError("the kernel caught fire")
        return {"y": 2 * x}

    @property
    def by_the_loop(self) -> list[bool]:
        """Of each execution whether the event loop did it, on whose thread tests run."""
        return [thread is threading.current_thread() for thread in self.threads]


@asynccontextmanager
async def engine_of(
    *servables: FakeServable, receives: Callable[[], bool] = lambda: False, policy: Policy | None = None
) -> AsyncIterator[Engine]:
    engine = Engine(Scheduler(64), receives=receives)
    for servable in servables:
        engine.add(servable, ModelStatistics(), policy)
    engine.start()
    yield engine
    assert await engine.stop()


async def test_what_is_brief_and_only_computes_is_executed_by_the_event_loop() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        answers = [await engine.infer(request(value)) for value in (3.0, 4.0)]
    assert where.by_the_loop == [True, True]
    assert [answer.outputs["y"][0, 0] for answer in answers] == [6.0, 8.0]


async def test_what_comes_in_one_turn_of_the_loop_is_executed_together() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        answers = await asyncio.gather(*(engine.infer(request(value)) for value in range(6)))
    assert where.servable.calls == [4, 2]
    assert where.by_the_loop == [True, True]
    assert [answer.outputs["y"][0, 0] for answer in answers] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "otherwise",
    [{"seconds_by_batch": {1: 2 * BRIEF_S}}, {"seconds_by_batch": {}}, {"only_computes": False}],
    ids=["longer", "unknown", "with copies"],
)
async def test_what_is_not_brief_is_executed_by_the_engine(otherwise: dict[str, object]) -> None:
    where = Where()
    async with engine_of(replace(where.servable, **otherwise)) as engine:  # type: ignore[arg-type]
        await engine.infer(request())
    assert where.by_the_loop == [False]


async def test_the_loop_executes_nothing_while_it_receives() -> None:
    where = Where()
    receiving = True
    async with engine_of(where.servable, receives=lambda: receiving) as engine:
        for _ in range(3):
            await engine.infer(request())
        assert where.by_the_loop == [False] * 3
        receiving = False
        for _ in range(50):  # the thread may be about to look whether there is more
            await engine.infer(request())
    assert where.by_the_loop[-1]


async def test_the_loop_never_waits_for_what_the_engine_is_executing() -> None:
    gate, where = Gate(), Where()
    long = FakeServable(identity("long", "FP32").info, gate)
    async with engine_of(where.servable, long) as engine:
        before = asyncio.ensure_future(engine.infer(request(model="long")))
        await asyncio.to_thread(gate.entered.wait, 10)
        behind = asyncio.ensure_future(engine.infer(request()))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not where.threads
        gate.open.set()
        await asyncio.gather(before, behind)
    assert where.by_the_loop == [False]


async def test_chores_come_before_the_loop_s_own_executions() -> None:
    where = Where()
    pieces = iter([False, False, True])

    class Chore:
        def advance(self) -> bool:
            return next(pieces)

    async with engine_of(where.servable) as engine:
        chore = asyncio.ensure_future(engine.perform(Chore()))
        await engine.infer(request())
        await chore
    assert len(where.threads) == 1
    assert next(pieces, None) is None


async def test_what_is_kept_back_for_company_is_executed_when_its_time_has_come() -> None:
    where = Where()
    async with engine_of(where.servable, policy=Policy(batch_delay_s=0.05)) as engine:
        await engine.infer(request())
    assert where.servable.calls == [1]


async def test_a_failure_is_the_answer_of_its_own_request_and_the_loop_goes_on() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        values = (1.0, 7.0, 2.0)
        outcomes = await asyncio.gather(*(engine.infer(request(v)) for v in values), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Execution, ExecutionFailed, Execution]
        await engine.infer(request())
    assert all(where.by_the_loop)


async def test_a_fault_of_the_engine_itself_on_the_loop_leaves_nobody_waiting() -> None:
    class Treacherous(Scheduler):
        def finished(self, *args: object) -> None:
            raise KeyError("a bug")

    engine = Engine(Treacherous(64))
    engine.add(Where().servable, ModelStatistics())
    engine.start()
    waiting = [asyncio.ensure_future(engine.infer(request())) for _ in range(2)]
    with pytest.raises(DeviceLost, match="the engine has failed: KeyError"):
        await waiting[0]
    with pytest.raises(DeviceLost):
        await waiting[1]
    assert await engine.stop()


async def test_a_lost_device_is_noticed_by_the_loop_too() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        where.servable.lost = "it fell off the bus"
        await engine.infer(request())
        with pytest.raises(DeviceLost, match="fell off the bus"):
            await engine.infer(request())


async def test_many_brief_requests_never_keep_the_loop_from_everything_else() -> None:
    """Between two executions the loop takes a turn."""
    where = Where()
    turns: list[int] = []

    async def turn() -> None:
        while len(where.threads) < 16:
            turns.append(len(where.threads))
            await asyncio.sleep(0)

    async with engine_of(where.servable) as engine:
        await asyncio.gather(turn(), *(engine.infer(request()) for _ in range(64)))
    assert len(set(turns)) > 8


class Turns:
    """Counts the event loop's turns while something is waited for."""

    def __init__(self) -> None:
        self.count = 0

    async def during(self, coroutine: Coroutine[Any, Any, Execution]) -> Execution:
        self.count = 0
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(0)  # the coroutine begins
        while not task.done():
            self.count += 1
            await asyncio.sleep(0)
        return await task


async def test_who_comes_alone_again_and_again_is_answered_without_a_turn_of_the_loop() -> None:
    where, turns = Where(), Turns()
    async with engine_of(where.servable) as engine:
        taken = []
        for value in (1.0, 2.0, 3.0):
            answer = await turns.during(engine.infer(request(value)))
            assert answer.outputs["y"][0, 0] == 2 * value
            taken.append(turns.count)
            await asyncio.sleep(0)
    assert taken[0] > 0
    assert taken[1:] == [0, 0]


async def test_what_comes_in_company_is_put_together_again_from_the_second_time_on() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        for _ in range(2):
            await engine.infer(request())
        for _ in range(2):
            await asyncio.gather(*(engine.infer(request()) for _ in range(4)))
    assert where.servable.calls == [1, 1, 1, 3, 4]


async def test_what_is_executed_at_once_is_counted_as_any_other() -> None:
    where, statistics = Where(), ModelStatistics()
    engine = Engine(Scheduler(64))
    engine.add(where.servable, statistics)
    engine.start()
    for value in (1.0, 1.0, 7.0, 1.0):
        outcome = await asyncio.gather(engine.infer(request(value)), return_exceptions=True)
        assert isinstance(outcome[0], ExecutionFailed if value == 7 else Execution)
    assert where.by_the_loop == [True] * 4
    assert (statistics.success.count, statistics.fail.count, statistics.failures["BACKEND"]) == (3, 1, 1)
    assert statistics.queued.sum < 0.1
    assert await engine.drain(1.0)
    assert await engine.stop()


async def test_a_device_that_is_lost_at_once_is_lost_for_all() -> None:
    where = Where()
    async with engine_of(where.servable) as engine:
        await engine.infer(request())
        await engine.infer(request())
        where.servable.lost = "it fell off the bus"
        await engine.infer(request())
        assert engine.lost == "it fell off the bus"
        with pytest.raises(DeviceLost, match="fell off the bus"):
            await engine.infer(request())


async def test_a_fault_of_the_engine_itself_at_once_leaves_nobody_waiting() -> None:
    class Treacherous(Scheduler):
        is_broken = False

        def finished(self, *args: Any) -> None:
            if self.is_broken:
                raise KeyError("a bug")
            super().finished(*args)

    scheduler = Treacherous(64)
    engine = Engine(scheduler)
    engine.add(Where().servable, ModelStatistics())
    engine.start()
    await engine.infer(request())
    scheduler.is_broken = True
    for _ in range(2):
        with pytest.raises(DeviceLost, match="the engine has failed: KeyError"):
            await engine.infer(request())
    assert await engine.stop()


async def test_nothing_is_executed_at_once_while_bodies_come() -> None:
    where = Where()
    receiving = False
    async with engine_of(where.servable, receives=lambda: receiving) as engine:
        await engine.infer(request())
        receiving = True
        await engine.infer(request())
    assert where.by_the_loop == [True, False]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    folder = tmp_path_factory.mktemp("wide")
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "wide", [1, 2], folder / "cache")


def test_a_model_only_computes_if_no_batch_of_it_swaps(wide: Lowered) -> None:
    info = describe(wide, 1, 2)

    def servable(bench: Bench, *streaming: int) -> ProgramServable:
        plans = {b: streaming_plan(g) if b in streaming else resident_plan(g) for b, g in wide.graphs.items()}
        bases = Bases(0, max(plan.partition_bytes for plan in plans.values()))
        programs = {batch: bench.beside(wide, plan, bases) for batch, plan in plans.items()}
        return ProgramServable(info, programs, wide.inputs, wide.outputs, bench.executor)

    with opened(cpu, wide) as bench:
        assert servable(bench).only_computes
        assert not servable(bench, 2).only_computes
        bench.executor.changes_threads = False
        assert not servable(bench).only_computes
