"""Plans that are bound again: elsewhere, in the same place with another store, and under another plan."""

from collections.abc import Iterator

import pytest
import torch

from planner.errors import FingerprintMismatch, InvalidPlan
from planner.plan import Plan
from planner.shapes import Bucket
from runtime.binding.cache import ProgramCache
from runtime.binding.program import Bases, Program
from runtime.cpu.arena import CpuArena
from runtime.cpu.executor import CpuExecutor
from runtime.host.store import open_store
from runtime.lowering.lower import Lowered, lower
from runtime.profiling.profile import resident_plan
from tests.runtime import models
from tests.runtime.plans import streaming_plan

BATCH = Bucket(2)
TOKENS = torch.tensor([[1, 7, 8999, 0, 3], [4, 4, 4, 4, 4]])


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """A model with a table that stays with the host, and parameters that are views of others."""
    folder = tmp_path_factory.mktemp("tied")
    torch.manual_seed(0)
    models.export(models.Tied(), {"tokens": torch.zeros(3, 5, dtype=torch.int64)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "tied", [BATCH.batch], folder / "cache")


@pytest.fixture(params=["resident", "streaming"])
def plan(request: pytest.FixtureRequest, tied: Lowered) -> Plan:
    graph = tied.graphs[BATCH]
    return resident_plan(graph) if request.param == "resident" else streaming_plan(graph)


@pytest.fixture
def arena(tied: Lowered) -> Iterator[CpuArena]:
    with CpuArena(4 * tied.manifest.segment_bytes + (8 << 20)) as arena:
        yield arena


def answer(program: Program) -> list[torch.Tensor]:
    with CpuExecutor() as executor:
        executor.load(program)
        return executor.run(program, [TOKENS.clone()]).outputs


def eager() -> list[torch.Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return list(models.Tied().eval()(TOKENS).values())


def is_right(outputs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, eager(), strict=True))


def test_one_blueprint_serves_every_place(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    cache = ProgramCache()
    store = open_store("ram", tied.weights_path, tied.manifest)
    workspace = 2 * tied.manifest.segment_bytes
    here = cache.build(tied, plan, None, arena, Bases(0, workspace), store)
    there = cache.build(tied, plan, None, arena, Bases(tied.manifest.segment_bytes, workspace), store)
    assert here.draft is there.draft
    assert {s.offset for s in here.residents}.isdisjoint(s.offset for s in there.residents)
    assert is_right(answer(there))
    assert is_right(answer(here))


def test_a_model_that_comes_back_reads_its_new_store_alone(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    cache = ProgramCache()
    bases = Bases(0, 2 * tied.manifest.segment_bytes)
    first_store = open_store("ram", tied.weights_path, tied.manifest)
    first = cache.build(tied, plan, None, arena, bases, first_store)
    assert is_right(answer(first))
    first_store.close()  # its pages read zeros from now on
    arena.bytes(0, arena.nbytes)[:] = 255
    second = cache.build(tied, plan, None, arena, bases, open_store("ram", tied.weights_path, tied.manifest))
    assert second.statics is first.statics
    assert is_right(answer(second))
    assert not is_right(answer(first)), "the table was the first store's"


def test_another_arena_is_another_place(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    cache = ProgramCache()
    store = open_store("ram", tied.weights_path, tied.manifest)
    bases = Bases(0, 2 * tied.manifest.segment_bytes)
    cache.build(tied, plan, None, arena, bases, store)
    with CpuArena(arena.nbytes) as other:
        program = cache.build(tied, plan, None, other, bases, store)
        arena.bytes(0, arena.nbytes)[:] = 255
        assert is_right(answer(program))


def test_a_plan_that_is_equal_but_another_is_checked(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    cache = ProgramCache()
    store = open_store("ram", tied.weights_path, tied.manifest)
    bases = Bases(0, 2 * tied.manifest.segment_bytes)
    cache.build(tied, plan, None, arena, bases, store)
    without_its_end = Plan(
        plan.graph, "", plan.partition_bytes, plan.workspace_bytes, plan.inputs, (), plan.steps[:1]
    )
    with pytest.raises(InvalidPlan):
        cache.build(tied, without_its_end, None, arena, bases, store)
    foreign = Plan("0" * 64, "", plan.partition_bytes, plan.workspace_bytes, (), (), ())
    with pytest.raises(FingerprintMismatch):
        cache.build(tied, foreign, None, arena, bases, store)
