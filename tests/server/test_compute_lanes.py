"""Several compute lanes: which model runs where, what lanes share, and what a fault of one means for the others."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from cohabit.server.deploy.load import assign_lanes
from cohabit.server.deploy.prepare import threads_of
from cohabit.server.errors import ExecutionFailed, ModelNotFound
from cohabit.server.ipc.model import Array, ModelFootprint, ModelKey
from cohabit.server.ipc.request import Answer
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.observe.spans import header_events
from cohabit.server.process.engine import Engine
from tests.server.test_compute_lane import entered, gated, request
from tests.support.server.server_fakes import FakeLoaded, FakeServable, Gate, config, identity, refused, running
from tests.support.server.server_http import infer, x

pytestmark = pytest.mark.process


def meeting(*names: str) -> list[FakeServable]:
    """Models each of which waits during its execution until the others are executed, too."""
    all_of_them = threading.Barrier(len(names), timeout=20)

    def meet(x: Array) -> dict[str, Array]:
        all_of_them.wait()
        return {"y": x}

    return [FakeServable(identity(name, "FP32").info, meet) for name in names]


@asynccontextmanager
async def engine_with(placed: Mapping[int, tuple[FakeServable, ...]]) -> AsyncIterator[Engine]:
    """An engine that has loaded nothing, and whose two lanes serve these models."""
    engine = Engine(config(compute_lanes=2), lambda entry: None)
    for lane, servables in placed.items():
        for servable in servables:
            engine.lanes[lane].add(servable, ModelStatistics())
    for lane in engine.lanes:
        lane.start()
    try:
        yield engine
    finally:
        await engine.stop()


def asked(engine: Engine, model: str, value: float = 0.0) -> "asyncio.Task[Answer]":
    return asyncio.create_task(engine.infer(request(model, value)))


@asynccontextmanager
async def both_busy() -> AsyncIterator[tuple[Engine, list[Gate], list["asyncio.Task[Answer]"]]]:
    """Two lanes that execute the models `a` and `b`, until their gates are opened."""
    (a, gate_a), (b, gate_b) = gated("a"), gated("b")
    async with engine_with({0: (a,), 1: (b,)}) as engine:
        under_way = [asked(engine, "a"), asked(engine, "b")]
        await entered(gate_a)
        await entered(gate_b)
        try:
            yield engine, [gate_a, gate_b], under_way
        finally:
            gate_a.open.set()
            gate_b.open.set()


# Which model runs where.


@pytest.mark.parametrize("seed", range(20))
def test_no_lane_has_more_than_four_thirds_of_the_best_divisions_longest_load(seed: int) -> None:
    """Graham's bound; the best division is found by trying all."""
    draws = random.Random(seed)
    loads = [draws.choice([1.0, 2.0, 3.0, 5.0, 8.0]) for _ in range(7)]
    lanes = draws.choice([2, 3])

    def longest(division: tuple[int, ...] | list[int]) -> float:
        return max(sum(w for w, at in zip(loads, division, strict=True) if at == lane) for lane in range(lanes))

    best = min(longest(division) for division in itertools.product(range(lanes), repeat=len(loads)))
    assert longest(assign_lanes(loads, [0.0] * lanes)) <= best * 4 / 3


def test_equal_models_alternate_and_one_lane_takes_all() -> None:
    assert assign_lanes([1.0] * 5, [0.0] * 2) == [0, 1, 0, 1, 0]
    assert assign_lanes([4.0, 1.0, 1.0, 1.0], [0.0] * 2) == [0, 1, 1, 1]
    assert assign_lanes([3.0, 1.0], [0.0]) == [0, 0]
    assert assign_lanes([], [0.0, 0.0]) == []
    assert assign_lanes([1.0, 1.0], [3.0, 1.5]) == [1, 1], "next to what is there"


async def test_a_model_that_is_loaded_again_may_belong_to_another_lane() -> None:
    threads: list[int] = []

    def note(x: Array) -> dict[str, Array]:
        threads.append(threading.get_ident())
        return {"y": x}

    servable = FakeServable(identity("m", "FP32").info, note)
    key = ModelKey("m", 1)
    async with engine_with({0: (servable,)}) as engine:
        await engine.infer(request("m"))
        engine.lanes[0].remove(key)
        with pytest.raises(ModelNotFound):
            await engine.infer(request("m"))
        assert engine.lane_of(key).correction(key) == 1.0
        engine.lanes[1].add(servable, ModelStatistics())
        await engine.infer(request("m"))
        assert await engine.lane_of(key).finish(key, 10)
        assert threads == [await lane.call_on_lane(threading.get_ident) for lane in engine.lanes]


async def test_a_cancelled_request_of_a_model_that_was_unloaded_meanwhile_ends_with_its_execution() -> None:
    slow, gate = gated("slow")
    async with engine_with({1: (slow,)}) as engine:
        sent = request("slow")
        running = asyncio.create_task(engine.infer(sent))
        await entered(gate)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        engine.lanes[1].remove(ModelKey("slow", 1))
        ending = asyncio.create_task(engine.ended(sent))
        await asyncio.wait([ending], timeout=0.1)
        assert not ending.done(), "the execution uses the request's memory"
        gate.open.set()
        await ending


# Parallel execution.


async def test_models_of_two_lanes_compute_at_the_same_time() -> None:
    first, second = meeting("a", "b")
    async with engine_with({0: (first,), 1: (second,)}) as engine:
        answers = await asyncio.gather(engine.infer(request("a", 1)), engine.infer(request("b", 2)))
        assert [answer.outputs["y"][0, 0] for answer in answers] == [1, 2]
        assert [answer.timing.lane for answer in answers] == [0, 1]
        assert engine.report().device.lane_busy_s.keys() == {"compute_0", "compute_1"}


async def test_requests_and_chores_wait_for_their_own_lane_only() -> None:
    (slow, gate), queued, other = gated("slow"), identity("queued", "FP32"), identity("other", "FP32")
    async with engine_with({0: (slow, queued), 1: (other,)}) as engine:
        first = asked(engine, "slow")
        await entered(gate)
        waiting = asked(engine, "queued")
        await asked(engine, "other")
        thread = await engine.lanes[1].call_on_lane(threading.get_ident)
        assert engine.lanes[0].pending(ModelKey("queued", 1)) == 1
        assert queued.calls == []
        gate.open.set()
        await asyncio.gather(first, waiting)
        assert await engine.lanes[0].call_on_lane(threading.get_ident) != thread


def test_a_single_lane_has_no_number() -> None:
    engine = Engine(config(), lambda entry: None)
    assert engine.report().device.lane_busy_s.keys() == {"compute"}


# The end.


async def test_a_lane_that_does_not_end_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cohabit.server.process.engine._THREADS_END_S", 0.0)
    slow, gate = gated("slow")
    async with engine_with({1: (slow,)}) as engine:
        never = asked(engine, "slow")
        await entered(gate)
        assert not await engine.stop()
        with refused("ShuttingDown"):
            await never
        gate.open.set()


async def test_a_failed_execution_in_one_lane_does_not_touch_the_other() -> None:
    def fail(x: Array) -> dict[str, Array]:
        raise RuntimeError("the kernel caught fire")

    broken = FakeServable(identity("broken", "FP32").info, fail)
    async with engine_with({0: (broken,), 1: (identity("other", "FP32"),)}) as engine:
        outcomes = await asyncio.gather(
            *(engine.infer(request(model)) for model in ("broken", "other", "broken", "other")),
            return_exceptions=True,
        )
        assert [isinstance(outcome, ExecutionFailed) for outcome in outcomes] == [True, False, True, False]
        assert engine.lost is None


async def test_a_device_that_is_lost_is_lost_for_all_lanes() -> None:
    async with both_busy() as (engine, gates, (a, b)):
        dying = identity("dying", "FP32")
        dying.lost = "it fell off the bus"
        engine.lanes[1].add(dying, ModelStatistics())
        last = asked(engine, "dying")
        gates[1].open.set()
        await asyncio.gather(b, last)
        with refused("DeviceUnavailable"):
            await a
        assert engine.lost == "it fell off the bus"
        for model in ("a", "b", "dying"):
            with refused("DeviceUnavailable"):
                await engine.infer(request(model))


# What the operator sees.


def test_a_server_with_two_lanes_serves_the_models_of_both() -> None:
    footprints = {ModelKey("a", 1): ModelFootprint(lane=0), ModelKey("b", 1): ModelFootprint(lane=1)}
    loaded = FakeLoaded({s.info.key: s for s in meeting("a", "b")}, footprints=footprints)
    with running(loaded, compute_lanes=2) as server, ThreadPoolExecutor(2) as clients:
        answers = clients.map(lambda name: infer(server, name, {"inputs": [x()]}), "ab")
        assert [answer.status for answer in answers] == [200, 200]
        busy_s = server.engine.report().device.lane_busy_s
        assert busy_s.keys() == {"compute_0", "compute_1", "swap_in"}


def test_traces_have_tracks_for_every_lane() -> None:
    def names(lanes: int) -> dict[int, str]:
        return {e["tid"]: e["args"]["name"] for e in header_events(lanes) if e["name"] == "thread_name"}

    assert list(names(1).values()) == ["compute lane", "swap-in lane", "swap-out lane"]
    assert len(names(2)) == 6
    assert {"compute lane 0", "compute lane 1", "swap-in lane 1"} < set(names(2).values())


def test_lanes_divide_the_cores_that_one_lane_would_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(cores: int, **changes: object) -> int:
        monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
        return threads_of(config(**changes))

    assert config().compute_lanes == 1
    assert [threads(cores) for cores in (1, 2, 8)] == [1, 1, 7]
    assert [threads(cores, compute_lanes=2) for cores in (1, 2, 8)] == [1, 1, 3]
    assert threads(8, compute_lanes=2, threads=5) == 5
