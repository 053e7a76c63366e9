"""Plans are checked when they are bound, and steps are joined."""

from collections.abc import Callable, Iterator

import pytest
from msgspec import structs

from cohabit.planner.errors import FingerprintMismatch, InvalidPlan
from cohabit.planner.graph import Graph
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Compute, Drop, Placement, Plan
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.measure.profile import resident_plan
from tests.support.runtime.backends import Bench, cpu, opened
from tests.support.runtime.plans import streaming_plan


@pytest.fixture
def bench(constructs: dict[str, Lowered]) -> Iterator[Bench]:
    """A model with a table that stays with the host, and parameters that are views of others."""
    with opened(cpu, constructs["tied"]) as bench:
        yield bench


@pytest.fixture(params=[resident_plan, streaming_plan])
def plan(request: pytest.FixtureRequest, bench: Bench) -> Plan:
    made: Plan = request.param(bench.graph)
    return made


def test_a_plan_is_checked(bench: Bench, plan: Plan) -> None:
    without_its_end = structs.replace(plan, steps=plan.steps[:1])
    with pytest.raises(InvalidPlan):
        bench.program(without_its_end)
    foreign = Plan("0" * 64, "", plan.memory, plan.pool_bytes, (), ())
    with pytest.raises(FingerprintMismatch):
        bench.program(foreign)


def without_addresses(graph: Graph) -> Plan:
    plan = resident_plan(graph)
    nbytes = plan.memory.workspace_bytes + plan.memory.partition_bytes
    counted = tuple(Placement(resident.tensor) for resident in plan.residents)
    return structs.replace(plan, memory=single_budget(nbytes), pool_bytes=nbytes, residents=counted)


def with_an_op_computed_again(graph: Graph) -> Plan:
    plan = resident_plan(graph)
    dropped = [Drop(tensor) for tensor in graph.ops[0].writes]
    return structs.replace(plan, steps=(plan.steps[0], *dropped, Compute(0), *plan.steps[1:]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (without_addresses, "no address for .*; plan it for a partition and a workspace"),
        (with_an_op_computed_again, "more than once; plan it for a partition and a workspace"),
    ],
    ids=["no addresses", "recomputed"],
)
def test_plans_of_training_steps_are_refused(bench: Bench, make: Callable[[Graph], Plan], reason: str) -> None:
    with pytest.raises(UnsupportedPlan, match=reason):
        bench.program(make(bench.graph))


def test_steps_are_joined_where_no_lane_waits_for_another(bench: Bench, plan: Plan) -> None:
    program = bench.program(plan)
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
