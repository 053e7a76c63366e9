"""Stretches of calls outside of Python's interpreter: bits, memory, errors and waits are those of single calls."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

import runtime.cpu.segments
from planner.graph import Graph
from planner.plan import Compute, Drop, Plan, SwapIn
from planner.problem import Limit, Problem
from planner.search.driver import search
from planner.sizing.fitting import split_budget
from runtime.backend import Backend
from runtime.binding.program import Bases, Program
from runtime.cpu.backend import CpuBackend
from runtime.cpu.executor import CpuExecutor
from runtime.cpu.segments import ScriptSegment, TorchScriptWriter, compiled, segment_ranges, unavailable
from runtime.devices import open_device
from runtime.errors import DeviceError
from runtime.lowering.lower import Lowered, lower
from runtime.profiling.profile import resident_plan
from runtime.recording import Recording
from runtime.shared_region.sharing import SHARINGS, SharedRegion
from tests.planner.graphs import profile_of
from tests.runtime import models
from tests.runtime.backends import Bench, cpu, opened, scripted_cpu
from tests.runtime.late import LateStore
from tests.runtime.observing import observed
from tests.runtime.plans import offloading_plan, streaming_plan

BATCH = 2
LEFT_TO_PYTHON = {"branch": "cond", "scalar": "aten.item.default"}
"""What models of the tests have that TorchScript is not asked to do."""


UNREAD_RESULTS = ("lstm", "bidirectional_gru")
"""Models of whose ops nobody reads all results: Python keeps those for as long as the others."""


@pytest.fixture(autouse=True)
def _even_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime.cpu.segments, "FEWEST_CALLS", 1)


@pytest.fixture
def lowered(constructs: dict[str, Lowered]) -> dict[str, Lowered]:
    return constructs


def segments_of(bench: Bench, program: Program) -> Sequence[ScriptSegment]:
    assert isinstance(bench.backend, CpuBackend)
    assert bench.backend._segmenter is not None
    return bench.backend._segmenter.at_waits(program.draft)


def by_python(lowered: Lowered) -> list[torch.Tensor]:
    with opened(cpu, lowered) as bench:
        return bench.run(bench.program(resident_plan(bench.graph))).outputs


def is_equal(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", models.CASES)
def test_segments_give_the_bits_of_single_calls_in_no_more_memory(name: str, lowered: dict[str, Lowered]) -> None:
    """What dies within a segment is released with its last reader, as it is between single calls."""
    with opened(cpu, lowered[name]) as bench:
        program = bench.program(resident_plan(bench.graph))
        expected = bench.run(program).outputs
        single = allocations(bench, program)
    with opened(scripted_cpu, lowered[name]) as bench:
        graph = bench.graph
        program = bench.program(resident_plan(graph))
        check_segments(name, program, segments_of(bench, program))
        plans = (streaming_plan(graph), streaming_plan(graph, frozenset(graph.parameters[::2])))
        for ran in (program, *map(bench.program, plans)):
            bench.executor.load(ran)
            for _ in range(3):
                assert is_equal(bench.run(ran).outputs, expected)
        bench.executor.load(program)
        joined = allocations(bench, program)
    assert [taken for taken, _ in joined] == [taken for taken, _ in single]
    assert all(a <= b for (_, a), (_, b) in zip(joined, single, strict=True))
    if name not in UNREAD_RESULTS:
        assert joined == single


def check_segments(name: str, program: Program, segments: Sequence[ScriptSegment]) -> None:
    """A resident program is one segment, but for what TorchScript is not asked to do."""
    compiled_steps = {n for segment in segments for n in segment.steps}
    left = [
        [str(call.template.target) for call in step.calls]
        for n, step in enumerate(program.draft.computes)
        if n not in compiled_steps
    ]
    assert sum(step.length for step in program.segments) == len(program.computes)
    if name in LEFT_TO_PYTHON:
        assert LEFT_TO_PYTHON[name] in left[0]
    else:
        assert (len(program.segments), left) == (1, [])


def allocations(bench: Bench, program: Program) -> list[tuple[int, int]]:
    """Bytes of each allocation of a run, with all that are held then."""
    inputs = bench.lowered.examples(BATCH)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        bench.executor.run(program, inputs)
    assert profiler.profiler is not None
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return [(change, held) for change, held in zip(changes, accumulate(changes), strict=True) if change > 0]


def random_plans(graph: Graph, seed: int) -> list[Plan]:
    """Searched plans of less and less memory, at some speeds of the link."""
    generator = random.Random(seed)
    plans = []
    weights = sum(graph.tensors[i].nbytes for i in graph.parameters)
    for share in (0.3, 0.6, 0.9):
        profile = profile_of(
            graph, [generator.uniform(1e-6, 1e-3) for _ in graph.ops], bandwidth=generator.choice([1e8, 1e9, 1e10])
        )
        budget = int(weights * share) // 4096 * 4096 + (1 << 20)
        partition, workspace = split_budget({BATCH: graph}, {BATCH: profile}, budget)
        plans.append(
            search(Problem(graph, profile, partition, workspace), "streaming", limit=Limit(evaluations=20))
        )
    return plans


@pytest.mark.parametrize("name", ["wide", "large_layers", "tied"])
def test_only_the_first_step_of_a_segment_waits_and_only_its_last_is_waited_for(
    name: str, lowered: dict[str, Lowered]
) -> None:
    """Told by the plan alone: its steps name what they wait for."""
    graph, lengths = lowered[name].graphs[BATCH], []
    for plan in [p for seed in range(2) for p in random_plans(graph, seed)]:
        with opened(scripted_cpu, lowered[name]) as bench:
            program = bench.program(plan)
            found = list(segment_ranges(program.draft))
            assert [n for segment in found for n in segment] == list(range(len(program.computes)))
            lengths += [len(segment) for segment in found]
            first = {segment.start for segment in found}
            last = {segment.stop - 1 for segment in found}
        computes = [i for i, step in enumerate(plan.steps) if isinstance(step, Compute)]
        restored = {p.tensor for p in plan.residents} & {s.tensor for s in plan.steps if isinstance(s, SwapIn)}
        waited, read = -1, set[int]()
        for n, index in enumerate(computes):
            step = plan.steps[index]
            assert isinstance(step, Compute)
            copies = [i for i in step.after if isinstance(plan.steps[i], SwapIn)]
            back = restored & set(graph.ops[step.op].reads) - read
            if max(copies, default=-1) > waited or back:
                assert n in first
            waited, read = max([waited, *copies]), read | set(graph.ops[step.op].reads)
        for step in plan.steps:
            if isinstance(step, SwapIn):
                awaited = [i for i in step.after if isinstance(plan.steps[i], Compute)]
                assert not awaited or computes.index(max(awaited)) in last
    assert max(lengths) > 1


@pytest.mark.parametrize("name", ["wide", "large_layers", "tied"])
def test_no_segment_reads_what_has_not_arrived_however_late_copies_are(
    name: str, lowered: dict[str, Lowered]
) -> None:
    expected = by_python(lowered[name])
    with opened(scripted_cpu, lowered[name]) as bench:
        late = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
        for plan in random_plans(bench.graph, seed=7):
            program = bench.program(plan, late)
            for _ in range(3):
                assert is_equal(bench.run(program).outputs, expected)
        late.close()


@pytest.mark.parametrize("name", ["wide", "large_layers", "tied"])
@pytest.mark.parametrize("make", [cpu, scripted_cpu])
def test_what_another_batch_s_epilogue_brings_back_is_waited_for(
    name: str, make: Callable[[], Backend], lowered: dict[str, Lowered]
) -> None:
    """Batch sizes share their residents, and one's plan may displace what another's keeps."""
    expected = by_python(lowered[name])
    with opened(make, lowered[name]) as bench:
        slow = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
        slow.late_s = 0.02
        keeps = streaming_plan(bench.graph, frozenset(bench.graph.parameters))
        last = max(n for n, step in enumerate(keeps.steps) if isinstance(step, Compute))
        displaced = keeps.residents[-1]
        back = (Drop(displaced.tensor), SwapIn(displaced.tensor, displaced.address, (last,)))
        displaces = structs.replace(keeps, steps=(*keeps.steps, *back))
        first, second = bench.program(displaces, slow), bench.program(keeps, slow)
        for _ in range(3):
            assert is_equal(bench.run(first).outputs, expected)
            assert is_equal(bench.run(second).outputs, expected)
        slow.close()


def test_plans_that_spill_activations_have_no_segments(lowered: dict[str, Lowered]) -> None:
    expected = by_python(lowered["own_sums"])
    with opened(scripted_cpu, lowered["own_sums"]) as bench:
        program = bench.program(offloading_plan(bench.graph))
        assert program.offloaded
        assert program.segments == ()
        assert is_equal(bench.run(program).outputs, expected)


def test_an_operator_s_error_comes_in_its_own_words(lowered: dict[str, Lowered]) -> None:
    """And the next run is right, which finds nothing of the one that failed."""
    expected = by_python(lowered["tied"])
    for make in (cpu, scripted_cpu):
        with opened(make, lowered["tied"]) as bench:
            program = bench.program(resident_plan(bench.graph))
            (tokens,) = bench.lowered.examples(BATCH)
            with pytest.raises(DeviceError) as caught:
                bench.executor.run(program, [torch.full_like(tokens, 9_999_999)])
            assert str(caught.value) == "tied: index out of range in self"
            assert is_equal(bench.run(program).outputs, expected)


def test_a_traced_run_executes_each_op_and_all_other_runs_segments(lowered: dict[str, Lowered]) -> None:
    with opened(scripted_cpu, lowered["wide"]) as bench:
        program = bench.program(resident_plan(bench.graph))
        assert len(program.segments) == 1

        def refuse(frame: list[Any]) -> None:
            raise AssertionError("a segment ran")

        guarded = replace(program, segments=(replace(program.segments[0], calls=(refuse,)),))
        with pytest.raises(DeviceError, match="a segment ran"):
            bench.run(guarded)
        steps: list[int] = []
        inputs = bench.lowered.examples(BATCH)
        bench.run(observed(guarded, lambda step, frame: steps.append(step)))
        timeline = bench.executor.run(guarded, inputs, traced=True).timeline
        for _ in range(2):
            with pytest.raises(DeviceError, match="a segment ran"):
                bench.executor.run(guarded, inputs, follow=lambda recording: None)
        assert timeline is not None
        assert len(timeline.spans) == len(steps) == len(program.computes)


def test_a_followed_run_tells_of_a_segment_as_one_span_with_its_first_and_last_op(
    lowered: dict[str, Lowered],
) -> None:
    told: SimpleQueue[Recording] = SimpleQueue()
    with opened(scripted_cpu, lowered["wide"]) as bench:
        program = bench.program(resident_plan(bench.graph))
        bench.executor.run(program, bench.lowered.examples(BATCH), follow=told.put)
        (span,) = told.get(timeout=10).spans()
        ops = bench.graph.ops
        assert (span.name, span.ops) == (f"{ops[0].name} … {ops[-1].name}", len(ops))
        streaming = bench.program(streaming_plan(bench.graph))
        bench.executor.run(streaming, bench.lowered.examples(BATCH), follow=told.put)
        spans = [s for s in told.get(timeout=10).spans() if s.lane == "compute" and not s.stalled]
    assert sum(s.ops for s in spans) == len(ops)
    first = accumulate((s.ops for s in spans), initial=0)
    assert [s.name.partition(" … ")[0] for s in spans] == [ops[n].name for n in list(first)[:-1]]


def test_a_model_whose_segments_cannot_be_compiled_runs_op_by_op_and_the_log_says_so(
    lowered: dict[str, Lowered], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = by_python(lowered["wide"])

    def moved(self: TorchScriptWriter, leaving: Sequence[int]) -> Any:
        raise AttributeError("torch._C has no such thing")

    monkeypatch.setattr(TorchScriptWriter, "function", moved)
    with opened(scripted_cpu, replace(lowered["wide"])) as bench:
        program = bench.program(resident_plan(bench.graph))
        assert program.segments == ()
        assert is_equal(bench.run(program).outputs, expected)
    (record,) = [r for r in caplog.records if "cannot be compiled" in r.message]
    assert record.fields["model"] == "wide"  # type: ignore[attr-defined]
    assert "torch._C has no such thing" in record.fields["error"]  # type: ignore[attr-defined]


def test_a_graph_that_torch_refuses_to_run_is_not_taken_for_one_that_was_compiled(
    lowered: dict[str, Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling calls the function so that it refuses: for the reason expected, and for no other."""

    def broken(self: TorchScriptWriter, leaving: Sequence[int]) -> Any:
        def function(values: Any, constants: Any) -> Any:
            raise RuntimeError("this build has no such interpreter")

        return function

    monkeypatch.setattr(TorchScriptWriter, "function", broken)
    model = replace(lowered["wide"])
    with opened(cpu, model) as bench:
        draft = bench.program(resident_plan(bench.graph)).draft
    assert compiled(draft, segment_ranges(draft)) == ()


def test_segments_are_the_default_where_torch_has_them() -> None:
    assert unavailable() is None
    for asked, given in ((None, True), (True, True), (False, False)):
        backend = open_device("cpu", scripted=asked)
        assert isinstance(backend, CpuBackend)
        assert backend.scripted is given


@pytest.mark.usefixtures("torch_without_segments")
def test_where_torch_lacks_segments_the_default_does_without_and_whoever_asks_is_refused() -> None:
    backend = open_device("cpu")
    assert isinstance(backend, CpuBackend)
    assert not backend.scripted
    with pytest.raises(DeviceError, match=r"cannot run script segments .*_create_function_from_graph.*--scripted"):
        open_device("cpu", scripted=True)


@pytest.mark.parametrize("layout", sorted(SHARINGS))
def test_a_model_that_moves_runs_in_segments_however_late_its_parameters_come(
    layout: str, lowered: dict[str, Lowered]
) -> None:
    """Whole where nothing has to come while it runs, and otherwise cut where an op may wait."""
    names = ("wide", "tied", "large_layers")
    expected = {name: by_python(lowered[name]) for name in names}
    largest = max(lowered[name].manifest.segment_bytes for name in names)
    sharing, lengths = SHARINGS[layout], set()
    for share in (1.0,) if sharing.blocking else (1.0, 0.7):
        backend = scripted_cpu()
        region = int(largest * share) // 4096 * 4096
        arena = backend.arena((16 << 20) + region)
        shared = SharedRegion(backend, sharing, arena, 16 << 20, region)
        stores = {n: LateStore(lowered[n].weights_path, lowered[n].manifest) for n in names}
        programs = {
            n: shared.add(lowered[n], resident_plan(lowered[n].graphs[BATCH]), None, stores[n]) for n in names
        }
        ran = watched(backend.executor)
        for name in (
            "wide",
            "wide",
            "tied",
            "large_layers",
            "wide",
            "tied",
            "tied",
            "large_layers",
            "large_layers",
        ):
            result = shared.run(programs[name], lowered[name].examples(BATCH))
            assert is_equal(result.outputs, expected[name])
            assert sum(step.length for step in ran[-1].segments) == len(ran[-1].computes)
            lengths.add(len(ran[-1].segments) == 1)
            if sharing.blocking or result.link_bytes == 0:
                assert len(ran[-1].segments) == 1
        backend.close()
        for store in stores.values():
            store.close()
        arena.close()
    assert lengths == ({True} if sharing.blocking else {True, False})


def watched(executor: CpuExecutor) -> list[Program]:
    """What an executor runs from now on."""
    ran: list[Program] = []
    run = executor.run

    def noted(program: Program, *args: Any, **options: Any) -> Any:
        ran.append(program)
        return run(program, *args, **options)

    executor.run = noted  # type: ignore[method-assign]
    return ran


def test_the_graph_that_runs_is_the_one_that_was_written(lowered: dict[str, Lowered]) -> None:
    with opened(scripted_cpu, lowered["attention"]) as bench:
        program = bench.program(resident_plan(bench.graph))
        bench.run(program)
        ran = torch.jit.last_executed_optimized_graph()
        calls = [c for step in program.draft.computes for c in step.calls]
    kinds = [node.kind() for node in ran.nodes()]
    ours = [
        "aten::" + str(c.template.target).split(".")[1] for c in calls if str(c.template.target).startswith("aten.")
    ]
    assert [kind for kind in kinds if kind.startswith("aten::") and kind != "aten::clear"] == ours
    assert not [kind for kind in kinds if "Differentiable" in kind or "Fusion" in kind or "BatchMM" in kind]


def test_others_on_the_thread_may_go_on_having_their_scripts_optimised(lowered: dict[str, Lowered]) -> None:
    with opened(scripted_cpu, lowered["tied"]) as bench:
        program = bench.program(resident_plan(bench.graph))
        assert torch._C._get_graph_executor_optimize()
        bench.run(program)
        assert torch._C._get_graph_executor_optimize()


def test_a_model_that_moves_is_not_compiled_again(lowered: dict[str, Lowered]) -> None:
    model = lowered["tied"]
    expected = by_python(model)
    with opened(scripted_cpu, model) as bench:
        plan = resident_plan(bench.graph)
        first = bench.backend.build(model, plan, None, bench.arena, Bases(0, plan.partition_bytes), bench.store)
        segments = segments_of(bench, first)
        bases = Bases(16 << 20, (16 << 20) + plan.partition_bytes)
        second = bench.backend.build(model, plan, None, bench.arena, bases, bench.store)
        assert segments_of(bench, second) is segments
        assert [len(p.segments) for p in (first, second)] == [1, 1]
        for program in (first, second, first):
            bench.executor.load(program)
            assert is_equal(bench.run(program).outputs, expected)


def test_what_enters_a_segment_and_dies_there_is_held_by_nobody_else(tmp_path: Path) -> None:
    """An input that its first op alone reads is gone when that op has run, though Python is not back yet."""
    torch.manual_seed(0)
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, tmp_path / "model.pt2")
    model = lower(tmp_path / "model.pt2", "wide", [BATCH], tmp_path / "cache")
    with opened(scripted_cpu, model) as bench:
        program = bench.program(resident_plan(bench.graph))
        (segment,) = segments_of(bench, program)
        assert segment.dying == program.input_slots
        frame = program.new_frame()
        buffer = np.ones((BATCH, 384), np.float32)
        frame[segment.dying[0]] = torch.from_numpy(buffer)
        with torch.inference_mode():
            program.segments[0].calls[0](frame)
        assert [n for n, value in enumerate(frame) if value is not None] == list(segment.leaving)
        assert sys.getrefcount(buffer) == 2, "this name, and the count's own"
