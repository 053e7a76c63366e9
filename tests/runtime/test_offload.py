"""Activations that leave memory while a program runs, and come back: the same bits in less memory, however late."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

import cohabit.runtime.measure.link
import cohabit.runtime.stores.host
from cohabit.planner.check import check
from cohabit.planner.plan import Compute, Drop, SwapIn, SwapOut
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import DeviceError, UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.measure.link import measure_swap_out
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import SpillBuffer, StoreKind
from cohabit.runtime.recording import Recording
from cohabit.runtime.stores.host import LimitedStore, Links, RamStore, open_store
from tests.support.planner.reference import live_bytes
from tests.support.runtime.backends import Bench, cpu, opened
from tests.support.runtime.observing import addresses, note_held, on_one_thread
from tests.support.runtime.plans import offloading_plan

SPILLING = [
    "in_place",
    "tied",
    "lstm",
    "attention",
    "scalar",
    "large_layers",
    "own_sums",
    "residual",
]
"""Models some of whose activations are not used by every op that runs while they are alive: views, changes in place."""


@pytest.fixture
def lowered(constructs: dict[str, Lowered]) -> dict[str, Lowered]:
    return constructs


@pytest.fixture
def bench(lowered: dict[str, Lowered]) -> Iterator[Bench]:
    """Sums, activations in place and views of halves."""
    with opened(cpu, lowered["own_sums"]) as bench:
        yield bench


def resident_outputs(bench: Bench) -> list[torch.Tensor]:
    return bench.run(bench.program(resident_plan(bench.graph))).outputs


def is_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["ram", "file"])
@pytest.mark.parametrize("name", SPILLING)
def test_activations_that_travel_give_the_same_bits(
    name: str, kind: StoreKind, lowered: dict[str, Lowered]
) -> None:
    with opened(cpu, lowered[name]) as bench:
        expected = resident_outputs(bench)
        plan = offloading_plan(bench.graph)
        check(bench.graph, None, plan)
        store = bench.backend.open_store(kind, bench.lowered.weights_path, bench.lowered.manifest)
        program = bench.program(plan, store)
        assert program.swap_outs
        for ran in (program, on_one_thread(program), program, on_one_thread(program)):
            assert is_equal(bench.run(ran).outputs, expected)
        store.close()


def holding(
    bench: Bench, program: Program, lanes: Callable[[Program], Program] = lambda program: program
) -> dict[int, int]:
    """Bytes of the storages outside of the arena before each compute step, by the plan's step."""
    held: dict[int, int] = {}
    bench.run(lanes(note_held(held, program, addresses(bench.arena))))
    return held


def test_memory_holds_what_the_plan_counts_before_every_op(lowered: dict[str, Lowered]) -> None:
    """Without overlap, the plan's count is exact."""
    for name in ("large_layers", "own_sums", "attention"):
        with opened(cpu, lowered[name]) as bench:
            plan = offloading_plan(bench.graph)
            counted = live_bytes(bench.graph, plan, ("input", "activation"), aligned=False)
            held = holding(bench, bench.program(plan), on_one_thread)
            computes = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
            assert list(held) == computes
            assert [held[i] for i in computes[1:]] == [counted[i - 1] for i in computes[1:]]


def test_memory_never_holds_more_than_the_plan_has_for_activations(lowered: dict[str, Lowered]) -> None:
    for name in SPILLING:
        with opened(cpu, lowered[name]) as bench:
            plan = offloading_plan(bench.graph)
            program = bench.program(plan)
            for _ in range(5):
                assert max(holding(bench, program).values()) <= plan.memory.workspace_bytes


class LateBuffer:
    """A place whose bytes come and go at the end of a long time, and are wrong until then."""

    def __init__(self, buffer: SpillBuffer, seconds: float) -> None:
        self._buffer, self._seconds = buffer, seconds

    def save(self, source: torch.Tensor) -> None:
        time.sleep(self._seconds)
        self._buffer.save(source)

    def load(self, destination: torch.Tensor) -> None:
        destination.fill_(255)
        time.sleep(self._seconds)
        self._buffer.load(destination)

    def close(self) -> None:
        self._buffer.close()


class LateStore(RamStore):
    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return [LateBuffer(buffer, 0.003) for buffer in super().spill_buffers(sizes)]


def late_program(bench: Bench) -> Program:
    return bench.program(
        offloading_plan(bench.graph), LateStore(bench.lowered.weights_path, bench.lowered.manifest)
    )


def test_nobody_reads_an_activation_before_it_is_back_however_late_that_is(lowered: dict[str, Lowered]) -> None:
    for name in ("own_sums", "attention", "large_layers"):
        with opened(cpu, lowered[name]) as bench:
            expected = resident_outputs(bench)
            program = late_program(bench)
            for _ in range(3):
                assert is_equal(bench.run(program).outputs, expected)


class FailingBuffer(LateBuffer):
    """A place that fails once, on the way that the test says."""

    broken = ""

    def save(self, source: torch.Tensor) -> None:
        self._fail("save")
        super().save(source)

    def load(self, destination: torch.Tensor) -> None:
        self._fail("load")
        super().load(destination)

    def _fail(self, way: str) -> None:
        if FailingBuffer.broken == way:
            FailingBuffer.broken = ""
            raise OSError("flash is gone")


class FailingStore(RamStore):
    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return [FailingBuffer(buffer, 0.0) for buffer in super().spill_buffers(sizes)]


@pytest.mark.parametrize("way", ["save", "load"])
def test_a_copy_that_fails_is_an_error_of_its_run_and_the_next_one_is_right(way: str, bench: Bench) -> None:
    expected = resident_outputs(bench)
    store = FailingStore(bench.lowered.weights_path, bench.lowered.manifest)
    program = bench.program(offloading_plan(bench.graph), store)
    FailingBuffer.broken = way
    with pytest.raises(DeviceError, match="flash is gone"):
        bench.run(program)
    assert [t._storage for t in program.offloaded] == [None] * len(program.offloaded)
    for _ in range(3):
        assert is_equal(bench.run(program).outputs, expected)


def test_an_op_that_fails_leaves_no_activation_behind(bench: Bench) -> None:
    expected = resident_outputs(bench)
    program = bench.program(offloading_plan(bench.graph))

    def fail(frame: Frame) -> None:
        raise ValueError("a kernel failed")

    middle = len(program.computes) // 2
    computes = [*program.computes]
    computes[middle] = replace(computes[middle], calls=(fail,))
    with pytest.raises(DeviceError, match="a kernel failed"):
        bench.run(replace(program, computes=tuple(computes)))
    assert [t._storage for t in program.offloaded] == [None] * len(program.offloaded)
    assert is_equal(bench.run(program).outputs, expected)


def test_a_slow_link_slows_both_ways(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep_until = cohabit.runtime.stores.host._sleep_until
    monkeypatch.setattr(
        cohabit.runtime.stores.host, "_sleep_until", lambda end_s: 0.0 * sleep_until(end_s)
    )  # none too late
    inner = open_store("ram", bench.lowered.weights_path, bench.lowered.manifest)
    bytes_per_s = min(t.nbytes for t in bench.graph.tensors if t.kind == "activation") / 0.004
    program = bench.program(offloading_plan(bench.graph), LimitedStore(inner, bytes_per_s, Links()))
    timeline = bench.run(program, traced=True).timeline
    assert timeline is not None
    copies = [span for span in timeline.spans if span.lane != "compute"]
    assert {span.lane for span in copies} == {"swap_in", "swap_out"}
    assert all(span.end_s - span.start_s >= 0.004 for span in copies)


def test_a_recording_has_all_three_lanes_with_their_names(bench: Bench) -> None:
    program = bench.program(offloading_plan(bench.graph))
    recordings: queue.Queue[Recording] = queue.Queue()
    bench.executor.run(program, bench.lowered.examples(Bucket(2)), on_recording=recordings.put)
    spans = list(recordings.get(timeout=20).spans())
    assert [s.name for s in spans if s.lane == "swap_out"] == [
        bench.graph.tensors[s.tensor].name for s in program.swap_outs
    ]
    assert sum(s.nbytes for s in spans) == program.link_bytes


def test_an_input_that_leaves_is_refused_by_name(bench: Bench) -> None:
    base, (given,) = resident_plan(bench.graph), bench.graph.inputs
    steps = [
        structs.replace(step, after=tuple(i + 1 for i in step.after)) if isinstance(step, Compute) else step
        for step in (SwapOut(given), *base.steps)
    ]
    with pytest.raises(UnsupportedPlan, match=f"swaps out input {bench.graph.tensors[given].name}"):
        bench.program(structs.replace(base, steps=tuple(steps)))


def test_an_activation_that_comes_back_unread_is_refused_by_name(bench: Bench) -> None:
    base = offloading_plan(bench.graph)
    kept = {*bench.graph.outputs, *bench.graph.ops[-1].touched}
    back = next(s for s in base.steps if isinstance(s, SwapIn) and s.tensor not in kept)
    name = bench.graph.tensors[back.tensor].name
    last = base.epilogue_start - 1
    op = base.steps[last]
    assert isinstance(op, Compute)
    maker = next(i for i, s in enumerate(base.steps) if isinstance(s, SwapOut) and s.tensor == back.tensor)
    touches = [back.tensor in bench.graph.ops[s.op].touched for s in base.steps if isinstance(s, Compute)]
    uses = [i for i, s in enumerate(base.steps) if isinstance(s, Compute) and touches[s.op]]
    unread = structs.replace(back, after=(maker, uses[-1]))
    waiting = structs.replace(op, after=(*op.after, last))
    steps = (*base.steps[:last], unread, waiting, *base.steps[last + 1 :], Drop(back.tensor))
    plan = structs.replace(base, steps=steps)
    with pytest.raises(UnsupportedPlan, match=f"holds {name} and drops it"):
        bench.program(plan)


def test_the_scratch_file_has_no_name(bench: Bench, tmp_path: Path) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(bench.lowered.weights_path.read_bytes())
    store = open_store("file", weights, bench.lowered.manifest)
    program = bench.program(offloading_plan(bench.graph), store)
    bench.run(program)
    assert [p.name for p in tmp_path.iterdir()] == ["weights.bin"]
    store.close()


def test_a_released_program_frees_its_spill_buffers(bench: Bench) -> None:
    program = bench.program(offloading_plan(bench.graph))
    bench.run(program)
    memory = [a._buffer._memory for a in program.offloaded]  # type: ignore[attr-defined]
    assert any(own.any() for own in memory)
    bench.executor.release(program)
    assert not any(own.any() for own in memory), "pages that were given back read zeros"


class ClockedBuffers:
    """A store whose spill buffers take 1 ms and 1 ns per byte, by a clock of their own."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def spill_buffers(self, sizes: Sequence[int]) -> list[Any]:
        return [self for _ in sizes]

    def save(self, source: torch.Tensor) -> None:
        self.now_s += 1e-3 + source.nbytes * 1e-9

    def close(self) -> None:
        pass


def test_the_link_out_is_measured_by_a_large_activation_and_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ClockedBuffers()
    monkeypatch.setattr(cohabit.runtime.measure.link.time, "perf_counter", lambda: store.now_s)
    link = measure_swap_out(store)  # type: ignore[arg-type]
    assert link.latency_s == pytest.approx(1e-3, rel=0.01)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.01)
