"""What the CUDA executor does beyond the conformance suite: order of copies between inferences, faults, admission."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Capture, Result
from cohabit.runtime.binding.program import Bases
from cohabit.runtime.cuda import transfers
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.program import MOST_SCRATCH_BYTES, CudaProgram
from cohabit.runtime.cuda.transfers import Transfers
from cohabit.runtime.errors import DeviceError, DeviceLost, MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.options import Options
from tests.runtime.test_executor import evicting_plan
from tests.support.runtime.backends import Bench, fake_cuda, fake_streams, opened
from tests.support.runtime.cuda_fake import FakeDriver, FakeGraph
from tests.support.runtime.plans import streaming_plan

MIB = 1 << 20


@pytest.fixture
def bench(narrow: Lowered) -> Iterator[Bench]:
    with opened(fake_cuda, narrow, 16 * MIB) as bench:
        yield bench


def driver_of(bench: Bench) -> FakeDriver:
    assert isinstance(bench.backend, CudaBackend)
    assert isinstance(bench.backend.driver, FakeDriver)
    return bench.backend.driver


def beside(bench: Bench, plan: object, offset: int, name: str) -> CudaProgram:
    """Another model of the same weights, in another part of the arena; the workspace is the last."""
    lowered = replace(bench.lowered, name=name)
    program = bench.backend.build(lowered, plan, None, bench.arena, Bases(offset, 12 * MIB), bench.store)  # type: ignore[arg-type]
    bench.executor.load(program)
    assert isinstance(program, CudaProgram)
    return program


def test_the_epilogue_is_issued_after_the_outputs_and_waited_for_by_the_next_run(bench: Bench) -> None:
    program = beside(bench, evicting_plan(bench.graph), 0, "a")
    driver = driver_of(bench)
    driver.calls.clear()
    bench.run(program)
    run = ["wait", "record", "replay", "record", "synchronize"]
    assert driver.calls[: len(run)] == run
    bench.executor.settle()
    assert {"copy", "record", "synchronize"} >= set(driver.calls[len(run) :]) > {"record"}
    driver.calls.clear()
    bench.run(program)
    assert driver.calls[: len(run)] == run


def test_a_restore_gives_way_to_the_copies_of_an_inference_and_is_complete_before_its_model_s_next(
    bench: Bench,
) -> None:
    """While an inference copies, nothing is issued in the background; the model itself issues what is left."""
    assert isinstance(bench.backend, CudaBackend)
    issued: list[str] = []
    transfers = Transfers(bench.backend.streams, clock=lambda: 0.0)
    transfers.pause(1.0)
    transfers.submit("a", [partial(issued.append, f"a{n}") for n in range(3)])
    transfers.submit("b", [partial(issued.append, "b0")])
    assert issued == []
    first = transfers.take("a")
    assert issued == ["a0", "a1", "a2"]
    assert transfers.take("a") is None
    transfers.pause(0.0)
    transfers.close()
    assert issued == ["a0", "a1", "a2", "b0"], "what was paused goes on by itself"
    assert first is not None
    assert first.error is None
    bench.backend.driver.synchronize(first.event)


def test_copies_of_a_restore_are_pieces_of_a_limited_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program = beside(bench, evicting_plan(bench.graph), 0, "a")
    copies = (*program.schedule.epilogue, *program.schedule.residents)
    sizes = [program.schedule.copies[copy].nbytes for copy in copies]
    monkeypatch.setattr(transfers, "_PIECE_BYTES", max(sizes))
    assert len(transfers.pieces_of(program, copies)) == len(copies) > 1
    monkeypatch.setattr(transfers, "_PIECE_BYTES", sum(sizes))
    assert len(transfers.pieces_of(program, copies)) == 1


def test_a_graph_that_gets_no_memory_refuses_the_load(bench: Bench) -> None:
    """It used to be a warning, and the model was served several times slower."""
    driver = driver_of(bench)
    pinned_bytes, pools = driver.pinned_bytes, driver.open_pools
    driver.graph_bytes = 1 << 40
    with pytest.raises(MemoryExceeded, match="got no memory"):
        beside(bench, streaming_plan(bench.graph), 0, "a")
    assert (driver.pinned_bytes, driver.open_pools, driver.graphs) == (pinned_bytes, pools, 0)
    driver.graph_bytes = 0
    beside(bench, streaming_plan(bench.graph), 0, "a")


def test_residents_that_are_loaded_again_are_one_launch(bench: Bench) -> None:
    program = beside(bench, evicting_plan(bench.graph), 0, "a")
    expected = bench.run(program).outputs[0]
    driver = driver_of(bench)
    bench.executor.settle()
    assert bench.arena is not None
    for step in program.residents:
        bench.arena.bytes(step.offset, step.nbytes).fill_(1)
    driver.calls.clear()
    bench.executor.load(program)
    assert driver.calls == ["replay", "record", "synchronize"]
    assert torch.equal(bench.run(program).outputs[0], expected)


def test_a_released_program_leaves_neither_graphs_nor_memory(bench: Bench) -> None:
    driver = driver_of(bench)
    pinned_bytes, pools = driver.pinned_bytes, driver.open_pools
    program = beside(bench, evicting_plan(bench.graph), 0, "a")
    assert driver.graphs == 2, "the inference, its residents"
    assert driver.pinned_bytes > pinned_bytes
    driver.calls.clear()
    bench.executor.release(program)
    assert (driver.graphs, driver.pinned_bytes, driver.open_pools) == (0, pinned_bytes, pools)
    assert driver.calls.count("release") == 1, "workspaces are made again once"


def test_a_program_is_issued_and_captured_with_its_own_tf32(bench: Bench) -> None:
    own = replace(bench, lowered=replace(bench.lowered, options=Options(tf32="cudnn")))
    program = beside(own, streaming_plan(bench.graph), 0, "a")
    assert set(driver_of(bench).tf32_allowed) == {program.tf32} == {"cudnn"}


def test_a_lost_device_is_said_to_every_request(bench: Bench) -> None:
    program = beside(bench, streaming_plan(bench.graph), 0, "a")
    assert bench.executor.lost is None
    driver_of(bench).broken = "unspecified launch failure"
    for _ in range(2):
        with pytest.raises(DeviceLost, match="unspecified launch failure"):
            bench.run(program)
    assert "unspecified launch failure" in (bench.executor.lost or "")
    with pytest.raises(DeviceLost):
        bench.executor.load(program)


def test_a_failed_kernel_costs_one_request(bench: Bench) -> None:
    program = beside(bench, evicting_plan(bench.graph), 0, "a")
    expected = bench.run(program).outputs[0]
    driver = driver_of(bench)
    driver.kernel_bytes = 1 << 40
    with pytest.raises(DeviceError, match="a: out of the pool's memory"):
        bench.run(program)
    driver.kernel_bytes = 0
    assert torch.equal(bench.run(program).outputs[0], expected)


def test_inputs_of_another_shape_never_reach_the_device(bench: Bench) -> None:
    program = beside(bench, streaming_plan(bench.graph), 0, "a")
    driver = driver_of(bench)
    driver.calls.clear()
    with pytest.raises(DeviceError, match=r"input x is torch.float32 of shape \(1, 264\), the program takes"):
        bench.executor.run(program, [torch.zeros(1, 264)])
    assert not {"replay", "launch"} & set(driver.calls)


def test_what_could_not_be_captured_says_why_and_runs(narrow: Lowered, caplog: pytest.LogCaptureFixture) -> None:
    with opened(fake_streams, narrow, 16 * MIB) as bench:
        program = beside(bench, streaming_plan(bench.graph), 0, "a")
        assert program.admission.refused == "the test says so"
        (event,) = [r for r in caplog.records if r.name == "cohabit.cuda" and r.levelname == "WARNING"]
        assert event.fields == {"model": "a", "batch": "2", "reason": "the test says so"}  # type: ignore[attr-defined]
        driver = driver_of(bench)
        driver.calls.clear()
        bench.run(program)
        assert "replay" not in driver.calls


def test_a_library_that_keeps_bytes_of_the_workspace_is_found_at_load(bench: Bench) -> None:
    driver = driver_of(bench)
    make = driver.pool

    def leaking(memory: torch.Tensor, large_bytes: int) -> object:
        pool = make(memory, large_bytes)
        pool.held_bytes = 32 * MIB
        return pool

    driver.pool = leaking  # type: ignore[assignment, method-assign]
    with pytest.raises(DeviceError, match=r"a library keeps 32\.0 MiB of its workspace"):
        beside(bench, streaming_plan(bench.graph), 0, "a")


def test_a_served_model_is_refused_where_a_kernel_would_silently_be_replaced(bench: Bench) -> None:
    """A plan of the library that gets no memory is followed by one with other bits."""
    driver = driver_of(bench)
    driver.plan_bytes = (32 << 20, 0)
    with pytest.raises(MemoryExceeded, match=r"wanted 32\.0 MiB more than the"):
        beside(bench, streaming_plan(bench.graph), 0, "a")


def test_a_kernel_that_wants_more_than_any_may_have_is_passed_over(bench: Bench) -> None:
    """It was when the model was measured, too, and so it is at every budget."""
    driver_of(bench).plan_bytes = (MOST_SCRATCH_BYTES + 1, 0)
    beside(bench, streaming_plan(bench.graph), 0, "a")


def test_stalls_are_what_an_inference_takes_beyond_its_kernels(bench: Bench) -> None:
    program = beside(bench, streaming_plan(bench.graph), 0, "a")
    slow = replace(program, compute_s=10.0)
    assert bench.run(slow).stall_s == 0.0
    result = bench.run(replace(program, compute_s=1e-9))
    assert result.stall_s == pytest.approx(result.device_s)


@pytest.mark.parametrize("names_processes", [True, False])
def test_what_lies_outside_of_the_arena_is_measured_when_programs_are_loaded_and_released(
    narrow: Lowered, names_processes: bool
) -> None:
    driver = FakeDriver()
    driver.context_bytes, driver.graph_bytes, driver.names_processes = 500 * MIB, MIB, names_processes
    with opened(lambda: CudaBackend(driver), narrow, 16 * MIB) as bench:
        assert bench.backend.outside_bytes == 500 * MIB
        program = beside(bench, evicting_plan(bench.graph), 0, "a")
        assert bench.backend.outside_bytes == 502 * MIB, "with two graphs"
        bench.executor.release(program)
        assert bench.backend.outside_bytes == 500 * MIB


def test_a_captured_program_says_what_its_graph_takes_and_another_why_there_is_none(bench: Bench) -> None:
    driver = driver_of(bench)
    driver.graph_bytes = 1000
    captured = beside(bench, streaming_plan(bench.graph), 0, "a")
    assert bench.executor.capture(captured) == Capture(1, 1000, None)
    driver.uncapturable = "an op asks the host"
    refused = beside(bench, resident_plan(bench.graph), 4 * MIB, "b")
    assert bench.executor.capture(refused) == Capture(0, 0, "an op asks the host")
    bench.executor.release(captured)
    assert bench.executor.capture(captured) is None
    assert driver.graphs == 0


# Inferences that are launched ahead.


def launched(bench: Bench, program: CudaProgram) -> Callable[[], Result]:
    found = bench.executor.begin(program, bench.lowered.examples(Bucket(2)))
    assert not isinstance(found, Result)
    return found


def breaking(program: CudaProgram) -> None:
    """From now on, a kernel of the program fails."""

    def fail() -> None:
        raise RuntimeError("a kernel failed")

    graph = program.admission.graph
    assert isinstance(graph, FakeGraph)
    graph.fails = fail


def test_a_graph_is_launched_before_the_one_ahead_of_it_has_ended(bench: Bench) -> None:
    a, b = (beside(bench, evicting_plan(bench.graph), at * MIB, name) for at, name in ((0, "a"), (4, "b")))
    expected = bench.run(a).outputs[0]
    bench.run(b)
    bench.executor.settle()
    driver = driver_of(bench)
    driver.calls.clear()
    first = launched(bench, a)
    assert bench.executor.launches_ahead(b)
    assert not bench.executor.launches_ahead(a), "its buffers are in use, and its residents are not restored"
    second = launched(bench, b)
    assert driver.calls == ["wait", "record", "replay", "record"] * 2, "the host has waited for nothing"
    assert torch.equal(second().outputs[0], expected)
    assert torch.equal(first().outputs[0], expected)


def test_a_program_that_cannot_be_launched_ahead_first_waits(bench: Bench) -> None:
    a = beside(bench, evicting_plan(bench.graph), 0, "a")
    expected = bench.run(a).outputs[0]
    waits = [launched(bench, a) for _ in range(5)]
    assert len(bench.executor._flights) == 1  # type: ignore[attr-defined]
    for wait in waits:
        assert torch.equal(wait().outputs[0], expected)
    first = launched(bench, a)
    traced = bench.run(a, traced=True)
    assert traced.timeline is not None
    assert torch.equal(first().outputs[0], expected)


@pytest.mark.parametrize("does", ["load", "release", "invalidate", "settle"])
def test_whatever_else_the_device_does_first_waits_for_what_was_launched(bench: Bench, does: str) -> None:
    a, b = (beside(bench, evicting_plan(bench.graph), at * MIB, name) for at, name in ((0, "a"), (4, "b")))
    expected = bench.run(a).outputs[0]
    waits = [launched(bench, program) for program in (a, b)]
    arguments = () if does == "settle" else (a,)
    getattr(bench.executor, does)(*arguments)
    assert not bench.executor._flights  # type: ignore[attr-defined]
    for wait in waits:
        assert torch.equal(wait().outputs[0], expected), "the answers are kept"


def test_a_failed_inference_fails_alone_among_those_launched(bench: Bench) -> None:
    places = ((0, "a"), (2, "b"), (4, "c"))
    a, b, c = (beside(bench, evicting_plan(bench.graph), at * MIB, name) for at, name in places)
    expected = bench.run(a).outputs[0]
    for programs in ((a, b), (b, a)):
        breaking(a)
        waits = {program.name: launched(bench, program) for program in programs}
        with pytest.raises(DeviceError, match="a kernel failed"):
            waits["a"]()
        assert torch.equal(waits["b"]().outputs[0], expected)
        for program in (a, b, c):
            assert torch.equal(bench.run(program).outputs[0], expected)


def test_a_lost_device_is_said_to_every_inference_launched(bench: Bench) -> None:
    a, b = (beside(bench, evicting_plan(bench.graph), at * MIB, name) for at, name in ((0, "a"), (4, "b")))
    waits = [launched(bench, program) for program in (a, b)]
    driver_of(bench).broken = "unspecified launch failure"
    for wait in (*waits, *waits):
        with pytest.raises(DeviceLost):
            wait()
    assert "unspecified launch failure" in (bench.executor.lost or "")
    driver_of(bench).broken = None  # nothing else ends what is queued
    driver_of(bench).drain()
    driver_of(bench).broken = "lost"
