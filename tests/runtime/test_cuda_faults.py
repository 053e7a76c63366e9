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
from tests.support.runtime.cuda_fake import FakeDriver, FakePool, pinned_array
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


RELEASES: dict[str, Callable[[FakeDriver, torch.Tensor, np.ndarray, FakePool], object]] = {
    "released that a queued copy uses": lambda driver, memory, host, pool: driver.free(memory),
    "unpinned that a queued copy uses": lambda driver, memory, host, pool: driver.unpin(host),
    "closed that queued kernels use": lambda driver, memory, host, pool: pool.close(),
}


@pytest.mark.parametrize("what", RELEASES)
def test_memory_that_is_released_while_it_is_in_use(bench: Bench, what: str) -> None:
    driver = driver_of(bench)
    memory, host, pool = driver.allocate(4096), pinned_array(driver, 4096), driver.pool(driver.allocate(4 * MIB), 0)
    driver.copy(memory, torch.from_numpy(host))
    with driver.on(bench.executor.streams.compute), driver.allocating(pool):  # type: ignore[attr-defined]
        driver.launch(lambda: None)
    with pytest.raises(AssertionError, match=what):
        RELEASES[what](driver, memory, host, pool)
    driver.drain()
    RELEASES[what](driver, memory, host, pool)
