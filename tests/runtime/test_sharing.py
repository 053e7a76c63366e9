"""Models that share a region give the resident run's bits, whatever leaves when, on every backend."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.errors import DeviceError, MemoryExceeded, UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import Copy, HostStore
from cohabit.runtime.shared_region.sharing import SHARINGS, SharedRegion
from tests.support.runtime import models
from tests.support.runtime.backends import BACKENDS, ROOM_BYTES, cpu, fake_cuda
from tests.support.runtime.plans import streaming_plan, with_room
from tests.support.runtime.stores import FailingStore, WatchedStore

WORKSPACE_BYTES = ROOM_BYTES + (1 << 20)
FEW = 2.5
"""Models that the region holds in most tests."""
LAYOUTS = sorted(SHARINGS)


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> list[Lowered]:
    """Four models with weights of their own; one has outputs that are parameters, and views of them."""
    folder = tmp_path_factory.mktemp("models")
    made = []
    for n in range(3):
        torch.manual_seed(n)
        models.export(models.Wide(), {"x": torch.zeros(3, 384)}, folder / f"{n}.pt2")
        made.append(lower(folder / f"{n}.pt2", f"wide{n}", [2], folder / "cache"))
    torch.manual_seed(9)
    models.export(models.Attention(), {"x": torch.zeros(3, 5, 32)}, folder / "attention.pt2")
    return [*made, lower(folder / "attention.pt2", "attention", [2], folder / "cache")]


class CountingStore(WatchedStore):
    """Counts the copies that are made."""

    copies = 0

    def around(self, segment: int, destination: Any, copy: Copy) -> None:
        self.copies += 1
        copy()


class Shared:
    """A region with models in it, and what each answers when it is resident."""

    def __init__(self, backend: Backend, layout: str, lowered: list[Lowered], region_bytes: int) -> None:
        self.backend, self.lowered = backend, lowered
        self.arena = backend.arena(WORKSPACE_BYTES + region_bytes)
        self.shared = SharedRegion(backend, SHARINGS[layout], self.arena, WORKSPACE_BYTES, region_bytes)
        self.stores = [backend.open_store("ram", m.weights_path, m.manifest) for m in lowered]
        self.expected = [resident_outputs(backend, m) for m in lowered]
        self.programs: list[Program] = []

    def add_all(self) -> "Shared":
        for model, store in zip(self.lowered, self.stores, strict=True):
            self.programs.append(self.add(model, store))
        return self

    def add(self, model: Lowered, store: HostStore[Any]) -> Program:
        plan = resident_plan(model.graphs[Bucket(2)])
        roomy = with_room(plan, ROOM_BYTES)
        return self.shared.add(model, roomy, None, store)

    def run(self, n: int, following: int | None = None) -> int:
        """Run a model, compare its answer, and return the bytes that were copied for it."""
        if following is not None:
            self.shared.foresee(self.programs[following])
        result = self.shared.run(self.programs[n], self.lowered[n].examples(Bucket(2)))
        for own, expected in zip(result.outputs, self.expected[n], strict=True):
            assert torch.equal(own, expected)
        return result.link_bytes

    def close(self) -> None:
        self.backend.close()
        for store in self.stores:
            store.close()
        self.arena.close()


def resident_outputs(backend: Backend, model: Lowered) -> list[torch.Tensor]:
    plan = resident_plan(model.graphs[Bucket(2)])
    plan = with_room(plan, ROOM_BYTES)
    arena = backend.arena(plan.memory.nbytes)
    store = backend.open_store("ram", model.weights_path, model.manifest)
    program = backend.build(model, plan, None, arena, Bases(plan.memory.workspace_bytes, 0), store)
    backend.executor.load(program)
    outputs = [t.clone() for t in backend.executor.run(program, model.examples(Bucket(2))).outputs]
    backend.executor.release(program)
    store.close()
    return outputs


def region_for(lowered: list[Lowered], count: float) -> int:
    return int(count * lowered[0].manifest.segment_bytes) // 4096 * 4096


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    made: Backend = request.param()
    return made


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_bits_of_the_resident_run_whatever_is_foreseen(
    backend: Backend, layout: str, lowered: list[Lowered]
) -> None:
    shared = Shared(backend, layout, lowered, region_for(lowered, FEW)).add_all()
    rng = random.Random(layout)
    try:
        for _ in range(30):
            following = rng.choice([None, *range(len(lowered))])
            shared.run(rng.randrange(len(lowered)), following)
    finally:
        shared.close()


def test_the_next_whole_model_is_copied_while_another_one_computes(lowered: list[Lowered]) -> None:
    shared = Shared(cpu(), "lru", lowered, region_for(lowered, FEW))
    second = CountingStore(lowered[1].weights_path, lowered[1].manifest)
    shared.stores[1].close()
    shared.stores[1] = second
    shared.add_all()
    whole = lowered[1].manifest.segment_bytes
    shared.run(0, following=1)
    shared.backend.executor.settle()
    copies = second.copies
    assert copies > 0, "it was copied before its own run"
    assert shared.run(1) == whole, "which counts its bytes"
    assert [shared.run(1, following=0), shared.run(0), shared.run(1)] == [0, 0, 0], "both are there"
    assert second.copies == copies
    shared.close()


@pytest.mark.parametrize("layout", ["pipelined", "on_demand"])
def test_a_model_larger_than_the_region_runs_through_it(
    backend: Backend, layout: str, lowered: list[Lowered]
) -> None:
    shared = Shared(backend, layout, lowered, region_for(lowered, 0.5)).add_all()
    try:
        for n in (0, 0, 1, 3, 0, 0, 2, 2):
            copied = shared.run(n)
            assert copied > 0 or n == 3
    finally:
        shared.close()


@pytest.mark.parametrize("layout", ["time_shared", "lru"])
def test_a_model_larger_than_the_region_is_refused_with_the_numbers(layout: str, lowered: list[Lowered]) -> None:
    shared = Shared(cpu(), layout, lowered, region_for(lowered, 0.5))
    with pytest.raises(MemoryExceeded, match=r"wide0: its parameters take .* MiB, the region .* has .* MiB"):
        shared.add_all()
    shared.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_stays_is_what_the_layouts_differ_in(layout: str, lowered: list[Lowered]) -> None:
    shared = Shared(cpu(), layout, lowered, region_for(lowered, FEW)).add_all()
    whole = lowered[0].manifest.segment_bytes
    in_turns = [whole, 0, whole, whole, whole, whole]
    expected = {
        "time_shared": in_turns,
        "pipelined": in_turns,
        "lru": [whole, 0, whole, 0, whole, whole],
        # The second model had half of its parameters left, the last ones, which made room for the first ones.
        "on_demand": [whole, 0, whole, 0, whole, whole],
    }
    assert [shared.run(n) for n in (0, 0, 1, 0, 2, 1)] == expected[layout]
    shared.close()


class ClockedStore(WatchedStore):
    """A store whose copies take a second each, by the clock that the executor reads."""

    now_s = 0.0

    def around(self, segment: int, destination: Any, copy: Copy) -> None:
        copy()
        ClockedStore.now_s += 1.0


def test_copies_of_whole_models_are_waited_for_before_the_first_op(
    lowered: list[Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "cohabit.runtime.cpu.executor.time", SimpleNamespace(perf_counter=lambda: ClockedStore.now_s)
    )
    for layout in LAYOUTS:
        shared = Shared(cpu(), layout, lowered, region_for(lowered, FEW))
        shared.stores = [ClockedStore(m.weights_path, m.manifest) for m in lowered]
        shared.add_all()
        shared.run(0)
        result = shared.shared.run(shared.programs[1], lowered[1].examples(Bucket(2)), traced=True)
        assert result.timeline is not None
        copies = [span for span in result.timeline.spans if span.lane == "swap_in"]
        if SHARINGS[layout].blocking:
            assert (copies, result.stall_s, result.latency_s) == ([], 6.0, 6.0)
        else:
            assert len(copies) == 6
            assert result.latency_s == 6.0
        shared.close()


def test_a_first_run_on_demand_copies_when_an_op_is_next_and_later_ones_ahead(lowered: list[Lowered]) -> None:
    shared = Shared(cpu(), "on_demand", lowered, region_for(lowered, 1.0)).add_all()
    waits = []
    for n in (0, 1, 0):
        shared.run(n)
        last = next(reversed(shared.shared._models[f"wide{n}", Bucket(2)].programs.values()))
        waits.append([step.computes_before for step in last.swap_ins])
    first_reads = waits[0]
    assert first_reads == sorted(set(first_reads)), "each copy waits for the op before its own"
    assert waits[1] == first_reads
    assert waits[2] == [0] * 6
    shared.close()


@pytest.mark.parametrize("make", [cpu, fake_cuda])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_that_fails_is_an_error_of_its_request_and_the_next_one_gets_the_right_bits(
    make: Any, layout: str, lowered: list[Lowered]
) -> None:
    backend = make()
    shared = Shared(backend, layout, lowered[:2], region_for(lowered, 1.5))
    store = FailingStore(lowered[0].weights_path, lowered[0].manifest)
    shared.stores[0].close()
    shared.stores[0] = backend.staged(store, lowered[0].manifest) if make is fake_cuda else store
    shared.add_all()
    shared.run(1)
    store.failing = True
    with pytest.raises(DeviceError, match="medium error"):
        shared.run(0)
    shared.run(1)
    with pytest.raises(DeviceError, match="medium error"):
        shared.run(0)
    shared.run(1, following=0)
    store.failing = False
    for n in (0, 0, 1, 0):
        shared.run(n)
    shared.close()


def test_on_cuda_places_that_come_again_have_graphs_and_others_say_why_not(lowered: list[Lowered]) -> None:
    for layout in LAYOUTS:
        backend = fake_cuda()
        backend.driver.graph_bytes = 1000
        shared = Shared(backend, layout, lowered[:2], region_for(lowered, 1.5)).add_all()
        for n in (0, 0, 1, 0):
            shared.run(n)
        captures = [shared.shared.capture(program) for program in shared.programs]
        assert all(capture is not None for capture in captures)
        found = {(c.graphs, c.graph_bytes, c.refused) for c in captures if c is not None}
        if layout == "on_demand":
            assert found == {(0, 0, "its parameters lie elsewhere at every run")}
        elif layout == "pipelined":
            assert found == {(2, 2000, None)}, "one that brings the model, one that finds it there"
        else:
            assert found == {(1, 2000, None)}, "of the inference, and of the copies before it"
        shared.shared.close()
        assert backend.driver.graphs == 0
        shared.close()


def test_programs_prepared_for_places_are_given_back_beyond_the_last_few(
    lowered: list[Lowered], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cohabit.runtime.shared_region.sharing.PROGRAMS_KEPT", 1)
    shared = Shared(fake_cuda(), "pipelined", lowered[:2], region_for(lowered, 1.5)).add_all()
    for n in (0, 0, 1, 1, 0, 0):
        shared.run(n)
    assert all(len(model.programs) == 1 for model in shared.shared._models.values())
    assert len(shared.backend.executor._admitted) == 2
    shared.close()


def test_a_plan_that_needs_a_larger_workspace_or_moves_parameters_itself_is_refused(lowered: list[Lowered]) -> None:
    shared = Shared(cpu(), "lru", lowered[:1], region_for(lowered, 1.5))
    graph = lowered[0].graphs[Bucket(2)]
    large = with_room(resident_plan(graph), 2 * WORKSPACE_BYTES)
    with pytest.raises(
        MemoryExceeded, match=r"wide0: the plan has a workspace of .* there are .* below the region"
    ):
        shared.shared.add(lowered[0], large, None, shared.stores[0])
    with pytest.raises(UnsupportedPlan, match="only a program whose plan keeps every parameter can move"):
        shared.shared.add(lowered[0], streaming_plan(graph), None, shared.stores[0])
    shared.close()
