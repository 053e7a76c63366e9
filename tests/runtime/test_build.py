"""Plans are checked, and bound wherever there is room."""

from collections.abc import Iterator

import pytest
import torch
from msgspec import structs

from cohabit.planner.errors import FingerprintMismatch, InvalidPlan
from cohabit.planner.plan import Plan
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.build import build
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.cpu.arena import CpuArena
from cohabit.runtime.cpu.executor import CpuExecutor
from cohabit.runtime.host.store import open_store
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.profiling.profile import resident_plan
from tests.runtime import models
from tests.runtime.plans import streaming_plan

BATCH = Bucket(2)
TOKENS = torch.tensor([[1, 7, 8999, 0, 3], [4, 4, 4, 4, 4]])


@pytest.fixture
def tied(constructs: models.Constructs) -> Lowered:
    """A model with a table that stays with the host, and parameters that are views of others."""
    return constructs["tied"]


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
    with torch.no_grad():
        return list(models.made("tied")(TOKENS).values())


def is_right(outputs: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(outputs, eager(), strict=True))


def test_a_plan_is_bound_wherever_its_partition_lies(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    store = open_store("ram", tied.weights_path, tied.manifest)
    workspace = 2 * tied.manifest.segment_bytes
    here = build(tied, plan, None, arena, Bases(0, workspace), store)
    there = build(tied, plan, None, arena, Bases(tied.manifest.segment_bytes, workspace), store)
    assert {s.offset for s in here.residents}.isdisjoint(s.offset for s in there.residents)
    assert is_right(answer(there))
    assert is_right(answer(here))


def test_a_plan_is_checked(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    store = open_store("ram", tied.weights_path, tied.manifest)
    bases = Bases(0, 2 * tied.manifest.segment_bytes)
    without_its_end = structs.replace(plan, steps=plan.steps[:1])
    with pytest.raises(InvalidPlan):
        build(tied, without_its_end, None, arena, bases, store)
    foreign = Plan("0" * 64, "", plan.memory, plan.pool_bytes, (), ())
    with pytest.raises(FingerprintMismatch):
        build(tied, foreign, None, arena, bases, store)


def test_steps_are_joined_where_no_lane_waits_for_another(tied: Lowered, plan: Plan, arena: CpuArena) -> None:
    store = open_store("ram", tied.weights_path, tied.manifest)
    program = build(tied, plan, None, arena, Bases(0, 2 * tied.manifest.segment_bytes), store)
    assert [c for s in program.call_groups for c in s.calls] == [c for step in program.computes for c in step.calls]
    copies = (*program.swap_ins, *program.swap_outs)
    waiting = [n for n, step in enumerate(program.computes) if n and step.first_reads]
    assert len(program.call_groups) == 1 + len(waiting) or copies
    awaited = {copy.computes_before for copy in copies}
    start = 0
    for group in program.call_groups:
        assert group.first is program.computes[start]
        end = start + group.steps
        assert awaited.isdisjoint(range(start + 1, end)), "a copy waits for a step within"
        for step in program.computes[start + 1 : end]:
            assert not step.first_reads
            assert (step.swap_ins_before, step.swap_outs_before) == (
                group.first.swap_ins_before,
                group.first.swap_outs_before,
            )
        start = end
    assert start == len(program.computes)
