"""The on-demand baseline evicts what was used longest ago, and prefetches what its first iteration has swapped."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.swapadvisor.on_demand import (
    EvictAndFetch,
    Eviction,
    least_recently_used,
    on_demand,
    prefetched,
    steady,
)
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import SWAP_IN
from cohabit.planner.search.driver import search
from tests.support.planner.actions import compute, drop, swap_in, swap_out
from tests.support.planner.graphs import (
    PAGE,
    chain,
    counted_problem,
    parameter,
    profile_of,
)
from tests.support.planner.reference import sequence_peak_bytes

seeds = st.integers(0, 10**6)


def backwards() -> Graph:
    """Three ops forward, three backward through the same activations and weights; one page each.

    f0: W0 X -> A | f1: W1 A -> B | f2: W2 B -> C | b2: W2 C B -> D | b1: W1 D A -> E | b0: W0 E X -> F
    """
    names = ("A", "B", "C", "D", "E", "F")
    tensors = [parameter(f"W{i}") for i in range(3)] + [Tensor("X", PAGE, "input")]
    tensors += [Tensor(name, PAGE, "activation") for name in names]
    w0, w1, w2, x, a, b, c, d, e, f = range(10)
    reads = ((w0, x), (w1, a), (w2, b), (w2, c, b), (w1, d, a), (w0, e, x))
    ops = [Op(f"op{k}", "any", r, (k + a,)) for k, r in enumerate(reads)]
    graph = Graph("backwards", 1, "weights", tuple(tensors), tuple(ops), (f,))
    graph.validate()
    return graph


W0, W1, W2, X, A, B, C, D, E, F = range(10)


def test_least_recently_used_leaves_and_an_activation_is_saved_first() -> None:
    """Five pages hold all that ops 0 and 1 touch. Op 2 brings W2 and C: W0 and X go, which only op 0 has used."""
    course = least_recently_used(backwards(), 5 * PAGE, frozenset())
    assert course.turns == (
        EvictAndFetch((), (W0,)),
        EvictAndFetch((), (W1,)),
        EvictAndFetch((Eviction(W0, 0, save=False), Eviction(X, 0, save=True)), (W2,)),
        EvictAndFetch((Eviction(W1, 1, save=False),), ()),
        EvictAndFetch((Eviction(C, 3, save=False), Eviction(B, 3, save=False)), (W1,)),
        EvictAndFetch(
            (Eviction(D, 4, save=False), Eviction(A, 4, save=False), Eviction(W2, 3, save=False)), (W0, X)
        ),
        EvictAndFetch(
            (
                Eviction(E, 5, save=False),
                Eviction(X, 5, save=False),
                Eviction(W1, 4, save=False),
                Eviction(W0, 5, save=False),
            ),
            (),
        ),
    )


def test_weights_stay_from_one_iteration_to_the_next_where_they_are_used_before_they_are_pressed_out() -> None:
    """In five pages the iteration ends with W0 and W1 and starts with ops that read them."""
    course = steady(backwards(), 5 * PAGE)
    assert course.residents == {W0, W1}
    assert [turn.fetches for turn in course.turns] == [(), (), (W2,), (), (W1,), (W0, X), ()]


def test_what_a_chain_ends_with_is_pressed_out_before_it_is_used_again() -> None:
    """LRU in a cycle: the last weights leave for the first ones, and nothing is left when their turn comes."""
    graph = chain([PAGE] * 6)
    assert least_recently_used(graph, 5 * PAGE, frozenset()).kept == {3, 4, 5}
    assert steady(graph, 5 * PAGE).residents == frozenset()
    assert steady(graph, 8 * PAGE).residents == {0, 1, 2, 3, 4, 5}


def test_changed_state_is_saved_and_unchanged_state_is_not() -> None:
    tensors = [
        Tensor("S", PAGE, "state", PAGE),
        parameter("W"),
        Tensor("X", PAGE, "input"),
        Tensor("Y", PAGE, "activation"),
    ]
    ops = [Op("read", "any", (0, 2), ()), Op("other", "any", (1, 2), (3,)), Op("change", "any", (0,), (), 0, (0,))]
    graph = Graph("stateful", 1, "weights", tuple(tensors), tuple(ops), (3,))
    graph.validate()
    course = least_recently_used(graph, 3 * PAGE, frozenset())
    assert course.turns[1].leaves == (Eviction(0, 0, save=False),)
    assert course.turns[3].leaves[-1] == Eviction(0, 2, save=True)
    assert least_recently_used(graph, 3 * PAGE, frozenset((0,))).turns[1].leaves == (Eviction(0, 0, save=True),)


@pytest.mark.parametrize("pages", [3, 4])
def test_state_that_is_an_output_is_saved_and_stays(pages: int) -> None:
    """What changes it can be in memory at the end without being there at the start, as in three pages here."""
    tensors = [Tensor("S", PAGE, "state", PAGE), Tensor("X", PAGE, "input"), Tensor("Y", PAGE, "activation")]
    tensors.append(parameter("W"))
    ops = [Op("op0", "any", (3, 1), (2,)), Op("op1", "any", (0, 2), (), 0, (0,))]
    graph = Graph("stateful", 1, "weights", tuple(tensors), tuple(ops), (0, 2))
    graph.validate()
    plan = search(Problem(graph, profile_of(graph), single_budget(pages * PAGE)), "on_demand")
    assert {p.tensor for p in plan.residents} == ({0, 3} if pages == 4 else {3})
    check(graph, None, plan)


def test_prefetching_swaps_the_same_but_earlier() -> None:
    """In six pages W0 and X leave right after op 0, their last; each comes back once what was in its place is dead."""
    graph, course = backwards(), steady(backwards(), 6 * PAGE)
    assert on_demand(graph, course) == [
        compute(0), compute(1), drop(W0), compute(2), swap_out(X), drop(X), compute(3), drop(C), drop(B),
        compute(4), drop(D), drop(A), swap_in(W0), swap_in(X), compute(5), drop(E), drop(X),
    ]  # fmt: skip
    assert prefetched(graph, course) == [
        compute(0), drop(W0), swap_out(X), drop(X), compute(1), compute(2), compute(3), drop(C), drop(B),
        swap_in(W0), compute(4), drop(D), drop(A), swap_in(X), compute(5), drop(E), drop(X),
    ]  # fmt: skip


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds)
def test_decisions_fit_and_hold_from_one_iteration_to_the_next(seed: int) -> None:
    problem = counted_problem(seed)
    graph, course = problem.graph, steady(problem.graph, problem.memory.nbytes)
    demand, early = on_demand(graph, course), prefetched(graph, course)
    for actions in (demand, early):
        assert sequence_peak_bytes(graph, actions, course.residents) <= problem.memory.nbytes
    assert least_recently_used(graph, problem.memory.nbytes, course.residents) == course
    assert course.residents <= course.kept
    assert sorted(demand) == sorted(early)
    arrivals = [[a for a in actions if a[0] == SWAP_IN] for actions in (demand, early)]
    assert arrivals[0] == arrivals[1]


def test_prefetching_overlaps_what_on_demand_waits_for() -> None:
    """Ten ops of a second, ten weights of a second: half of each copy can hide at most, and all but the first do."""
    graph = chain([PAGE] * 10)
    problem = Problem(graph, profile_of(graph), single_budget(6 * PAGE))
    plan = search(problem, "on_demand")
    assert plan.provenance is not None
    assert plan.provenance.latency_s == pytest.approx(11.0)
