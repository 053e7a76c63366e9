"""Faults planted in the backend, or in what calls it: the fake device finds what CUDA would refuse, or corrupt."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cohabit.runtime.cuda.executor import CudaExecutor
from cohabit.runtime.cuda.program import CudaProgram
from cohabit.runtime.errors import DeviceError
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime.backends import Bench, fake_cuda, opened
from tests.support.runtime.cuda_fake import FakeDriver, pinned_array
from tests.support.runtime.plans import streaming_plan

MIB = 1 << 20


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(fake_cuda, wide, 32 * MIB) as bench:
        yield bench
        driver_of(bench).drain()


def driver_of(bench: Bench) -> FakeDriver:
    driver = bench.backend.driver  # type: ignore[attr-defined]
    assert isinstance(driver, FakeDriver)
    return driver


def loaded(bench: Bench) -> CudaProgram:
    """A program whose epilogue is queued."""
    program = bench.program(evicting_plan(bench.graph))
    bench.run(program)
    assert isinstance(program, CudaProgram)
    return program


FORBIDDEN: dict[str, Callable[[FakeDriver], object]] = {
    "allocating": lambda driver: driver.allocate(64),
    "freeing": lambda driver: driver.free(torch.empty(0, dtype=torch.uint8)),
    "pinning": lambda driver: driver.pin(np.zeros(64, np.uint8)),
    "unpinning": lambda driver: driver.unpin(np.zeros(64, np.uint8)),
    "synchronizing": lambda driver: driver.drain(),
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_call_that_a_capture_forbids(bench: Bench, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """Planted: a program makes the call where it issues its first command, if that is captured."""
    performing = CudaProgram.performing

    def planted(program: CudaProgram, driver: Any, frame: Any) -> Any:
        perform = performing(program, driver, frame)

        def forbidden(command: Any) -> None:
            if driver.calls.count("capture"):
                FORBIDDEN[what](driver)
            perform(command)

        return forbidden

    monkeypatch.setattr(CudaProgram, "performing", planted)
    with pytest.raises(AssertionError, match=f"{what} is not permitted while capturing"):
        bench.program(streaming_plan(bench.graph))


def test_kernels_of_a_thread_that_was_not_adopted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the executor does not adopt the thread that calls it."""
    program = bench.program(resident_plan(bench.graph))
    monkeypatch.setattr(CudaExecutor, "_adopt_thread", lambda executor: None)
    driver_of(bench).uncapturable = "so that kernels are launched"
    errors: list[BaseException] = []

    def run() -> None:
        try:
            bench.run(program, traced=True)
        except DeviceError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "has not been adopted" in str(errors[0])


def test_a_graph_that_is_released_while_its_replay_is_queued(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: releasing a program does not wait for what is queued."""
    program, driver = loaded(bench), driver_of(bench)
    with driver.on(bench.backend.streams.compute):  # type: ignore[attr-defined]
        assert program.admission.graph is not None
        program.admission.graph.replay()
    monkeypatch.setattr(CudaExecutor, "settle", lambda executor: None)
    with pytest.raises(AssertionError, match="whose replay is queued"):
        bench.executor.release(program)
    monkeypatch.undo()
    driver_of(bench).drain()
    program.admission.graph = None  # the first that was released
    program.close(driver_of(bench))


def test_a_store_that_is_closed_while_copies_from_it_are_queued(bench: Bench) -> None:
    """Planted: the executor is not asked to settle before."""
    program, driver = loaded(bench), driver_of(bench)
    bench.executor.settle()
    with driver.on(bench.backend.streams.swap_in):  # type: ignore[attr-defined]
        for command in program.schedule.epilogue:
            program.copies[command.index]()
    with pytest.raises(AssertionError, match="unpinned that a queued copy uses"):
        bench.store.close()
    bench.executor.settle()


def test_an_arena_that_is_freed_while_copies_to_it_are_queued(bench: Bench) -> None:
    driver = driver_of(bench)
    memory, host = driver.allocate(4096), pinned_array(driver, 4096)
    driver.copy(memory, torch.from_numpy(host))
    with pytest.raises(AssertionError, match="released that a queued copy uses"):
        driver.free(memory)
    driver.drain()
    driver.free(memory)


def test_a_pool_that_is_closed_while_kernels_of_it_are_queued(bench: Bench) -> None:
    driver = driver_of(bench)
    pool = driver.pool(driver.allocate(4 * MIB), 0)
    compute = bench.executor._streams.compute  # type: ignore[attr-defined]
    with driver.on(compute), driver.allocating(pool):
        driver.launch(lambda: None)
    with pytest.raises(AssertionError, match="closed that queued kernels use"):
        pool.close()
    driver.drain()
    pool.close()


def test_a_lane_goes_on_while_another_one_captures(bench: Bench) -> None:
    """A capture is its thread's: a replay of another lane is not part of it. Nor may that lane use its streams."""
    first = bench.program(streaming_plan(bench.graph))
    other = bench.backend.executors(2)[1]
    driver, ended = driver_of(bench), list[object]()
    compute = bench.executor._streams.compute  # type: ignore[attr-defined]
    expected = bench.run(first).outputs[0]

    def elsewhere() -> None:
        ended.append(bench.run(first).outputs[0])
        with driver.on(own.compute):
            try:
                driver.record(driver.event())
            except AssertionError as error:
                ended.append(str(error))

    own = other._streams  # type: ignore[attr-defined]

    def issue() -> None:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    with driver.on(own.compute):
        graph = driver.capture(driver.pool(driver.allocate(MIB), 0), issue)
    assert compute is not own.compute
    assert torch.equal(ended[0], expected)  # type: ignore[arg-type]
    assert ended[1] == "another thread captures the stream"
    driver.release([graph])
