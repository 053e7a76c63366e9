"""HOME's four parts of a step's time, of a plan whose times a reader can add up."""

import random

import pytest

from benchmarks.planner.time_parts import TimeParts, united
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import PAGE, random_profile, random_training_graph

X, A, W, Y = range(4)


def planned(*steps: Step, residents: tuple[Placement, ...] = ()) -> TimeParts:
    """The parts of a step: A from X, then Y from A and W, a second each; W takes five to arrive."""
    kinds = {"X": "input", "A": "activation", "W": "parameter", "Y": "activation"}
    tensors = tuple(Tensor(name, PAGE, kind) for name, kind in kinds.items())  # type: ignore[arg-type]
    graph = Graph("chain", 1, "weights", tensors, (Op("a", "any", (X,), (A,)), Op("y", "any", (A, W), (Y,))), (Y,))
    graph.validate()
    link = Link(0.0, PAGE / 5)
    profile = Profile(graph.fingerprint, "hand", (1.0, 1.0), link, link)
    memory = single_budget(4 * PAGE)
    plan = Plan(graph.fingerprint, profile.fingerprint, memory, memory.nbytes, residents, steps)
    return TimeParts.of(graph, plan, profile)


def test_ops_hide_copies_run_again_and_wait() -> None:
    parts = planned(SwapIn(W), Compute(0), Drop(A), Compute(0), Compute(1, (0,)), Drop(W))
    assert parts == TimeParts(computation_s=1.0, overlap_s=1.0, recomputation_s=1.0, swapping_s=3.0)
    assert parts.period_s == 6.0
    assert parts.shares == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_what_stays_in_memory_is_computation_only() -> None:
    parts = planned(Compute(0), Compute(1), residents=(Placement(W),))
    assert parts == TimeParts(2.0, 0.0, 0.0, 0.0)


def test_what_returns_after_the_last_op_overlaps_the_next_step() -> None:
    parts = planned(Compute(0), Compute(1), Drop(W), SwapIn(W, after=(1,)), residents=(Placement(W),))
    assert parts == TimeParts(computation_s=1.0, overlap_s=1.0, recomputation_s=0.0, swapping_s=4.0)


def test_spans_that_overlap_or_touch_are_joined() -> None:
    assert united([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (3.0, 3.5), (6.0, 6.0)]) == [(0.0, 3.5), (4.0, 5.0)]


def test_a_swap_out_delays_the_next_step() -> None:
    parts = planned(Compute(0), SwapOut(A, after=(0,)), Compute(1), residents=(Placement(W),))
    assert parts == TimeParts(computation_s=1.0, overlap_s=1.0, recomputation_s=0.0, swapping_s=4.0)


def test_parts_add_up_to_the_simulators_period() -> None:
    rng = random.Random(0)
    for _ in range(8):
        graph = random_training_graph(rng)
        profile = random_profile(rng, graph)
        problem = Problem(graph, profile, single_budget(least_bytes(graph) * 5 // 4), objective="period")
        plan = search(problem, "capuchin")
        period_s = simulate(graph, plan, profile).period_s
        assert TimeParts.of(graph, plan, profile).period_s == pytest.approx(period_s)
