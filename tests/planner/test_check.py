"""The checker accepts a plan written by hand, and names what is wrong with every way to break it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import pytest

from cohabit.planner.check import _Range, _Ranges, check
from cohabit.planner.errors import FingerprintMismatch, InvalidPlan
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.profile import Profile
from tests.support.planner.graphs import PAGE, chain, hand_written_plan, profile_of
from tests.support.planner.reference import peak_bytes

GRAPH = chain([PAGE] * 3)
PROFILE = profile_of(GRAPH)
PLAN = hand_written_plan(GRAPH, PROFILE)
replace = msgspec.structs.replace


def with_step(index: int, step: Step) -> Plan:
    return replace(PLAN, steps=(*PLAN.steps[:index], step, *PLAN.steps[index + 1 :]))


def and_then(*steps: Step) -> Plan:
    return replace(PLAN, steps=(*PLAN.steps, *steps))


def changed(index: int, **fields: object) -> Plan:
    return with_step(index, replace(PLAN.steps[index], **fields))


def at(region: str, offset: int) -> Address:
    return msgspec.convert({"region": region, "offset": offset}, Address)


@dataclass(frozen=True)
class Broken:
    plan: Callable[[], Plan]
    says: str


WINDOW = at("workspace", 2 * PAGE)

BROKEN = {
    "op_missing": Broken(lambda: with_step(7, Drop(0)), "op op2 never runs"),
    "offset_not_aligned": Broken(lambda: changed(0, address=at("workspace", 2 * PAGE + 64)), "not aligned to 4096"),
    "beyond_the_workspace": Broken(lambda: changed(0, address=at("workspace", 3 * PAGE)), "workspace has 12288"),
    "beyond_the_partition": Broken(lambda: changed(0, address=at("partition", PAGE)), "partition has 4096 bytes"),
    "in_the_pool": Broken(
        lambda: changed(0, address=at("workspace", PAGE)), "W1 at workspace+4096 lies in the pool"
    ),
    "negative_size": Broken(
        lambda: replace(PLAN, memory=Memory(3 * PAGE, -1), residents=()), "the partition has -1 bytes"
    ),
    "negative_pool": Broken(lambda: replace(PLAN, pool_bytes=-1), "the workspace 12288, and the pool -1;"),
    "pool_beyond_the_workspace": Broken(
        lambda: replace(PLAN, pool_bytes=3 * PAGE + 1), "the workspace 12288, and the pool 12289;"
    ),
    "pool_too_small": Broken(
        lambda: replace(PLAN, pool_bytes=2 * PAGE - 1),
        "(compute op0): tensors without an address take 8192 bytes, and 0 released bytes may still be in use;"
        " the pool has only 8191",
    ),
    "pool_too_small_for_the_inputs": Broken(
        lambda: replace(PLAN, pool_bytes=PAGE - 1),
        "start: tensors without an address take 4096 bytes",
    ),
    "input_not_dropped": Broken(
        lambda: with_step(2, Drop(0)), "(compute op1): tensors without an address take 12288 bytes"
    ),
    "negative_offset": Broken(lambda: changed(0, address=at("workspace", -PAGE)), "W1 at workspace+-4096"),
    "overlap_with_live_tensor": Broken(lambda: changed(0, address=at("partition", 0)), "overlaps W0 at [0, 4096)"),
    "parameter_without_address": Broken(
        lambda: changed(0, address=None), "(compute op0): tensors without an address take 12288 bytes"
    ),
    "resident_without_address": Broken(
        lambda: replace(PLAN, residents=(Placement(0),)),
        "resident W0 has no address, but the workspace does not last",
    ),
    "activation_with_address": Broken(
        lambda: and_then(SwapOut(6, after=(7,)), Drop(6), SwapIn(6, WINDOW, after=(10,))),
        "A3 has an address, but is neither a parameter nor state",
    ),
    "address_though_all_is_counted": Broken(
        lambda: replace(PLAN, memory=single_budget(3 * PAGE)),
        "start: W0 at partition+0 ends at 4096, but the partition has 0 bytes",
    ),
    "read_before_swap_in": Broken(
        lambda: replace(PLAN, steps=(Drop(0), *PLAN.steps[1:])), "reads W0, which is not in memory"
    ),
    "read_does_not_wait": Broken(lambda: changed(3, after=()), "(compute op1) does not wait for W1 to arrive"),
    "overwrite_does_not_wait_for_reader": Broken(
        lambda: changed(6, after=()), "overwrites W1 at workspace [8192, 12288) without waiting for step 2"
    ),
    "overwrite_waits_for_wrong_reader": Broken(lambda: changed(6, after=(1,)), "overwrites W1"),
    "wait_forward": Broken(lambda: changed(3, after=(0, 6)), "waits for step 6, which is not before it"),
    "wait_for_itself": Broken(lambda: changed(3, after=(0, 3)), "waits for step 3, which is not before it"),
    "wait_for_negative": Broken(lambda: changed(3, after=(0, -1)), "waits for step -1"),
    "wait_for_drop": Broken(lambda: changed(3, after=(0, 2)), "waits for step 2, a drop"),
    "swap_in_of_what_is_there": Broken(lambda: changed(0, tensor=0), "W0 is in memory already"),
    "swap_in_of_unsaved_activation": Broken(lambda: and_then(SwapIn(4)), "the activation was never swapped out"),
    "swap_in_of_unsaved_input": Broken(lambda: and_then(SwapIn(3)), "the input was never swapped out"),
    "swap_in_before_swap_out_ends": Broken(
        lambda: and_then(SwapOut(6, after=(7,)), Drop(6), SwapIn(6, after=(7,))),
        "does not wait for the swap-out of A3",
    ),
    "swap_out_of_parameter": Broken(lambda: and_then(SwapOut(0)), "a parameter has a host copy"),
    "swap_out_does_not_wait": Broken(lambda: and_then(SwapOut(6)), "does not wait for A3 to arrive"),
    "drop_of_what_is_gone": Broken(lambda: and_then(Drop(1)), "(drop of W1): the tensor is not in memory"),
    "output_dropped": Broken(lambda: and_then(Drop(6)), "output A3 is not in memory at the end"),
    "output_late": Broken(
        lambda: and_then(SwapOut(6, after=(7,)), Drop(6), SwapIn(6, after=(10,))),
        "output A3 may arrive after the last op",
    ),
    "resident_dropped": Broken(lambda: and_then(Drop(0)), "resident W0 is not in memory at the end"),
    "resident_elsewhere": Broken(
        lambda: and_then(Drop(0), SwapIn(0, WINDOW, after=(7,))), "ends at workspace+8192, but started at"
    ),
    "resident_in_workspace": Broken(
        lambda: replace(PLAN, residents=(Placement(0, WINDOW),)), "resident W0 is not in the partition"
    ),
    "resident_activation": Broken(
        lambda: replace(PLAN, residents=(*PLAN.residents, Placement(5))),
        "A2 is a resident, but neither a parameter nor state",
    ),
    "resident_twice": Broken(
        lambda: replace(PLAN, residents=(*PLAN.residents, *PLAN.residents)), "start: W0 is in memory already"
    ),
    "unknown_op": Broken(lambda: changed(1, op=9), "step 1 names op 9, but the graph has only 3 ops"),
    "unknown_tensor": Broken(lambda: changed(0, tensor=99), "step 0 names tensor 99"),
    "unknown_resident": Broken(
        lambda: replace(PLAN, residents=(Placement(-1, WINDOW),)), "tensor -1 is a resident"
    ),
}


def violations(graph: Graph, profile: Profile | None, plan: Plan) -> Sequence[str]:
    """What the checker says against a plan; nothing if it may run."""
    try:
        check(graph, profile, plan)
    except InvalidPlan as error:
        return error.violations
    return []


def test_hand_written_plan_may_run() -> None:
    assert violations(GRAPH, PROFILE, PLAN) == []
    assert violations(GRAPH, None, PLAN) == []


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plan_is_refused(name: str) -> None:
    broken = BROKEN[name]
    with pytest.raises(InvalidPlan) as refusal:
        check(GRAPH, PROFILE, broken.plan())
    assert any(broken.says in v for v in refusal.value.violations), refusal.value.violations


def test_all_violations_are_listed() -> None:
    plan = replace(changed(3, after=()), residents=())
    with pytest.raises(InvalidPlan) as refusal:
        check(GRAPH, PROFILE, plan)
    assert len(refusal.value.violations) == 2
    assert "reads W0" in str(refusal.value)
    assert "W1 to arrive" in str(refusal.value)


def test_plan_for_another_graph_or_profile_is_refused() -> None:
    with pytest.raises(FingerprintMismatch, match="plan was made for"):
        check(chain([PAGE] * 4), None, PLAN)
    with pytest.raises(FingerprintMismatch, match="plan was made for"):
        check(GRAPH, profile_of(GRAPH, 2.0), PLAN)


def test_waits_are_transitive() -> None:
    """W2 overwrites what op0 read; it waits for op1 only, which runs after op0 on the same lane."""
    in_place = at("partition", 0)
    plan = replace(
        PLAN,
        residents=(),
        steps=(
            SwapIn(0, in_place),
            SwapIn(1, WINDOW),
            Compute(0, after=(0,)),
            Drop(0),
            Drop(3),
            Compute(1, after=(1,)),
            SwapIn(2, in_place, after=(5,)),
            Drop(4),
            Compute(2, after=(6,)),
        ),
    )
    assert violations(GRAPH, PROFILE, plan) == []


def test_bytes_of_an_op_s_scratch_are_free_once_it_has_ended() -> None:
    """W takes the bytes of the scratch of `make`: 4100, counted as 4352."""
    graph = Graph(
        "scratch", 1, "w",
        (Tensor("W", PAGE, "parameter", PAGE), Tensor("A", 60, "activation"), Tensor("B", 64, "activation")),
        (Op("make", "t", (), (1,), scratch_bytes=PAGE + 4), Op("use", "t", (0, 1), (2,))),
        (2,),
    )  # fmt: skip
    pool_bytes = PAGE + 256 + 64
    memory = single_budget(pool_bytes)
    for after, fine in (((0,), True), ((), False)):
        plan = Plan(
            graph.fingerprint, "", memory, pool_bytes, (), (Compute(0), SwapIn(0, None, after), Compute(1, (1,)))
        )
        if fine:
            check(graph, None, plan)
            assert peak_bytes(graph, plan) == pool_bytes
        else:
            with pytest.raises(InvalidPlan, match="tensors without an address take 4160 bytes, and 4352 released"):
                check(graph, None, plan)


def test_a_step_that_takes_no_bytes_is_not_asked_for_room() -> None:
    """Y may still be on its way out when `update` runs; the swap-in of W waited for that, and `update` does not."""
    tensors = (
        Tensor("S", 64, "state"), Tensor("X", 64, "input"), Tensor("Y", 64, "activation"),
        Tensor("W", 64, "parameter"),
    )  # fmt: skip
    ops = (Op("make", "t", (0, 1), (2,)), Op("update", "t", (0,), (), 0, (0,)), Op("use", "t", (2, 3), ()))
    graph = Graph("no_bytes", 1, "w", tensors, ops, ())
    steps = (
        Compute(0), SwapOut(2, (0,)), Drop(2), SwapIn(3, None, (1,)), Compute(1), Drop(1), SwapIn(2), Compute(2, (6,)),
    )  # fmt: skip
    plan = Plan(graph.fingerprint, "", single_budget(192), 192, (Placement(0),), steps)
    assert violations(graph, None, plan) == []


def test_recomputation_is_allowed() -> None:
    """A1 is dropped and made again before its reader."""
    graph = chain([PAGE, PAGE])
    residents = tuple(Placement(i, at("partition", i * PAGE)) for i in range(2))
    steps = (Compute(0), Drop(3), Compute(0), Drop(2), Compute(1), Drop(3))
    plan = Plan(graph.fingerprint, "", Memory(2 * PAGE, 2 * PAGE), 2 * PAGE, residents, steps)
    assert violations(graph, None, plan) == []


def test_empty_tensors_overlap_nothing() -> None:
    graph = chain([0, PAGE], 0)
    inside = at("partition", 0)
    residents = (Placement(0, inside), Placement(1, inside))
    steps = (Compute(0), Drop(2), Compute(1), Drop(3))
    assert violations(graph, None, Plan(graph.fingerprint, "", Memory(0, PAGE), 0, residents, steps)) == []


def test_resident_that_came_back_may_leave_again_before_an_op_reads_it() -> None:
    """An op has read it before, and had waited until the inference before had brought it."""
    graph = chain([PAGE])
    plan = Plan(graph.fingerprint, "", single_budget(3 * PAGE), 3 * PAGE, (Placement(0),), ())
    away_and_back = (Drop(0), SwapIn(0, None, (0,)))
    assert violations(graph, None, replace(plan, steps=(Compute(0), *away_and_back, *away_and_back))) == []
    with pytest.raises(InvalidPlan, match="no op has read the tensor yet"):
        check(graph, None, replace(plan, steps=(Drop(0), SwapIn(0), Compute(0, (1,)))))


def in_place_graph() -> Graph:
    """make writes A; look reads it; change doubles it in place; use reads the doubled one."""
    tensors = (Tensor("X", PAGE, "input"), Tensor("A", PAGE, "activation"), Tensor("B", PAGE, "activation"))
    ops = (
        Op("make", "copy", (0,), (1,)),
        Op("look", "sum", (1,), (2,)),
        Op("change", "mul_", (1,), (), mutates=(1,)),
        Op("use", "print", (1,), ()),
    )
    return Graph("in_place", 1, "", tensors, ops, (2,))


def in_place_plan(order: tuple[int, ...]) -> Plan:
    graph = in_place_graph()
    steps = tuple(Compute(op) for op in order)
    return Plan(graph.fingerprint, "", Memory(3 * PAGE), 3 * PAGE, (), steps)


def test_an_op_that_reads_a_number_comes_before_those_that_may_take_it() -> None:
    tensors = (Tensor("rate", PAGE, "input"), Tensor("x", PAGE, "input"), Tensor("y", PAGE, "activation"))
    ops = (Op("item", "item", (0,), ()), Op("scale", "mul", (1,), (2,)))
    graph = Graph("scaled", 1, "", tensors, ops, (2,))

    def plan(*order: int) -> Plan:
        return Plan(graph.fingerprint, "", Memory(3 * PAGE), 3 * PAGE, (), tuple(Compute(op) for op in order))

    assert violations(graph, None, plan(0, 1)) == []
    with pytest.raises(InvalidPlan, match="runs before item, whose number it may take"):
        check(graph, None, plan(1, 0))


def test_an_in_place_op_stays_between_those_that_use_its_tensor() -> None:
    assert violations(in_place_graph(), None, in_place_plan((0, 1, 2, 3))) == []
    for order in ((0, 2, 1, 3), (0, 1, 3, 2), (0, 1, 2, 2, 3)):
        with pytest.raises(InvalidPlan, match="has been changed in place"):
            check(in_place_graph(), None, in_place_plan(order))


def test_a_host_copy_from_before_a_change_in_place_is_not_swapped_in() -> None:
    plan = in_place_plan((0, 1, 2, 3))
    stale = (
        *plan.steps[:2],
        SwapOut(1, (0,)),
        Compute(2, after=(2,)),
        Drop(1),
        SwapIn(1, None, (3,)),
    )
    with pytest.raises(InvalidPlan, match="never swapped out"):
        check(in_place_graph(), None, replace(plan, steps=(*stale, Compute(3, after=(5,)))))
    early = (*plan.steps[:2], SwapOut(1, (0,)), *plan.steps[2:])
    with pytest.raises(InvalidPlan, match="before its swap-out has ended"):
        check(in_place_graph(), None, replace(plan, steps=early))


def test_overlapping_ranges_are_found_as_by_going_through_all() -> None:
    rng = random.Random(0)
    known, kept = _Ranges(), []
    for step in range(400):
        start = rng.randrange(60)
        place = _Range(
            rng.choice(("partition", "workspace")), start, start + rng.choice((0, 1, 3, 20)), str(step), (0, 0, 0)
        )
        assert sorted(known.overlapping(place), key=str) == sorted((r for r in kept if place.overlaps(r)), key=str)
        if kept and rng.random() < 0.45:
            known.remove(kept.pop(rng.randrange(len(kept))))
        else:
            known.add(place)
            kept.append(place)


def test_a_parameter_that_is_an_output_is_there_when_the_last_op_ends_and_no_longer() -> None:
    tensors = (Tensor("W", 64, "parameter"), Tensor("X", 64, "input"), Tensor("Y", 64, "activation"))
    graph = Graph("output", 1, "", tensors, (Op("make", "t", (1,), (2,)),), (0, 2))
    plan = Plan(graph.fingerprint, "", single_budget(192), 192, (), ())
    assert violations(graph, None, replace(plan, steps=(SwapIn(0), Compute(0, (0,)), Drop(0)))) == []
    for steps in ((SwapIn(0), Drop(0), Compute(0, (0,))), (Compute(0), SwapIn(0)), (SwapIn(0), Compute(0))):
        with pytest.raises(InvalidPlan, match="output W is not in memory when the last op ends"):
            check(graph, None, replace(plan, steps=steps))
