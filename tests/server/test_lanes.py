"""Compute lanes: models are assign_lanes among engines that share the limits, the device and nothing else."""

import asyncio
import itertools
import random
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from server.engine.lanes import Lanes
from server.engine.statistics import ModelStatistics
from server_fakes import FakeLoaded, FakeServable, Gate, config, identity, running
from server_http import infer, x

from server.config.config import ServeConfig
from server.errors import DeviceLost, ExecutionFailed, ModelNotFound, QueueFull, ShuttingDown
from server.models.prepared import threads_of
from server.observe.spans import header_events
from server.placement.lane_choice import assign_lanes
from server.placement.moves import Move, Vacate, vacate_all
from server.placement.partitions import Extent, Partitions
from server.protocol.model import Array, Execution, Footprint
from server.protocol.request import InferRequest

ROW_BYTES = 16


def request(model: str, value: float = 0.0) -> InferRequest:
    return InferRequest(model, 1, {"x": np.full((1, 4), value, np.float32)}, 1, ())


def gated(name: str) -> tuple[FakeServable, Gate]:
    gate = Gate()
    return FakeServable(identity(name, "FP32").info, gate), gate


def meeting(*names: str) -> list[FakeServable]:
    """Models each of which waits in its kernel until the others are there, too."""
    all_of_them = threading.Barrier(len(names), timeout=20)

    def meet(x: Array) -> dict[str, Array]:
        all_of_them.wait()
        return {"y": x}

    return [FakeServable(identity(name, "FP32").info, meet) for name in names]


@asynccontextmanager
async def lanes_of(
    placed: Mapping[str, tuple[FakeServable, int]], count: int = 2, queue_bytes: int | None = None
) -> AsyncIterator[Lanes]:
    lanes = Lanes(count, 64, queue_bytes)
    for servable, lane in placed.values():
        lanes.add(servable, ModelStatistics(), lane=lane)
    lanes.start()
    try:
        yield lanes
    finally:
        await lanes.stop()


def asked(lanes: Lanes, model: str, value: float = 0.0) -> "asyncio.Future[Execution]":
    return asyncio.ensure_future(lanes.infer(request(model, value)))


async def entered(gate: Gate) -> bool:
    return await asyncio.to_thread(gate.entered.wait, 10)


async def test_prefetching_ends_and_begins_on_every_lane() -> None:
    async with lanes_of({"a": (gated("a")[0], 0), "b": (gated("b")[0], 1)}) as lanes:
        for on in (False, True):
            lanes.prefetch(on)
            assert [lanes[lane]._device.prefetch for lane in range(len(lanes))] == [on, on]


# Who belongs where


@pytest.mark.parametrize("seed", range(20))
def test_no_lane_is_expected_to_do_more_than_four_thirds_of_what_the_best_division_would(seed: int) -> None:
    """Graham's bound, with the best division found by trying all."""
    draws = random.Random(seed)
    loads = [draws.choice([1.0, 2.0, 3.0, 5.0, 8.0]) for _ in range(7)]
    lanes = draws.choice([2, 3])

    def longest(division: tuple[int, ...] | list[int]) -> float:
        return max(sum(w for w, at in zip(loads, division, strict=True) if at == lane) for lane in range(lanes))

    best = min(longest(division) for division in itertools.product(range(lanes), repeat=len(loads)))
    assert longest(assign_lanes(loads, lanes)) <= best * 4 / 3
    assert assign_lanes(loads, lanes) == assign_lanes(list(loads), lanes)


def test_models_that_are_alike_take_turns_and_one_lane_takes_all() -> None:
    assert assign_lanes([1.0] * 5, 2) == [0, 1, 0, 1, 0]
    assert assign_lanes([4.0, 1.0, 1.0, 1.0], 2) == [0, 1, 1, 1]
    assert assign_lanes([3.0, 1.0], 1) == [0, 0]
    assert assign_lanes([], 2) == []


def test_each_lane_has_a_workspace_and_none_grows_under_models_that_use_it() -> None:
    partitions = Partitions(100, lanes=2)
    assert partitions.grow_workspace(20)
    assert not partitions.grow_workspace(51), "twice as much is more than the arena"
    assert partitions.workspaces == Extent(0, 40)
    assert partitions.take("a", 30) == Extent(70, 30)
    assert partitions.gaps() == [Extent(40, 30)]
    assert [room.workspace_bytes for room in partitions.rooms([10, 20, 25])] == [20]
    assert not partitions.grow_workspace(21), "the second lane's would begin elsewhere"
    partitions.release("a")
    assert partitions.grow_workspace(50)


def test_where_workspaces_move_everybody_leaves_before_the_first_one_comes() -> None:
    wanted = {"a": Extent(80, 20), "b": Extent(100, 0)}
    assert vacate_all(wanted) == [Vacate("a"), Vacate("b"), Move("a", wanted["a"]), Move("b", wanted["b"])]


# Side by side


async def test_models_of_two_lanes_compute_at_the_same_time() -> None:
    first, second = meeting("a", "b")
    async with lanes_of({"a": (first, 0), "b": (second, 1)}) as lanes:
        answers = await asyncio.gather(lanes.infer(request("a", 1)), lanes.infer(request("b", 2)))
        assert [answer.outputs["y"][0, 0] for answer in answers] == [1, 2]
        assert set(lanes.computed_s) == {"compute_0", "compute_1"}


async def test_models_of_one_lane_wait_for_each_other_and_nobody_else() -> None:
    (slow, gate), behind, beside = gated("slow"), identity("behind", "FP32"), identity("beside", "FP32")
    async with lanes_of({"s": (slow, 0), "b": (behind, 0), "o": (beside, 1)}) as lanes:
        first = asked(lanes, "slow")
        assert await entered(gate)
        waiting = asked(lanes, "behind")
        await asked(lanes, "beside")
        assert lanes.pending("behind") == 1
        assert behind.calls == []
        gate.open.set()
        await asyncio.gather(first, waiting)


async def test_chores_of_a_lane_are_done_by_its_thread_while_the_other_computes() -> None:
    (slow, gate), other = gated("slow"), identity("other", "FP32")
    async with lanes_of({"s": (slow, 0), "o": (other, 1)}) as lanes:
        running_one = asked(lanes, "slow")
        assert await entered(gate)
        threads = [await lanes[1].between(threading.get_ident) for _ in range(2)]
        assert threads[0] == threads[1]
        gate.open.set()
        await running_one
        assert await lanes[0].between(threading.get_ident) != threads[0]


async def test_one_lane_is_called_as_it_always_was() -> None:
    async with lanes_of({"a": (identity("a", "FP32"), 0)}, count=1) as lanes:
        await lanes.infer(request("a"))
        assert set(lanes.computed_s) == {"compute"}


# What they share


async def test_bytes_that_wait_are_limited_for_all_lanes_together() -> None:
    (a, gate_a), (b, gate_b) = gated("a"), gated("b")
    async with lanes_of({"a": (a, 0), "b": (b, 1)}, queue_bytes=2 * ROW_BYTES) as lanes:
        under_way = [asked(lanes, "a"), asked(lanes, "b")]
        assert await entered(gate_a)
        assert await entered(gate_b)
        waiting = [asked(lanes, "a"), asked(lanes, "b")]
        await asyncio.sleep(0)
        for model in "ab":
            with pytest.raises(QueueFull):
                await lanes.infer(request(model))
        gate_a.open.set()
        gate_b.open.set()
        await asyncio.gather(*under_way, *waiting)
        await lanes.infer(request("a"))


async def test_draining_refuses_on_every_lane_and_waits_for_every_answer() -> None:
    (a, gate_a), (b, gate_b) = gated("a"), gated("b")
    async with lanes_of({"a": (a, 0), "b": (b, 1)}) as lanes:
        answers = [asked(lanes, "a"), asked(lanes, "b")]
        assert await entered(gate_a)
        assert await entered(gate_b)
        draining = asyncio.ensure_future(lanes.drain(20))
        await asyncio.sleep(0)
        assert lanes.draining
        for model in "ab":
            with pytest.raises(ShuttingDown):
                await lanes.infer(request(model))
        gate_a.open.set()
        await answers[0]
        assert not draining.done()
        gate_b.open.set()
        assert await draining
        assert answers[1].done()


async def test_a_lane_that_does_not_end_in_time_is_told_of() -> None:
    slow, gate = gated("slow")
    async with lanes_of({"s": (slow, 1)}) as lanes:
        never = asked(lanes, "slow")
        assert await entered(gate)
        assert not await lanes.stop(0.01)
        with pytest.raises(ShuttingDown):
            await never
        gate.open.set()


async def test_a_fault_in_one_lane_is_nothing_to_the_other() -> None:
    def fail(x: Array) -> dict[str, Array]:
        raise RuntimeError("the kernel caught fire")

    broken = FakeServable(identity("broken", "FP32").info, fail)
    async with lanes_of({"b": (broken, 0), "o": (identity("other", "FP32"), 1)}) as lanes:
        outcomes = await asyncio.gather(
            *(lanes.infer(request(model)) for model in ("broken", "other", "broken", "other")),
            return_exceptions=True,
        )
        assert [isinstance(outcome, ExecutionFailed) for outcome in outcomes] == [True, False, True, False]
        assert lanes.lost is None


async def test_a_device_that_is_lost_is_lost_for_all_lanes() -> None:
    (slow, gate), dying = gated("slow"), identity("dying", "FP32")
    async with lanes_of({"s": (slow, 0), "d": (dying, 1)}) as lanes:
        under_way = asked(lanes, "slow")
        assert await entered(gate)
        dying.lost = "it fell off the bus"
        await lanes.infer(request("dying"))
        with pytest.raises(DeviceLost):
            await under_way
        assert lanes.lost == "it fell off the bus"
        for model in ("slow", "dying"):
            with pytest.raises(DeviceLost):
                await lanes.infer(request(model))
        gate.open.set()


async def test_a_model_that_comes_back_may_belong_to_another_lane() -> None:
    threads: list[int] = []

    def note(x: Array) -> dict[str, Array]:
        threads.append(threading.get_ident())
        return {"y": x}

    servable = FakeServable(identity("m", "FP32").info, note)
    async with lanes_of({"m": (servable, 0)}) as lanes:
        await lanes.infer(request("m"))
        lanes.remove("m")
        with pytest.raises(ModelNotFound):
            await lanes.infer(request("m"))
        assert lanes.correction("m") == 1.0
        lanes.add(servable, ModelStatistics(), lane=1)
        await lanes.infer(request("m"))
        assert await lanes.finish("m", 10)
        assert threads == [await lanes[lane].between(threading.get_ident) for lane in range(2)]


# What the operator sees


def test_a_server_of_two_lanes_answers_for_the_models_of_both() -> None:
    footprints = {"a": Footprint(lane=0), "b": Footprint(lane=1)}
    loaded = FakeLoaded({s.info.name: s for s in meeting("a", "b")}, footprints=footprints)
    with running(loaded, compute_lanes=2) as server, ThreadPoolExecutor(2) as clients:
        answers = clients.map(lambda name: infer(server, name, {"inputs": [x()]}), "ab")
        assert [answer.status for answer in answers] == [200, 200]
        assert set(server.server._use().lane_busy_s) == {"compute_0", "compute_1", "swap_in"}


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

    assert [threads(cores) for cores in (1, 2, 8)] == [1, 1, 7]
    assert [threads(cores, compute_lanes=2) for cores in (1, 2, 8)] == [1, 1, 3]
    assert threads(8, compute_lanes=2, threads=5) == 5


def test_one_lane_is_the_default() -> None:
    assert ServeConfig(Path("r"), config().memory).compute_lanes == 1
