"""The executor keeps the plan's order, its memory and its promises, also when something fails."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from cohabit.planner.graph import Graph
from cohabit.planner.plan import Address, Compute, Drop, Plan, Step, SwapIn
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import DeviceError, MemoryExceeded
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import Copy, HostStore
from cohabit.runtime.stores.pages import Bytes
from tests.support.runtime import models
from tests.support.runtime.backends import BACKENDS, Bench, opened
from tests.support.runtime.plans import streaming_plan
from tests.support.runtime.stores import FailingStore, LateStore, WatchedStore


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, wide: Lowered) -> Iterator[Bench]:
    with opened(request.param, wide) as bench:
        yield bench


def evicting_plan(graph: Graph) -> Plan:
    """One resident whose place is used for another parameter and which the epilogue brings back."""
    base = streaming_plan(graph, frozenset({0}))
    steps: list[Step] = []
    moved = {}
    for step in base.steps:
        if isinstance(step, SwapIn) and step.tensor == 3:
            moved[len(steps) + 1] = True
            steps += [Drop(0), SwapIn(3, Address("partition", 0), step.after)]
        elif isinstance(step, Compute | SwapIn):
            # One drop was put in before: later indices are one higher.
            shift = 1 if moved else 0
            after = tuple(
                i + (1 if i + 1 in moved or (shift and i + 1 > next(iter(moved))) else 0) for i in step.after
            )
            steps.append(structs.replace(step, after=after))
        else:
            steps.append(step)
    last = max(i for i, s in enumerate(steps) if isinstance(s, Compute))
    steps.append(SwapIn(0, Address("partition", 0), (last,)))
    return structs.replace(base, steps=tuple(steps))


def test_swapped_and_resident_runs_give_the_same_bits(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs
    for resident in (frozenset[int](), frozenset({0, 3}), frozenset(range(5))):
        program = bench.program(streaming_plan(bench.graph, resident))
        for _ in range(8):
            assert torch.equal(bench.run(program).outputs[0], expected[0])


def test_an_evicted_resident_is_back_for_the_next_run(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs
    program = bench.program(evicting_plan(bench.graph))
    assert program.draft.restored.keys() == {0}
    for _ in range(8):
        assert torch.equal(bench.run(program).outputs[0], expected[0])


def test_a_resident_on_its_way_back_while_the_last_op_runs_is_waited_for(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs
    plan = evicting_plan(bench.graph)
    *others, brought_back = plan.steps
    assert isinstance(brought_back, SwapIn)
    *_, reader, last_op = (i for i, s in enumerate(others) if isinstance(s, Compute))
    steps = (*others[:last_op], structs.replace(brought_back, after=(reader,)), *others[last_op:])
    early = structs.replace(plan, steps=steps)
    late = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
    late.late_s = 0.01
    program = bench.program(early, bench.host(late))
    assert all(s.step < early.epilogue_start for s in program.swap_ins)
    for _ in range(5):
        assert torch.equal(bench.run(program).outputs[0], expected[0])


def test_a_program_that_would_leave_the_arena_is_refused(bench: Bench) -> None:
    plan = streaming_plan(bench.graph)
    with pytest.raises(MemoryExceeded, match="outside of the arena"):
        bench.backend.build(
            bench.lowered, plan, None, bench.arena, Bases(0, bench.arena.nbytes - 4096), bench.store
        )


def test_the_measured_timeline_has_every_step_in_lane_order(bench: Bench) -> None:
    plan = evicting_plan(bench.graph)
    timeline = bench.run(bench.program(plan), traced=True).timeline
    assert timeline is not None
    assert [s.step for s in timeline.spans] == [i for i, s in enumerate(plan.steps) if not isinstance(s, Drop)]
    for lane in ("compute", "swap_in"):
        spans = [s for s in timeline.spans if s.lane == lane]
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    by_step = {s.step: s for s in timeline.spans}
    for index, step in enumerate(plan.steps):
        for earlier in getattr(step, "after", ()):
            assert by_step[earlier].end_s <= by_step[index].start_s
    assert timeline.link_bytes == sum(
        bench.graph.tensors[s.tensor].nbytes for s in plan.steps if isinstance(s, SwapIn)
    )


class FailingOnceStore(WatchedStore):
    """A store whose copies of segment 0 fail, slowly, until `failures_left` is used up."""

    failures_left = 0

    def around(self, segment: int, destination: Bytes, copy: Copy) -> None:
        if segment == 0 and self.failures_left:
            time.sleep(0.02)
            destination[:] = 0
            self.failures_left -= 1
            raise OSError("medium error")
        copy()


def test_a_failed_copy_is_an_error_answer_and_the_next_run_is_right(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs
    store = FailingStore(bench.lowered.weights_path, bench.lowered.manifest)
    program = bench.program(evicting_plan(bench.graph), bench.host(store))
    store.failing = True
    with pytest.raises(DeviceError, match="medium error"):
        bench.run(program)
    store.failing = False
    assert torch.equal(bench.run(program).outputs[0], expected[0])


def test_a_failed_kernel_is_an_error_answer_and_the_next_run_is_right(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs
    program = bench.program(evicting_plan(bench.graph))
    with pytest.raises(DeviceError, match="wide"):
        bench.executor.run(program, [torch.zeros(2, 7)])
    assert torch.equal(bench.run(program).outputs[0], expected[0])


@pytest.mark.parametrize("make_backend", BACKENDS)
def test_outputs_belong_to_the_caller(make_backend: Callable[[], Backend], tmp_path: Path) -> None:
    make, examples = models.CASES["constants"]
    assert callable(make)
    lowered = models.lowered(make(), examples, tmp_path, "constants", [2])
    with opened(make_backend, lowered) as bench:
        program = bench.program(resident_plan(bench.graph))
        inputs = lowered.examples(Bucket(2))
        output = bench.executor.run(program, inputs).outputs[0]
        kept = output.clone()
        inputs[0].fill_(7)
        bench.executor.run(program, inputs)
        assert torch.equal(output, kept)


def partition_plan(graph: Graph) -> Plan:
    """Two parameters are swapped in to the partition before the first op, and dropped at the end."""
    base = streaming_plan(graph, frozenset({0, 1}))
    shift = len(base.residents)
    steps: list[Step] = [SwapIn(p.tensor, p.address) for p in base.residents]
    for step in base.steps:
        if isinstance(step, Drop):
            steps.append(step)
        else:
            assert isinstance(step, Compute | SwapIn)
            waits = tuple(i + shift for i in step.after)
            first = (step.op,) if isinstance(step, Compute) and step.op in (0, 1) else ()
            steps.append(structs.replace(step, after=(*first, *waits)))
    steps += [Drop(p.tensor) for p in base.residents]
    return structs.replace(base, residents=(), steps=tuple(steps))


def beside(bench: Bench, plan: Plan, offset: int, name: str, store: HostStore[Any] | None = None) -> Program:
    """Another model of the same weights, in another part of the arena."""
    lowered = replace(bench.lowered, name=name)
    return bench.beside(lowered, plan, Bases(offset, 0), store)


def test_models_that_share_a_workspace_give_the_resident_bits_in_any_order(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    late = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
    late.late_s = 0.0005
    store = bench.host(late)
    plans = (partition_plan, partition_plan, streaming_plan, evicting_plan, resident_plan)
    programs = [
        beside(bench, plan(bench.graph), (24 + 8 * n) << 20, f"m{n}", store) for n, plan in enumerate(plans)
    ]
    for program in random.Random(0).choices(programs, k=40):
        assert torch.equal(bench.run(program).outputs[0], expected)


def test_a_resident_that_could_not_be_brought_back_is_read_again_by_the_next_run(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    store = FailingStore(bench.lowered.weights_path, bench.lowered.manifest)
    store.segment = 0
    program = bench.program(evicting_plan(bench.graph), bench.host(store))
    for _ in range(3):
        store.failing = True
        assert torch.equal(bench.run(program).outputs[0], expected), "only the epilogue fails"
        bench.executor.settle()
        store.failing = False
        assert torch.equal(bench.run(program).outputs[0], expected), "the store is good again"
        bench.executor.settle()


def test_a_run_that_cannot_read_a_resident_again_fails_and_the_next_one_is_right(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    store = FailingStore(bench.lowered.weights_path, bench.lowered.manifest)
    store.segment = 0
    program = bench.program(evicting_plan(bench.graph), bench.host(store))
    store.failing = True
    assert torch.equal(bench.run(program).outputs[0], expected), "only the epilogue fails"
    for _ in range(2):
        with pytest.raises(DeviceError, match="medium error"):
            bench.run(program)
    bench.executor.settle()
    store.failing = False
    assert torch.equal(bench.run(program).outputs[0], expected)


def test_an_epilogue_that_fails_while_the_next_run_is_under_way_fails_no_request(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    store = FailingOnceStore(bench.lowered.weights_path, bench.lowered.manifest)
    program = bench.program(evicting_plan(bench.graph), bench.host(store))
    for _ in range(3):
        store.failures_left = 1
        assert torch.equal(bench.run(program).outputs[0], expected), "only the epilogue fails"
        assert torch.equal(bench.run(program).outputs[0], expected), "the failure is seen while this run waits"
        assert store.failures_left == 0
        bench.executor.settle()
