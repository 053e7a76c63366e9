"""A program's first copies to its own partition may start during the run before: outputs never show it."""

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.cpu.executor import CpuExecutor
from runtime.host.pages import Bytes
from runtime.host.store import RamStore
from runtime.lowering.lower import Lowered
from runtime.memory import Copy
from runtime.profiling.profile import resident_plan
from tests.runtime.backends import Bench, cpu, opened
from tests.runtime.gated import WAIT_S
from tests.runtime.late import LateStore
from tests.runtime.plans import streaming_plan
from tests.runtime.test_executor import beside, evicting_plan, prefix_plan

MIB = 1 << 20


@pytest.fixture
def bench(wide: Lowered) -> Iterator[Bench]:
    with opened(cpu, wide) as bench:
        yield bench


class GatedLog(RamStore):
    """A store that logs which segments it has begun to copy, and waits at a gate."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.lowered.weights_path, bench.lowered.manifest)
        self.begun: list[int] = []
        self.has_begun, self.open = threading.Event(), threading.Event()

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = super().copy(segment, destination)

        def gated() -> None:
            self.begun.append(segment)
            self.has_begun.set()
            assert self.open.wait(WAIT_S)
            copy()

        return gated


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_programs_and_guesses_gives_the_resident_bits(bench: Bench, seed: int) -> None:
    rng, graph = random.Random(seed), bench.graph
    expected = bench.run(bench.program(resident_plan(graph))).outputs[0]
    late = LateStore(bench.lowered.weights_path, bench.lowered.manifest)
    late.late_s = 0.0005
    plans = [
        prefix_plan(graph),
        prefix_plan(graph),
        streaming_plan(graph),
        evicting_plan(graph),
        resident_plan(graph),
    ]
    programs = [beside(bench, plan, (24 + 5 * n) * MIB, f"m{n}", late) for n, plan in enumerate(plans)]
    hits, turn = 0, rng.choice(programs)
    for _ in range(60):
        following = rng.choice(programs)
        bench.executor.expect(following if rng.random() < 0.7 else rng.choice([None, *programs]))
        result = bench.run(turn)
        assert torch.equal(result.outputs[0], expected)
        hits += result.prefetched
        turn = following
    assert hits > 3


def test_copies_of_a_wrong_guess_that_have_not_started_are_skipped(bench: Bench) -> None:
    expected = bench.run(bench.program(resident_plan(bench.graph))).outputs[0]
    store = GatedLog(bench)
    first, third = (
        beside(bench, resident_plan(bench.graph), at * MIB, name) for at, name in ((32, "a"), (44, "c"))
    )
    second = beside(bench, prefix_plan(bench.graph), 56 * MIB, "b", store)
    assert second.prefix == 2
    bench.executor.expect(second)
    assert torch.equal(bench.run(first).outputs[0], expected)
    assert store.has_begun.wait(WAIT_S)
    assert torch.equal(bench.run(third).outputs[0], expected), "waits for nothing of the wrong guess"
    store.open.set()
    bench.executor.settle()
    assert store.begun == [second.swap_ins[0].tensor], "only the copy that was in progress"
    result = bench.run(second)
    assert torch.equal(result.outputs[0], expected)
    assert not result.prefetched


def test_a_program_is_not_expected_any_more_once_it_is_released_or_residents_are_loaded(bench: Bench) -> None:
    store = GatedLog(bench)
    store.open.set()
    first = beside(bench, resident_plan(bench.graph), 32 * MIB, "a")
    second = beside(bench, prefix_plan(bench.graph), 48 * MIB, "b", store)
    for forget in (lambda: bench.executor.release(second), lambda: bench.executor.load(first)):
        bench.executor.expect(second)
        forget()
        bench.run(first)
        assert isinstance(bench.executor, CpuExecutor)
        bench.executor.settle()
        assert store.begun == []
    bench.executor.expect(second)
    bench.run(first)
    assert bench.run(second).prefetched
