"""Executors of one device that share its arena, each with a workspace and a thread of its own."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Executor
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.errors import DeviceError, DeviceLost
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import Copy, HostStore
from cohabit.runtime.stores.host import LimitedStore, Links
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime.backends import BACKENDS, ROOM_BYTES, Bench, cpu, opened
from tests.support.runtime.cuda_fake import FakeDriver
from tests.support.runtime.plans import streaming_plan, with_room
from tests.support.runtime.stores import FailingStore, WatchedStore

WORKSPACE_BYTES = 14 << 20
PARTITIONS = (32 << 20, 48 << 20)
RUNS = 12


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, wide: Lowered) -> Iterator[Bench]:
    with opened(request.param, wide) as bench:
        yield bench


def placed(bench: Bench, plan: Plan, lane: int, store: HostStore[Any] | None = None) -> Program:
    """A model of its own on a lane, with its residents there."""
    lowered = replace(bench.lowered, name=f"model {lane}")
    roomy = with_room(plan, ROOM_BYTES)
    assert roomy.memory.workspace_bytes <= WORKSPACE_BYTES
    bases = Bases(PARTITIONS[lane], lane * WORKSPACE_BYTES)
    program = bench.backend.build(lowered, roomy, None, bench.arena, bases, store or bench.store)
    bench.backend.executors(2)[lane].load(program)
    return program


def answers(bench: Bench, executor: Executor, program: Program) -> list[torch.Tensor]:
    outputs = []
    for _ in range(RUNS):
        outputs += executor.run(program, bench.lowered.examples(Bucket(2))).outputs
    executor.settle()
    return outputs


def side_by_side(bench: Bench, programs: Sequence[Program]) -> list[list[torch.Tensor]]:
    """Each program's answers, by the executor of its lane on a thread of its own."""
    together = threading.Barrier(len(programs), timeout=20)

    def run(executor: Executor, program: Program) -> list[torch.Tensor]:
        together.wait()
        return answers(bench, executor, program)

    with ThreadPoolExecutor(len(programs)) as threads:
        return list(threads.map(run, bench.backend.executors(len(programs)), programs))


def test_lanes_side_by_side_give_the_bits_of_a_resident_run(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    plans = (streaming_plan(bench.graph, frozenset({0, 3})), evicting_plan(bench.graph))
    programs = [placed(bench, plan, lane) for lane, plan in enumerate(plans)]
    for outputs in side_by_side(bench, programs):
        assert len(outputs) == RUNS
        assert all(torch.equal(output, expected) for output in outputs)


def test_a_failed_copy_of_one_lane_leaves_the_other_alone(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    store = FailingStore(bench.lowered.weights_path, bench.lowered.manifest)
    broken = placed(bench, evicting_plan(bench.graph), 0, bench.host(store))
    sound = placed(bench, evicting_plan(bench.graph), 1)
    first, second = bench.backend.executors(2)
    store.failing = True
    with pytest.raises(DeviceError, match="medium error"):
        first.run(broken, bench.lowered.examples(Bucket(2)))
    assert all(torch.equal(output, expected) for output in answers(bench, second, sound))
    store.failing = False
    assert all(torch.equal(output, expected) for output in answers(bench, first, broken))


def test_a_device_that_one_lane_has_lost_is_lost_for_the_other(wide: Lowered) -> None:
    driver = FakeDriver()
    with opened(lambda: CudaBackend(driver), wide) as bench:
        programs = [placed(bench, evicting_plan(bench.graph), lane) for lane in range(2)]
        first, second = bench.backend.executors(2)
        driver.broken = "unspecified launch failure"
        with pytest.raises(DeviceLost):
            first.run(programs[0], bench.lowered.examples(Bucket(2)))
        assert second.lost == first.lost is not None
        with pytest.raises(DeviceLost, match="restart the server"):
            second.run(programs[1], bench.lowered.examples(Bucket(2)))


def test_a_program_is_admitted_while_the_other_lane_replays(wide: Lowered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who allocates or captures holds the device's lock; a replay, which does neither, does not wait for it."""
    driver = FakeDriver()
    with opened(lambda: CudaBackend(driver), wide) as bench, ThreadPoolExecutor(1) as other:
        program = placed(bench, evicting_plan(bench.graph), 0)
        first, _ = bench.backend.executors(2)
        examples = bench.lowered.examples(Bucket(2))
        pool, meetings = driver.pool, []

        def meet(memory: torch.Tensor, large_bytes: int) -> Any:
            meetings.append(other.submit(first.run, program, examples).result(20))
            return pool(memory, large_bytes)

        other.submit(first.run, program, bench.lowered.examples(Bucket(2))).result(20)  # its thread is adopted
        monkeypatch.setattr(driver, "pool", meet)
        placed(bench, evicting_plan(bench.graph), 1)
        assert meetings


def test_a_link_with_a_limit_carries_one_copy_at_a_time_whichever_lane_asks(wide: Lowered) -> None:
    busy, both = threading.Lock(), threading.Barrier(2, timeout=20)
    met: set[int] = set()

    class Exclusive(WatchedStore):
        def around(self, segment: int, destination: Any, copy: Copy) -> None:
            assert busy.acquire(blocking=False), "two copies at once"
            copy()
            busy.release()

    class Meeting(WatchedStore):
        def around(self, segment: int, destination: Any, copy: Copy) -> None:
            if threading.get_ident() not in met and threading.current_thread().name == "swap-in" and meeting:
                both.wait()
                met.add(threading.get_ident())
            copy()

    with opened(cpu, wide) as bench:
        links, meeting = Links(), False
        store = Exclusive(wide.weights_path, wide.manifest)
        limited = [LimitedStore(store, 1e12, links) for _ in range(2)]
        plan = streaming_plan(bench.graph)
        side_by_side(bench, [placed(bench, plan, lane, limited[lane]) for lane in range(2)])
        programs = [placed(bench, plan, lane, Meeting(wide.weights_path, wide.manifest)) for lane in range(2)]
        meeting = True
        side_by_side(bench, programs)
        assert len(met) == 2, "without a limit two lanes copy at once"


def test_every_store_of_a_backend_shares_its_link(wide: Lowered) -> None:
    backend = CpuBackend(link_bandwidth_bytes_per_s=1e9)
    first, second = (backend.open_store("ram", wide.weights_path, wide.manifest) for _ in range(2))
    assert isinstance(first, LimitedStore)
    assert isinstance(second, LimitedStore)
    assert first._links is second._links
