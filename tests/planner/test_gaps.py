"""Choices of gaps become plans: hand-checked chains, and random graphs with random choices."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.gaps import START, Choice, Gap, Gaps
from cohabit.planner.schedule.no_wait import no_wait
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.simulate import simulate
from tests.support.planner.actions import compute, drop, listed, plan_of_choices, swap_in, swap_out
from tests.support.planner.graphs import (
    PAGE,
    any_graph,
    chain,
    profile_of,
    random_profile,
)
from tests.support.planner.reference import sequence_peak_bytes

seeds = st.integers(0, 10**6)
KEEP, SWAP, RECOMPUTE, RESTORE = Choice.KEEP, Choice.SWAP, Choice.RECOMPUTE, Choice.RESTORE


def there_and_back() -> Graph:
    """X -> A1 -> A2 -> B, then C reads A1 and B: A1 has a gap at op 2."""
    names = [("X", "input"), *((n, "activation") for n in ("A1", "A2", "B", "C"))]
    tensors = tuple(Tensor(name, PAGE, kind) for name, kind in names)  # type: ignore[arg-type]
    reads = ((0,), (1,), (2,), (1, 3))
    ops = tuple(Op(f"op{k}", "any", r, (k + 1,)) for k, r in enumerate(reads))
    graph = Graph("there and back", 1, "weights", tensors, ops, (4,))
    graph.validate()
    return graph


def random_choices(rng: random.Random, gaps: Gaps) -> list[Choice]:
    likely = rng.choice(list(Choice))
    return [likely if likely in g.choices and rng.random() < 0.5 else rng.choice(g.choices) for g in gaps.all]


def all_kept(gaps: Gaps) -> list[Choice]:
    return [KEEP] * len(gaps.all)


def test_gaps_of_a_chain_are_those_of_its_weights() -> None:
    gaps = Gaps(chain([PAGE] * 3))
    assert gaps.all == tuple(Gap(w, w, w, True, (KEEP, SWAP, RESTORE)) for w in range(3))


def test_gaps_of_activations_inputs_and_outputs() -> None:
    tensors = tuple(
        Tensor(n, PAGE, k)  # type: ignore[arg-type]
        for n, k in (("X", "input"), ("Y", "input"), ("A", "activation"), ("B", "activation"), ("C", "activation"))
    )
    ops = (Op("a", "any", (0,), (2,)), Op("b", "any", (2,), (3,)), Op("c", "any", (1, 3), (4,)))
    gaps = Gaps(Graph("g", 1, "weights", tensors, ops, (2, 4)))
    assert gaps.all == (Gap(1, START, 2, False, (KEEP, SWAP)),)  # A, an output, is used by ops 0, 1 and 2
    other = Gaps(Graph("g", 1, "weights", tensors, (*ops, Op("d", "any", (4,), ())), (2, 4)))
    assert other.all[1:] == (Gap(2, 1, 3, False, (KEEP, SWAP)),)  # its op read X, which is gone


def test_nothing_is_recomputed_from_what_was_changed_in_place_since() -> None:
    tensors = (
        *(Tensor(n, PAGE, "activation") for n in ("A", "B", "C", "D")),
        Tensor("W", PAGE, "parameter"),
    )
    ops = (
        Op("a", "any", (4,), (0,)), Op("b", "any", (0,), (1,)), Op("c", "any", (1,), (2,)),
        Op("d", "any", (0, 1, 2), (3,)),
    )  # fmt: skip
    assert Gaps(Graph("g", 1, "w", tensors, ops, (3,))).all[0].choices == (KEEP, SWAP, RECOMPUTE)
    changing = (*ops[:1], Op("b", "any", (0,), (1,), 0, (0,)), *ops[2:])
    assert Gaps(Graph("g", 1, "w", tensors, changing, (3,))).all[0].choices == (KEEP, SWAP)
    later = (*ops[:3], Op("d", "any", (0, 1, 2), (3,), 0, (0,)))
    assert Gaps(Graph("g", 1, "w", tensors, later, (3,))).all[0].choices == (KEEP, SWAP, RECOMPUTE)


def test_weights_stream_through_the_room_that_is_left() -> None:
    """W0 stays; next to it, X and A there is one page for W1 and then W2, each as early as the page is free."""
    decided = listed(no_wait(Gaps(chain([PAGE] * 3)), 4 * PAGE, [KEEP, SWAP, SWAP]))
    w0, w1, w2, a0, a1, a2 = range(6)
    assert decided == (
        [
            swap_in(w1), compute(0), drop(a0), compute(1), drop(w1), swap_in(w2), drop(a1),
            compute(2), drop(w2), drop(a2),
        ],
        frozenset({w0}),
    )  # fmt: skip


def test_restored_weight_makes_room_and_comes_back_after_the_last_op() -> None:
    decided = listed(no_wait(Gaps(chain([PAGE] * 2)), 3 * PAGE, [RESTORE, SWAP]))
    w0, w1, a0, a1 = range(4)
    assert decided == (
        [compute(0), drop(w0), swap_in(w1), drop(a0), compute(1), drop(w1), drop(a1), swap_in(w0)],
        frozenset({w0}),
    )


def test_activation_is_swapped_or_computed_again() -> None:
    gaps = Gaps(there_and_back())
    x, a1, a2, b = range(4)
    assert [(g.tensor, g.last_use, g.next_use) for g in gaps.all] == [(a1, 1, 3)]
    assert gaps.all[0].choices == (KEEP, SWAP)  # X is gone by then
    assert listed(no_wait(gaps, 4 * PAGE, [SWAP]))[0] == [
        compute(0), drop(x), compute(1), swap_out(a1), drop(a1), swap_in(a1), compute(2), drop(a2),
        compute(3), drop(a1), drop(b),
    ]  # fmt: skip


def test_recomputation_goes_back_as_far_as_it_takes() -> None:
    """W -> A -> B -> C, then D reads A, B and C, E reads A and D."""
    tensors = (Tensor("W", PAGE, "parameter"), *(Tensor(n, PAGE, "activation") for n in "ABCDEF"))
    w, a, b, c, d, e, f = range(7)
    reads = ((w,), (a,), (b,), (c,), (b, d), (a, e))
    graph = Graph(
        "g", 1, "weights", tensors, tuple(Op(f"op{k}", "any", r, (k + 1,)) for k, r in enumerate(reads)), (f,)
    )
    gaps = Gaps(graph)
    assert [(g.tensor, g.last_use, g.next_use) for g in gaps.all] == [(w, 0, 0), (a, 1, 5), (b, 2, 4)]
    actions, _ = listed(no_wait(gaps, 4 * PAGE, [SWAP, RECOMPUTE, RECOMPUTE]))
    assert [x for x in actions if x not in (swap_in(w), drop(w))] == [
        compute(0), compute(1), drop(a), compute(2), drop(b), compute(3), drop(c),
        compute(0), compute(1), drop(a), compute(4), drop(b), drop(d),
        compute(0), compute(5), drop(a), drop(e),
    ]  # fmt: skip
    assert no_wait(gaps, 4 * PAGE, [KEEP, KEEP, RECOMPUTE]) is None
    kept, _ = listed(no_wait(gaps, 5 * PAGE, [KEEP, KEEP, RECOMPUTE]))
    assert [what for verb, what in kept if (verb, what) == compute(what)] == [0, 1, 2, 3, 1, 4, 5]


def test_what_else_a_repeated_op_writes_makes_way_for_it() -> None:
    """op0 writes A and B; A is kept while B is computed again."""
    tensors = (Tensor("W", PAGE, "parameter"), *(Tensor(n, PAGE, "activation") for n in "ABCDEF"))
    w, a, b, c, d, e, f = range(7)
    ops = (
        Op("op0", "any", (w,), (a, b)), Op("op1", "any", (b,), (c,)), Op("op2", "any", (c,), (d,)),
        Op("op3", "any", (b, d), (e,)), Op("op4", "any", (a, e), (f,)),
    )  # fmt: skip
    graph = Graph("g", 1, "weights", tensors, ops, (f,))
    profile = profile_of(graph)
    gaps = Gaps(graph)
    actions, _ = listed(no_wait(gaps, 6 * PAGE, [KEEP, KEEP, RECOMPUTE]))
    again = actions.index(compute(0), 1)
    assert actions[again - 1 : again + 1] == [drop(a), compute(0)]
    plan = plan_of_choices(Problem(graph, profile, single_budget(6 * PAGE)), gaps, [KEEP, KEEP, RECOMPUTE])
    assert plan is not None
    check(graph, profile, plan)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds)
def test_random_choices_make_safe_plans_or_none(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    gaps, profile = Gaps(graph), random_profile(rng, graph)
    choices = random_choices(rng, gaps)
    ample = sum(t.aligned_bytes for t in graph.tensors) + 2**12
    memory = rng.choice((ample, least_bytes(graph) + rng.randrange(2 * sum(t.nbytes for t in graph.tensors) + 1)))
    decided = no_wait(gaps, memory, choices)
    assert decided is not None or memory < ample
    for delayed in (False, True):
        problem = Problem(graph, profile, single_budget(memory))
        plan = plan_of_choices(problem, gaps, choices, delayed=delayed)
        assert (plan is None) == (decided is None)
        if plan is not None:
            check(graph, profile, plan)
            assert sequence_peak_bytes(graph, *listed(decided)) <= memory
            kept = {g.tensor for g, choice in zip(gaps.all, choices, strict=True) if g.wraps and choice is not SWAP}
            assert {p.tensor for p in plan.residents} == kept


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds)
def test_nothing_needs_less_memory_than_swapping_everything(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    gaps = Gaps(graph)
    least = least_bytes(graph)
    assert no_wait(gaps, least, [Choice.SWAP] * len(gaps.all)) is not None
    assert least == 0 or no_wait(gaps, least - 1, random_choices(rng, gaps)) is None


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seeds)
def test_all_kept_in_ample_memory_runs_at_the_resident_time(seed: int) -> None:
    rng = random.Random(seed)
    graph = any_graph(rng)
    gaps, profile = Gaps(graph), random_profile(rng, graph)
    plan = plan_of_choices(
        Problem(graph, profile, single_budget(sum(t.aligned_bytes for t in graph.tensors) + 2**12)),
        gaps,
        all_kept(gaps),
    )
    assert plan is not None
    check(graph, profile, plan)
    assert simulate(graph, plan, profile).latency_s == pytest.approx(profile.compute_s)


def test_recomputation_without_end_is_given_up() -> None:
    """Every layer back computes all those before it again: 120 layers forward and back would take 7000 ops."""
    count = 120
    tensors = [Tensor("X", PAGE, "input"), *(Tensor(f"A{i}", PAGE, "activation") for i in range(2 * count))]
    ops = [Op(f"forward{i}", "any", (i,), (i + 1,)) for i in range(count)]
    ops += [
        Op(f"backward{i}", "any", (i, 2 * count - i - 1), (2 * count - i,)) for i in reversed(range(count))
    ]  # reads A_i and the last result
    graph = Graph("g", 1, "weights", tuple(tensors), tuple(ops), (2 * count,))
    graph.validate()
    gaps = Gaps(graph)
    again = [RECOMPUTE if RECOMPUTE in g.choices else KEEP for g in gaps.all]
    assert again.count(RECOMPUTE) > 100
    assert no_wait(gaps, 10**9, again) is None
    some = [
        RECOMPUTE if choice is RECOMPUTE and g.tensor % 10 else KEEP
        for g, choice in zip(gaps.all, again, strict=True)
    ]
    assert no_wait(gaps, 10**9, some) is not None
