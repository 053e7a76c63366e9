"""The next program's copies may begin in this one's run, where its bytes are free, and nobody ever notices."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs

from planner.check import check
from planner.plan import Address, Plan, SwapIn
from runtime.binding.calls import Call
from runtime.binding.program import Bases, Program
from runtime.cpu.executor import CpuExecutor
from runtime.cpu.prefetch import PrefetchCopies
from runtime.host.pages import Bytes
from runtime.host.store import RamStore
from runtime.lowering.lower import Lowered
from runtime.lowering.slots import Frame
from runtime.memory import Copy
from runtime.profiling.profile import resident_plan
from tests.runtime.backends import Bench, cpu, opened
from tests.runtime.gated import WAIT_S, GatedStore
from tests.runtime.late import LateStore
from tests.runtime.observing import observed
from tests.runtime.plans import leading_plan, streaming_plan
from tests.runtime.test_executor import evicting_plan, prefix_plan

MIB = 1 << 20


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


def model(bench: Bench, name: str, plan: Plan, partition: int = 32 * MIB, store: RamStore | None = None) -> Program:
    """A model of the same weights with a partition of its own, in the workspace that all share."""
    check(bench.graph, None, plan)
    return bench.beside(replace(bench.lowered, name=name), plan, Bases(partition, 0), store)


def late(bench: Bench) -> LateStore:
    store = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
    store.late_s = 0.0005
    return store


def expected_of(bench: Bench) -> torch.Tensor:
    return bench.run(bench.program(resident_plan(bench.graph))).outputs[0]


class Log(RamStore):
    """A store that notes which segments it has begun to copy."""

    def __init__(self, path: Path, manifest: object) -> None:
        super().__init__(path, manifest)  # type: ignore[arg-type]
        self.begun: list[int] = []
        self.changed = threading.Condition()

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = super().copy(segment, destination)

        def noted() -> None:
            with self.changed:
                self.begun.append(segment)
                self.changed.notify_all()
            copy()

        return noted

    def wait(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) >= count, WAIT_S)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_leading_copy_begins_when_this_run_has_left_its_bytes_and_not_before(bench: Bench, reverse: bool) -> None:
    log = Log(bench.lowered.weights_path, bench.lowered.manifest)
    first = model(bench, "a", leading_plan(bench.graph))
    second = model(bench, "b", leading_plan(bench.graph, reverse=reverse), store=log)
    waits = [step.computes_before for step in PrefetchCopies().of(first, second)]
    readers = [n for n, op in enumerate(bench.graph.ops, 1) if any(t in bench.graph.parameters for t in op.reads)]
    assert len(readers) == 6
    assert waits[0] == max(waits) == readers[-1] if reverse else waits == readers
    assert isinstance(bench.executor, CpuExecutor)
    steps = [c.step for c in first.computes]
    log.begun.clear()

    def watch(step: int, frame: list[object]) -> None:
        done = steps.index(step)
        may_have_begun = next((n for n, wait in enumerate(waits) if wait > done), len(waits))
        assert log.wait(may_have_begun), "what may begin does"
        time.sleep(0.002)
        assert len(log.begun) == may_have_begun, "and nothing else"

    bench.executor.expect(second)
    bench.executor.run(observed(first, watch), bench.lowered.examples(2))
    result = bench.run(second)
    assert result.prefetched
    assert log.begun == [s.tensor for s in second.swap_ins], "each once"


@pytest.mark.parametrize("seed", range(6))
def test_whatever_follows_whatever_and_is_guessed_the_bits_are_right(bench: Bench, seed: int) -> None:
    """Bytes that are copied too early are those of another parameter, or none at all for a while."""
    rng, expected, graph = random.Random(seed), expected_of(bench), bench.graph
    plans = [
        leading_plan(graph),
        leading_plan(graph, reverse=True),
        leading_plan(graph, frozenset({1, 4}), reverse=True),
        streaming_plan(graph),
        evicting_plan(graph),
        prefix_plan(graph),
        resident_plan(graph),
    ]
    programs = [model(bench, f"m{n}", plan, (24 + 5 * n) * MIB, late(bench)) for n, plan in enumerate(plans)]
    assert all(program.prefix <= program.epilogue for program in programs)
    hits, turn = 0, rng.choice(programs)
    for _ in range(60):
        following = rng.choice(programs)
        guess = following if rng.random() < 0.7 else rng.choice([None, *programs])
        bench.executor.expect(guess)
        result = bench.run(turn)
        assert torch.equal(result.outputs[0], expected)
        hits += result.prefetched
        turn = following
    assert hits > 5


def test_a_model_follows_itself_with_what_goes_to_the_workspace(bench: Bench) -> None:
    expected = expected_of(bench)
    program = model(bench, "a", leading_plan(bench.graph, frozenset({2})), store=late(bench))
    own = model(bench, "b", prefix_plan(bench.graph), 48 * MIB, late(bench))
    assert PrefetchCopies().of(own, own) == (), "its partition is in use"
    for n in range(5):
        bench.executor.expect(program)
        result = bench.run(program)
        assert torch.equal(result.outputs[0], expected)
        assert result.prefetched == (n > 0)


def test_a_model_that_follows_itself_leads_up_to_its_first_copy_to_its_partition(bench: Bench) -> None:
    expected, graph = expected_of(bench), bench.graph
    steps = list(leading_plan(graph).steps)
    nbytes = graph.tensors[graph.parameters[3]].nbytes
    steps[3] = SwapIn(graph.parameters[3], Address("partition", 0))
    plan = structs.replace(leading_plan(graph), partition_bytes=nbytes, steps=tuple(steps))
    log = Log(bench.lowered.weights_path, bench.lowered.manifest)
    program, other = model(bench, "a", plan, store=log), model(bench, "b", leading_plan(graph), 48 * MIB)
    assert [len(PrefetchCopies().of(current, program)) for current in (program, other)] == [3, 6]
    log.begun.clear()
    for current in (program, program, other, program):
        bench.executor.expect(program if current is not other else None)
        assert torch.equal(bench.run(current).outputs[0], expected)
        bench.executor.settle()
    once = [s.tensor for s in program.swap_ins]
    assert log.begun == [*once, *once, *once[:3], *once, *once[:3]], "all of each run, and what led to the next"


def test_a_resident_program_is_followed_at_once_where_its_activations_are_not(bench: Bench) -> None:
    resident = model(bench, "a", resident_plan(bench.graph))
    assert resident.only_computes
    own = model(bench, "b", prefix_plan(bench.graph), 48 * MIB)
    assert [s.computes_before for s in PrefetchCopies().of(resident, own)][:2] == [0, 0], "to its own partition"
    shared = model(bench, "c", leading_plan(bench.graph), 48 * MIB)
    moved = tuple(replace(s, offset=s.offset + 16 * MIB) for s in shared.swap_ins)
    leading = PrefetchCopies().of(resident, replace(shared, swap_ins=moved))
    assert len(leading) == 6
    assert not any(s.computes_before for s in leading)


def test_what_comes_during_a_run_begins_early_too(bench: Bench) -> None:
    """Told at each step of a run that waits for copies, and of one that does not."""
    assert isinstance(bench.executor, CpuExecutor)
    expected, graph = expected_of(bench), bench.graph
    second = model(bench, "b", leading_plan(graph, reverse=True), 48 * MIB, late(bench))
    third = model(bench, "c", leading_plan(graph), 56 * MIB, late(bench))
    waiting, resident = (
        model(bench, "a", leading_plan(graph), store=late(bench)),
        model(bench, "d", resident_plan(graph)),
    )
    for first in (waiting, resident):
        for tell in (first.computes[0], first.computes[3], first.computes[-1]):

            def during(frame: Frame, calls: tuple[Call, ...] = tell.calls) -> None:
                bench.executor.expect_behind(third)
                bench.executor.expect_behind(second)
                bench.executor.expect_behind(second)
                for call in calls:
                    call(frame)

            computes = tuple(replace(c, calls=(during,)) if c is tell else c for c in first.computes)
            assert torch.equal(bench.run(replace(first, computes=computes)).outputs[0], expected)
            result = bench.run(second)
            assert torch.equal(result.outputs[0], expected)
            assert result.prefetched, "what was told last is what is expected"
            bench.executor.expect_behind(third)
            assert not bench.run(third).prefetched, "nothing was under way"


def test_another_thread_may_say_at_any_time_what_comes_behind(bench: Bench) -> None:
    assert isinstance(bench.executor, CpuExecutor)
    executor, rng, expected, graph = bench.executor, random.Random(1), expected_of(bench), bench.graph
    plans = [leading_plan(graph), leading_plan(graph, reverse=True), streaming_plan(graph), resident_plan(graph)]
    programs = [model(bench, f"m{n}", plan, (24 + 5 * n) * MIB, late(bench)) for n, plan in enumerate(plans)]
    over, told = threading.Event(), threading.Event()

    def tell() -> None:
        other = random.Random(2)
        while not over.is_set():
            executor.expect_behind(other.choice(programs))
            told.set()
            time.sleep(other.random() * 0.002)

    teller = threading.Thread(target=tell)
    teller.start()
    hits = 0
    try:
        assert told.wait(WAIT_S)
        for _ in range(150):
            executor.expect(rng.choice([None, None, *programs]))
            result = bench.run(rng.choice(programs))
            assert torch.equal(result.outputs[0], expected)
            hits += result.prefetched
    finally:
        over.set()
        teller.join()
    assert hits > 5


def test_what_a_wrong_guess_has_not_begun_is_left_out(bench: Bench) -> None:
    expected = expected_of(bench)
    gate = GatedStore(bench.lowered.weights_path, bench.lowered.manifest)
    log = Log(bench.lowered.weights_path, bench.lowered.manifest)
    first = model(bench, "a", resident_plan(bench.graph))
    third = model(bench, "c", resident_plan(bench.graph), 44 * MIB)
    gated = model(bench, "b", leading_plan(bench.graph), 56 * MIB, gate)
    logged = model(bench, "b", leading_plan(bench.graph), 56 * MIB, log)
    head, *rest = gated.swap_ins
    mixed = replace(logged, swap_ins=(head, *logged.swap_ins[1:]))
    log.begun.clear()
    bench.executor.expect(mixed)
    assert torch.equal(bench.run(first).outputs[0], expected)
    assert gate.begun.wait(WAIT_S)
    assert torch.equal(bench.run(third).outputs[0], expected), "waits for nothing of the wrong guess"
    gate.open.set()
    bench.executor.settle()
    assert log.begun == [], "but for the copy that was under way"
    result = bench.run(mixed)
    assert torch.equal(result.outputs[0], expected)
    assert not result.prefetched
    assert len(log.begun) == len(rest)


def test_what_was_expected_is_not_once_it_is_dismissed_or_residents_are_loaded(bench: Bench) -> None:
    log = Log(bench.lowered.weights_path, bench.lowered.manifest)
    first = model(bench, "a", resident_plan(bench.graph))
    second = model(bench, "b", leading_plan(bench.graph), 48 * MIB, log)
    for forget in (lambda: bench.executor.dismiss(second), lambda: bench.executor.load(first)):
        bench.executor.expect(second)
        forget()
        log.begun.clear()
        bench.run(first)
        assert isinstance(bench.executor, CpuExecutor)
        bench.executor.settle()
        assert log.begun == []
    bench.executor.expect(second)
    bench.run(first)
    assert bench.run(second).prefetched


def test_a_program_is_let_go_of_with_what_it_was_to_copy(bench: Bench) -> None:
    leading, first = PrefetchCopies(), model(bench, "a", leading_plan(bench.graph))
    second = model(bench, "b", leading_plan(bench.graph, reverse=True))
    before = sys.getrefcount(second)
    assert leading.of(first, second) is leading.of(first, second)
    assert sys.getrefcount(second) > before
    leading.forget(first)
    assert sys.getrefcount(second) == before
    assert leading.of(second, first), "found anew"
