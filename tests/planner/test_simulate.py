"""The compiled simulator: a case by hand, and agreement with the exact one."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cohabit.planner.check import check
from cohabit.planner.graph import Graph
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, Step, SwapIn, SwapOut, lane_of
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.simulate import simulate
from tests.support.planner.graphs import PAGE, chain, hand_written_plan, profile_of, random_profile
from tests.support.planner.reference import simulate_exactly


def test_hand_written_plan_by_hand() -> None:
    """W1 arrives while op0 runs; W2 can only come when op1 has ended.

    compute | op0 | op1 |     | op2 |
    swap_in | W1  |     | W2  |
    """
    graph = chain([PAGE] * 3)
    profile = profile_of(graph)
    timeline = simulate(graph, hand_written_plan(graph, profile), profile)
    assert [(s.lane, s.start_s, s.end_s) for s in timeline.spans] == [
        ("swap_in", 0, 1),
        ("compute", 0, 1),
        ("compute", 1, 2),
        ("swap_in", 2, 3),
        ("compute", 3, 4),
    ]
    assert timeline.latency_s == 4
    assert timeline.period_s == 4
    assert timeline.link_bytes == 2 * PAGE


def test_contention_slows_both_down() -> None:
    """op0 (rate 1/2) and W1 (rate 1/4) overlap for 2 s; then W1's remaining half second of work runs alone."""
    graph = chain([PAGE] * 3)
    profile = profile_of(graph, compute_slowdown=2.0, swap_slowdown=4.0)
    spans = simulate(graph, hand_written_plan(graph, profile), profile).spans
    assert [(s.start_s, s.end_s) for s in spans[:3]] == [(0, 2.5), (0, 2), (2.5, 3.5)]


def test_an_op_waits_until_the_last_inference_has_brought_back_what_it_reads() -> None:
    """
    compute | op0 (1 s) | op1 |          | op0 | op1 |
    swap_in |           | W1  | W0 (1 s) |

    op1 needs W0's bytes for W1; the next inference's op0 reads W0.
    """
    graph = chain([PAGE] * 2)
    home = Address("partition", 0)
    steps = (
        Compute(0),
        Drop(2),
        Drop(0),
        SwapIn(1, home, (0,)),
        Compute(1, (3,)),
        Drop(1),
        SwapIn(0, home, (4,)),
    )
    plan = Plan(graph.fingerprint, "", Memory(2 * PAGE, PAGE), 2 * PAGE, (Placement(0, home),), steps)
    check(graph, None, plan)
    timeline = simulate(graph, plan, profile_of(graph))
    assert (timeline.latency_s, timeline.period_s) == (3, 4)


def test_an_op_does_not_wait_for_residents_that_it_does_not_read() -> None:
    """As above, with the ops in the other order of weights: W0 comes back while op0, which reads W1, runs."""
    graph = chain([PAGE] * 2)
    swapped = replace(graph, ops=tuple(replace(op, reads=(1 - k, *op.reads[1:])) for k, op in enumerate(graph.ops)))
    home, spare = Address("partition", 0), Address("partition", PAGE)
    steps = (
        Compute(0),
        Drop(2),
        Compute(1),
        Drop(0),
        SwapIn(0, home, (2,)),
    )
    residents = (Placement(0, home), Placement(1, spare))
    plan = Plan(swapped.fingerprint, "", Memory(2 * PAGE, 2 * PAGE), 2 * PAGE, residents, steps)
    check(swapped, None, plan)
    timeline = simulate(swapped, plan, profile_of(swapped, bandwidth=PAGE / 1.5))
    assert (timeline.latency_s, timeline.period_s) == (2, 2.5)  # W0 takes 1.5 s, of which op0 hides one


def test_graph_without_ops_takes_no_time() -> None:
    graph = Graph("empty", 1, "w", (), (), ())
    timeline = simulate(graph, Plan(graph.fingerprint, "", Memory(0), 0, (), ()), profile_of(graph))
    assert (timeline.latency_s, timeline.period_s, timeline.spans) == (0.0, None, ())


def random_steps(rng: random.Random, graph: Graph) -> tuple[Step, ...]:
    """Steps with random waits; such a plan would compute nonsense, but it takes time."""
    steps: list[Step] = []
    for index in range(rng.randint(1, 14)):
        after = tuple(sorted(rng.sample(range(index), rng.randint(0, min(2, index)))))
        tensor = rng.randrange(3)
        steps.append(rng.choice((Compute(tensor, after), SwapIn(tensor, None, after), SwapOut(tensor, after))))
    return (*steps, Compute(0))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_simulator_agrees_with_exact_one_on_random_steps(seed: int) -> None:
    rng = random.Random(seed)
    graph = chain([PAGE, 2 * PAGE, 3 * PAGE])
    profile = random_profile(rng, graph)
    plan = hand_written_plan(graph, profile)
    agree(graph, replace(plan, steps=random_steps(rng, graph)), profile)


def agree(graph: Graph, plan: Plan, profile: Profile) -> None:
    timeline = simulate(graph, plan, profile)
    ends, finished = simulate_exactly(graph, plan, profile, 1)
    assert [s.step for s in timeline.spans] == [i for i, s in enumerate(plan.steps) if lane_of(s)]
    assert [s.end_s for s in timeline.spans] == pytest.approx([float(e) for e in ends])
    assert timeline.latency_s == pytest.approx(float(finished[0]))
    _, finished = simulate_exactly(graph, plan, profile, 16)
    periods = [float(b - a) for a, b in pairwise(finished)]
    assert timeline.period_s is not None
    assert min(periods[1:]) - 1e-9 <= timeline.period_s <= max(periods[1:]) + 1e-9
    if max(periods[8:]) - min(periods[8:]) < 1e-12:
        assert timeline.period_s == pytest.approx(periods[-1])
