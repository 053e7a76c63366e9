"""Schedules become plans that the checker accepts, in exactly the bytes that they were counted to need."""

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget, InvalidPlan, UnsupportedProblem
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.plan import Compute, Drop, Placement, Plan, SwapIn, SwapOut, lane_of
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes, require_counted, serial_schedule
from cohabit.planner.schedule.simulate import LANES, evaluate, lanes_of, schedule_of, simulate
from cohabit.planner.schedule.table import (
    COMPUTE,
    NOTHING,
    SWAP_IN,
    WORKSPACE,
    Action,
    GraphArrays,
    Row,
    Schedule,
    columns,
    counted,
    peak_bytes,
    scheduled,
)
from cohabit.planner.schedule.write import write
from tests.support.planner.actions import compute, drop, plan_of, swap_in, swap_out
from tests.support.planner.graphs import (
    PAGE,
    any_graph,
    chain,
    profile_of,
    random_actions,
    random_graph,
    random_profile,
    random_training_graph,
)
from tests.support.planner.reference import sequence_peak_bytes

seeds = st.integers(0, 10**6)


def random_plan(rng: random.Random, spare_bytes: int = 0) -> tuple[Graph, Profile, Plan]:
    """The plan of random actions, where everything is counted or parameters and state have addresses."""
    graph = any_graph(rng)
    profile = random_profile(rng, graph)
    actions, residents = random_actions(rng, graph)
    if rng.random() < 0.7:
        memory = Memory(peak_bytes(GraphArrays.of(graph, profile), *columns(actions), residents) + spare_bytes)
        problem = Problem(graph, profile, single_budget(memory.nbytes))
        schedule = counted(problem.arrays, *columns(actions), residents, memory.nbytes)
        assert schedule is not None
        return graph, profile, write(problem, schedule, memory.nbytes)
    return graph, profile, placed_plan(graph, profile, actions, residents, spare_bytes)


def placed_plan(
    graph: Graph, profile: Profile, actions: list[Action], residents: frozenset[int], spare_bytes: int
) -> Plan:
    """Every weight has bytes of its own, residents in the partition and others after the pool."""
    taken = [(t, tensor) for t, tensor in enumerate(graph.tensors) if tensor.is_weight]
    unplaced = tuple(replace(t, nbytes=0) if t.is_weight else t for t in graph.tensors)
    pool_bytes = sequence_peak_bytes(replace(graph, tensors=unplaced), actions, residents) + spare_bytes
    window = -(-pool_bytes // PAGE) * PAGE
    home, ends = {}, {True: 0, False: window}
    for t, tensor in taken:
        home[t] = ends[t in residents] + (0 if t in residents else WORKSPACE)
        ends[t in residents] += tensor.nbytes
    rows: list[Row] = []
    last_user, computes = dict.fromkeys(home, NOTHING), 0
    for verb, what in actions:
        is_placed = verb == SWAP_IN and what in home
        rows.append((verb, what, home[what] if is_placed else NOTHING, last_user[what] if is_placed else NOTHING))
        if verb == COMPUTE:
            last_user |= {t: computes for t in graph.ops[what].reads if t in home}
            computes += 1
    problem = Problem(graph, profile, Memory(max(ends[False], pool_bytes), ends[True]))
    homes = {t: home[t] for t in sorted(residents)}
    return write(problem, scheduled(problem.arrays, rows, homes, pool_bytes), pool_bytes)


def smaller_pool(plan: Plan) -> Plan:
    return replace(plan, pool_bytes=plan.pool_bytes - 1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seeds)
def test_random_actions_run_in_exactly_the_bytes_that_they_take(seed: int) -> None:
    graph, profile, plan = random_plan(random.Random(seed))
    check(graph, profile, plan)
    if plan.pool_bytes:
        with pytest.raises(InvalidPlan, match="the pool has"):
            check(graph, profile, smaller_pool(plan))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_bytes_of_actions_are_what_going_through_them_counts(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    profile = random_profile(rng, graph)
    actions, residents = random_actions(rng, graph)
    problem = Problem(graph, profile, single_budget(0))
    peak = peak_bytes(problem.arrays, *columns(actions), residents)
    assert peak == sequence_peak_bytes(graph, actions, residents)
    assert counted(problem.arrays, *columns(actions), residents, peak - 1) is None


def most_bytes_in_use(rng: random.Random, graph: Graph, plan: Plan, inferences: int = 2) -> int:
    """Run a plan with random durations, in which only lane order and `after` hold; return its most counted bytes.

    A step takes its bytes when it starts. A copy that is dropped, or left at the end, gives them back once its last
    user has ended; residents keep theirs. The next inference starts when all ops and swap-outs have ended. Its ops wait
    for the residents that they read, and its copies for those of this one.
    """
    pace = {lane: rng.choice((0.01, 1.0, 100.0)) for lane in LANES}
    size = [t.aligned_bytes for t in graph.tensors]
    residents = {p.tensor for p in plan.residents if p.address is None}
    free_s: dict[str, float] = {}
    back_s: dict[int, float] = {}  # when the inference before has brought back a resident
    changes: list[
        tuple[float, bool, int]
    ] = []  # when, whether taken, bytes: of one moment, first what is given back
    begin_s = 0.0
    copies = dict.fromkeys(residents, (0.0, 0.0))  # since when each tensor has its bytes, and until when it is used

    def release(t: int) -> None:
        taken_s, used_s = copies.pop(t)
        if used_s > taken_s:
            changes.extend(((taken_s, True, size[t]), (used_s, False, size[t])))

    for _ in range(inferences):
        ends_s: list[float] = []
        copies |= dict.fromkeys(graph.inputs, (begin_s, begin_s))
        restored_s: dict[int, float] = {}
        for step in plan.steps:
            lane = lane_of(step)
            if lane is None or isinstance(step, Drop):
                ends_s.append(0.0)
                if isinstance(step, Drop) and step.tensor in copies:
                    release(step.tensor)
                continue
            reads = graph.ops[step.op].reads if isinstance(step, Compute) else ()
            start_s = max(
                begin_s,
                free_s.get(lane, 0.0),
                *(ends_s[j] for j in step.after),
                *(back_s.get(t, 0.0) for t in reads),
            )
            end_s = start_s + pace[lane] * rng.choice((0.01, rng.random(), 100.0))
            free_s[lane] = end_s
            ends_s.append(end_s)
            users: tuple[int, ...] = reads
            match step:
                case Compute(op=k):
                    copies |= dict.fromkeys(graph.ops[k].writes, (start_s, end_s))
                    scratch = graph.ops[k].aligned_scratch_bytes
                    changes += (start_s, True, scratch), (end_s, False, scratch)
                case SwapIn(tensor=t):
                    if step.address is None:
                        copies[t] = start_s, end_s
                    restored_s[t] = end_s
                case SwapOut(tensor=t):
                    users = (t,)
            for t in users:
                if t in copies:
                    copies[t] = copies[t][0], max(copies[t][1], end_s)
        begin_s = max(begin_s, free_s.get("compute", 0.0), free_s.get("swap_out", 0.0))
        back_s = {t: s for t, s in restored_s.items() if t in {p.tensor for p in plan.residents}}
        for t in sorted(set(copies) - residents):
            copies[t] = copies[t][0], max(copies[t][1], begin_s)  # outputs are there until the answer
            release(t)
    changes += ((taken_s, True, size[t]) for t, (taken_s, _) in copies.items())
    held = most = 0
    for _, taken, nbytes in sorted(changes):
        held += nbytes if taken else -nbytes
        most = max(most, held)
    return most


def without_wait(plan: Plan, index: int, earlier: int) -> Plan:
    step: Any = plan.steps[index]
    fewer = replace(step, after=tuple(j for j in step.after if j != earlier))
    return replace(plan, steps=(*plan.steps[:index], fewer, *plan.steps[index + 1 :]))


@pytest.mark.long
def test_a_plan_without_one_of_its_waits_is_refused_or_sound() -> None:
    """Nearly every wait is needed. Those before which bytes were in use are found in a run that takes too many."""
    rng, verdicts, overflows = random.Random(5), Counter[str](), 0
    for _ in range(60):
        graph, profile, plan = random_plan(rng)
        waits = [(i, j) for i, s in enumerate(plan.steps) if not isinstance(s, Drop) for j in s.after]
        for index, earlier in rng.sample(waits, min(len(waits), 6)):
            fewer = without_wait(plan, index, earlier)
            most = max(most_bytes_in_use(rng, graph, fewer) for _ in range(20))
            try:
                check(graph, profile, fewer)
            except InvalidPlan as refusal:
                says = str(refusal)
                verdicts["bytes" if "the pool has" in says else "other"] += 1
                overflows += most > plan.pool_bytes
                continue
            verdicts["accepted"] += 1
            assert most <= plan.pool_bytes
    assert verdicts["accepted"] < 0.03 * verdicts.total(), verdicts
    assert verdicts["bytes"] > 50, verdicts
    assert verdicts["other"] > 50, verdicts
    assert overflows > 0.3 * verdicts["bytes"], (overflows, verdicts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_a_plan_waits_for_nothing_that_lane_order_or_another_wait_implies(seed: int) -> None:
    _, _, plan = random_plan(random.Random(seed))
    ended: list[set[int]] = []  # what has ended once a step has, by lane order and waits
    latest: dict[str, int] = {}
    for index, step in enumerate(plan.steps):
        lane = lane_of(step)
        if lane is None or isinstance(step, Drop):
            ended.append(set())
            continue
        own = ended[latest[lane]] if lane in latest else set()
        for j in step.after:
            others = own.union(*(ended[k] for k in step.after if k != j))
            assert j not in others, (index, j)
        ended.append({index, *own.union(*(ended[j] for j in step.after))})
        latest[lane] = index


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_a_schedule_takes_the_time_of_its_plan(seed: int) -> None:
    """The plan has fewer waits, and what they imply is the same."""
    rng = random.Random(seed)
    graph = any_graph(rng)
    profile = random_profile(rng, graph)
    actions, residents = random_actions(rng, graph)
    memory = single_budget(sequence_peak_bytes(graph, actions, residents) + PAGE * rng.randint(0, 3))
    problem = Problem(graph, profile, memory)
    schedule = counted(problem.arrays, *columns(actions), residents, memory.nbytes)
    assert schedule is not None
    plan = write(problem, schedule, memory.nbytes)
    same_cost(problem, schedule, plan)
    again = schedule_of(plan)
    assert [again.verb.tolist(), again.what.tolist()] == [schedule.verb.tolist(), schedule.what.tolist()]
    for ours, theirs in zip(lanes_of(problem.arrays, schedule), lanes_of(problem.arrays, again), strict=True):
        assert ours.shape == theirs.shape


def same_cost(problem: Problem, schedule: Schedule, plan: Plan) -> None:
    cost = evaluate(problem, schedule, float("inf"))
    timeline = simulate(problem.graph, plan, problem.profile)
    assert (cost.latency_s, cost.period_s, cost.link_bytes) == (
        timeline.latency_s,
        timeline.period_s,
        timeline.link_bytes,
    )


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds, st.booleans())
def test_serial_plan_runs_in_the_least_memory(seed: int, training: bool) -> None:
    rng = random.Random(seed)
    graph = random_training_graph(rng) if training else random_graph(rng)
    profile = random_profile(rng, graph)
    least = least_bytes(graph)
    problem = Problem(graph, profile, single_budget(least))
    check(graph, profile, write(problem, serial_schedule(problem), least))
    if least > 0:
        with pytest.raises(InfeasibleBudget) as refusal:
            require_counted(Problem(graph, profile, single_budget(least - 1)), "test")
        assert refusal.value.least_bytes == least


def test_memory_with_a_partition_or_given_residents_is_none_in_which_everything_is_counted() -> None:
    graph = chain([PAGE] * 2)
    profile = profile_of(graph)
    for problem in (
        Problem(graph, profile, Memory(4 * PAGE, PAGE)),
        Problem(graph, profile, single_budget(8 * PAGE), (Placement(0),)),
    ):
        with pytest.raises(UnsupportedProblem, match="one budget in which everything is counted"):
            require_counted(problem, "test")


def counted_plan(graph: Graph, actions: list[Action], residents: tuple[int, ...], pages: int) -> Plan:
    plan = plan_of(Problem(graph, profile_of(graph), single_budget(pages * PAGE)), actions, residents)
    assert plan is not None
    return plan


def test_activation_is_swapped_out_and_computed_again() -> None:
    """W0 stays, W1 passes; A1 goes to the host and back, A2 is dropped and recomputed."""
    graph = chain([PAGE] * 3)
    w0, w1, w2, a0, a1, a2, a3 = range(7)
    actions = [
        compute(0), drop(a0), swap_out(a1), swap_in(w1), compute(1), drop(a1), drop(a2), swap_in(a1),
        compute(1), drop(w1), drop(a1), swap_in(w2), compute(2), drop(a2), drop(w2),
    ]  # fmt: skip
    arrays = GraphArrays.of(graph, profile_of(graph))
    assert peak_bytes(arrays, *columns(actions), (w0,)) == 4 * PAGE
    plan = counted_plan(graph, actions, (w0,), 4)
    check(graph, None, plan)
    assert a3 in graph.outputs
    # A1 leaves once op0 has written it, and its bytes are op1's input until that has ended.
    assert plan.steps[2] == SwapOut(a1, after=(0,))
    assert plan.steps[7] == SwapIn(a1, after=(2, 4))


def test_resident_comes_back_once_there_is_memory() -> None:
    """W0, A0 and A1 take the memory; W1 comes when op0 has given up W0 and A0, and W0 when op1 has ended."""
    graph = chain([PAGE] * 2)
    w0, w1, a0, a1, _a2 = range(5)
    actions = [compute(0), drop(w0), drop(a0), swap_in(w1), compute(1), drop(w1), drop(a1), swap_in(w0)]
    plan = counted_plan(graph, actions, (w0,), 3)
    check(graph, None, plan)
    assert plan.steps[3] == SwapIn(w1, after=(0,))
    assert plan.steps[7] == SwapIn(w0, after=(4,))
    roomy = counted_plan(graph, actions, (w0,), 5)
    assert roomy.steps[3] == SwapIn(w1)  # next to W0 and A0, which op0 reads meanwhile


def test_what_was_given_up_first_is_waited_for_first() -> None:
    """W1 needs a page of the three; A0 was given up first, so W1 waits for its users, not for the swap-out of A1."""
    graph = chain([PAGE] * 3)
    w0, w1, w2, a0, a1, _a2, _a3 = range(7)
    actions = [
        swap_in(w0), compute(0), swap_out(a0), swap_out(a1), drop(a0), drop(a1), drop(w0), swap_in(w1), swap_in(a1),
        compute(1), drop(w1), drop(a1), swap_in(w2), compute(2),
    ]  # fmt: skip
    plan = counted_plan(graph, actions, (), 3)
    check(graph, None, plan)
    waits = {i: s.after for i, s in enumerate(plan.steps) if not isinstance(s, Drop)}
    assert waits == {
        0: (), 1: (0,), 2: (), 3: (1,),  # A0 is an input and can leave while op0 reads it
        7: (1, 2), 8: (3,), 9: (8,), 12: (9,), 13: (12,),
    }  # fmt: skip
