"""Sequences of actions become plans that the checker accepts, in the bytes that they were counted to need."""

import random

import pytest
from cohabit.planner.schedule.sequence import compute, drop, lay_out, swap_in, swap_out, write
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.serial import least_bytes, require_single_budget, serial_plan
from tests.planner.graphs import PAGE, chain, profile_of, random_graph, random_profile, random_training_graph
from tests.planner.reference import sequence_peak_bytes

seeds = st.integers(0, 10**6)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds, st.booleans())
def test_serial_plan_runs_in_the_least_memory(seed: int, training: bool) -> None:
    rng = random.Random(seed)
    graph = random_training_graph(rng) if training else random_graph(rng)
    profile = random_profile(rng, graph)
    least = least_bytes(graph)
    check(graph, profile, serial_plan(Problem(graph, profile, least)))
    if least > 0:
        with pytest.raises(InfeasibleBudget) as refusal:
            require_single_budget(Problem(graph, profile, least - 1), "test")
        assert refusal.value.least_bytes == least


def test_activation_is_swapped_out_and_computed_again() -> None:
    """W0 stays, W1 passes; A1 goes to the host and back, A2 is dropped and computed anew."""
    graph = chain([PAGE] * 3)
    profile = profile_of(graph)
    w0, w1, w2, a0, a1, a2, a3 = range(7)
    actions = [
        compute(0), drop(a0), swap_out(a1), swap_in(w1), compute(1), drop(a1), drop(a2), swap_in(a1),
        compute(1), drop(w1), drop(a1), swap_in(w2), compute(2), drop(a2), drop(w2),
    ]  # fmt: skip
    placed = lay_out(graph, actions, (w0,))
    assert placed.peak_bytes == sequence_peak_bytes(graph, actions, (w0,)) == 4 * PAGE
    plan = write(Problem(graph, profile, 4 * PAGE), actions, (w0,), placed)
    check(graph, profile, plan)
    assert a3 in graph.outputs


def test_resident_comes_back_to_its_bytes() -> None:
    graph = chain([PAGE] * 2)
    profile = profile_of(graph)
    w0, w1, a0, a1, _a2 = range(5)
    actions = [compute(0), drop(w0), drop(a0), swap_in(w1), compute(1), drop(w1), drop(a1), swap_in(w0)]
    placed = lay_out(graph, actions, (w0,))
    assert placed.peak_bytes == 3 * PAGE
    check(graph, profile, write(Problem(graph, profile, 3 * PAGE), actions, (w0,), placed))
