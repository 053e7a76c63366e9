"""Plans found by search: the paper's example, safety on random graphs, optimality where it is known."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cohabit.planner.check import check
from cohabit.planner.errors import InfeasibleBudget, InvalidPlan
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory, single_budget
from cohabit.planner.order import by_parameters, has_reuse, reordered
from cohabit.planner.plan import Address, Compute, Drop, Placement, SwapIn
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import PAGE, chain, parameter, profile_of, random_graph, random_profile

seeds = st.integers(0, 10**6)


def test_figure_3_of_swapadvisor() -> None:
    """Four units of memory, three ops with a unit of weights each: W3 takes W1's place as soon as op1 has ended.

    Two units are the activations'. Unlike in the paper W1 is dropped and not copied out, since weights in serving
    do not change.
    """
    graph = chain([PAGE] * 3)
    plan = search(Problem(graph, profile_of(graph), Memory(4 * PAGE)))
    w1, w2, w3 = 0, 1, 2
    first, second = (Address("workspace", i * PAGE) for i in (2, 3))
    moves = [s for s in plan.steps if isinstance(s, SwapIn)]
    assert [(m.tensor, m.address) for m in moves] == [(w1, first), (w2, second), (w3, first)]
    steps = [s for s in plan.steps if not isinstance(s, Drop) or s.tensor in (w1, w2, w3)]
    assert [type(s) for s in steps] == [SwapIn, SwapIn, Compute, Drop, SwapIn, Compute, Drop, Compute, Drop]
    op1, op3 = (next(s for s in steps if isinstance(s, Compute) and s.op == k) for k in (0, 2))
    assert moves[2].after == (plan.steps.index(op1),)
    assert op3.after == (plan.steps.index(moves[2]),)


@pytest.mark.parametrize("seed", [11, 23, 24])
def test_the_objective_decides_between_latency_and_period(seed: int) -> None:
    """In these memories no plan has the least of both: what one inference need not wait for delays the next."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    profile = random_profile(rng, graph)
    problem = Problem(graph, profile, single_budget(int(least_bytes(graph) * 1.3)))
    alone = search(problem).provenance
    in_a_row = search(dataclasses.replace(problem, objective="period")).provenance
    assert alone is not None
    assert in_a_row is not None
    assert alone.latency_s < in_a_row.latency_s
    assert in_a_row.period_s < alone.period_s
    assert in_a_row.gap == pytest.approx(in_a_row.period_s / in_a_row.bound_s - 1)


@pytest.mark.long
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seeds)
def test_every_wait_of_a_plan_is_necessary(seed: int) -> None:
    """Leave out any one, and the checker finds a race."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    profile = random_profile(rng, graph)
    partition = PAGE * rng.randint(0, 12)
    workspace = Footprint.of(graph).least_workspace_bytes(partition) + PAGE * rng.randint(0, 6)
    plan = search(Problem(graph, profile, Memory(workspace, partition)), limit=Limit(evaluations=60))
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute | SwapIn) and step.after:
            steps = (*plan.steps[:index], replace(step, after=()), *plan.steps[index + 1 :])
            with pytest.raises(InvalidPlan):
                check(graph, profile, replace(plan, steps=steps))


@pytest.mark.long
@settings(max_examples=30, deadline=None, derandomize=True)
@given(seeds)
def test_residents_given_from_outside_stay_where_they_are(seed: int) -> None:
    """Another batch size, or any other workspace, must find the partition as the first plan leaves it."""
    rng = random.Random(seed)
    graph = random_graph(rng)
    profile = random_profile(rng, graph)
    partition = PAGE * rng.randint(0, 16)
    least = Footprint.of(graph).least_workspace_bytes(partition)
    residents = search(
        Problem(graph, profile, Memory(least + 4 * PAGE, partition)), limit=Limit(evaluations=60)
    ).residents
    plan = search(Problem(graph, profile, Memory(least, partition), residents), limit=Limit(evaluations=60))
    check(graph, profile, plan)
    assert plan.residents == residents


@pytest.mark.long
@settings(max_examples=80, deadline=None, derandomize=True)
@given(seeds)
def test_least_budget_of_activations_that_stay_is_exact(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    profile = random_profile(rng, graph)
    partition = PAGE * rng.randint(0, 10)
    orders = [tuple(range(len(graph.ops))), *([by_parameters(graph)] if has_reuse(graph) else [])]
    footprints = [Footprint.of(reordered(graph, profile, order)[0]) for order in orders]
    footprint = min(footprints, key=lambda f: f.least_workspace_bytes(partition))
    least = footprint.least_workspace_bytes(partition)
    problem = Problem(graph, profile, Memory(least, partition))
    check(graph, profile, search(problem, "genetic", limit=Limit(evaluations=60)))
    if least <= PAGE:  # without a workspace it is another problem
        return
    with pytest.raises(InfeasibleBudget) as refusal:
        search(Problem(graph, profile, Memory(least - PAGE, partition)), "genetic")
    assert refusal.value.least_bytes == partition + least
    assert str(refusal.value.op).partition(" ")[0] in {op.name for op in graph.ops}
    assert least - footprint.activation_bytes == window_by_trying_all(footprint, partition)


def window_by_trying_all(footprint: Footprint, partition: int) -> int:
    """Least window by trying every subset of every op's parameters."""
    worst = 0
    for uses in footprint.uses:
        sizes = [footprint.graph.tensors[i].nbytes for i in uses]
        inside = [sum(s for j, s in enumerate(sizes) if mask >> j & 1) for mask in range(1 << len(sizes))]
        worst = max(worst, sum(sizes) - max(n for n in inside if n <= partition))
    return worst


def test_least_partition_mirrors_least_workspace() -> None:
    for seed in range(40):
        footprint = Footprint.of(random_graph(random.Random(seed)))
        for window in range(6):
            workspace = footprint.activation_bytes + window * PAGE
            partition = footprint.least_partition_bytes(workspace)
            assert partition is not None
            assert footprint.least_workspace_bytes(partition) <= workspace
            assert partition == 0 or footprint.least_workspace_bytes(partition - PAGE) > workspace
        assert not footprint.activation_bytes or footprint.least_partition_bytes(0) is None


@pytest.mark.parametrize("pages", range(5))
def test_chain_reaches_the_bound(pages: int) -> None:
    """Four ops of a second, four weights of a second each: with any partition, only the first weights are late."""
    graph = chain([PAGE] * 4)
    plan = search(Problem(graph, profile_of(graph), Memory(6 * PAGE, pages * PAGE)))
    assert plan.provenance is not None
    assert plan.provenance.latency_s == pytest.approx(5.0 if pages == 0 else 4.0)
    assert plan.provenance.gap == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize("searcher", ["genetic", "best"])
@pytest.mark.parametrize("window_pages", [0, 4, 1])
def test_parameters_stream_through_what_the_processor_s_cache_holds(window_pages: int, searcher: str) -> None:
    """Unless it is so little that copies could not overlap with ops there."""
    graph = chain([PAGE] * 40)
    profile = profile_of(graph, op_s=0.9, window_bytes=PAGE * window_pages)
    partition, workspace = 6 * PAGE, Footprint.of(graph).activation_bytes + 10 * PAGE
    plan = search(Problem(graph, profile, Memory(workspace, partition)), searcher, limit=Limit(evaluations=200))
    places = {s.address for s in plan.steps if isinstance(s, SwapIn)}
    if window_pages == 4:
        assert len(places) == 4
        assert {place.region for place in places if place is not None} == {"workspace"}
    else:
        assert len(places) > 4


def test_period_decides_between_equal_latencies() -> None:
    """One resident of two would do for the latency; only with W0 kept and W1 streamed is nothing copied twice."""
    graph = chain([PAGE] * 2)
    plan = search(Problem(graph, profile_of(graph), Memory(3 * PAGE, PAGE)))
    assert [r.tensor for r in plan.residents] == [0]
    assert sum(isinstance(s, SwapIn) for s in plan.steps) == 1
    assert plan.provenance is not None
    assert plan.provenance.period_s == pytest.approx(2.0)


def test_the_search_goes_on_where_residents_are_given() -> None:
    """Their one guess leaves nothing to try at the start; the walks come after."""
    graph = chain([4 * PAGE, PAGE, 3 * PAGE, 2 * PAGE, 4 * PAGE, PAGE])
    residents = (Placement(0, Address("partition", 0)),)
    problem = Problem(graph, profile_of(graph, bandwidth=PAGE / 2), Memory(8 * PAGE, 4 * PAGE), residents)
    plan = search(problem, "genetic", limit=Limit(evaluations=40))
    assert plan.provenance is not None
    assert plan.provenance.evaluations == 40
    assert plan.residents == residents


def test_displaced_residents_come_back_in_the_epilogue() -> None:
    """The window is empty: op1 can only run where W0 was."""
    graph = chain([PAGE] * 2)
    residents = (Placement(0, Address("partition", 0)),)
    plan = search(Problem(graph, profile_of(graph), Memory(2 * PAGE, PAGE), residents))
    epilogue = [s for s in plan.steps[plan.epilogue_start :] if isinstance(s, SwapIn)]
    assert [(s.tensor, s.address) for s in epilogue] == [(0, Address("partition", 0))]
    assert simulate(graph, plan, profile_of(graph)).period_s == pytest.approx(4.0)


def test_residents_that_a_batch_does_not_read_are_left_alone() -> None:
    whole = chain([PAGE] * 3)
    tensors = (*whole.tensors, parameter("unread", 2 * PAGE))
    graph = Graph("unread", 1, "w", tensors, whole.ops, whole.outputs)
    residents = (Placement(7, Address("partition", PAGE)), Placement(0, Address("partition", 0)))
    plan = search(Problem(graph, profile_of(graph), Memory(3 * PAGE, 4 * PAGE), residents))
    assert not any(isinstance(s, SwapIn | Drop) and s.tensor == 7 for s in plan.steps)


def test_impossible_residents_are_refused() -> None:
    graph = chain([PAGE] * 3)
    for address in (Address("partition", PAGE), Address("partition", 64), Address("workspace", 0)):
        with pytest.raises(InvalidPlan, match="resident W0 is at"):
            search(Problem(graph, profile_of(graph), Memory(4 * PAGE, PAGE), (Placement(0, address),)))


def test_progress_is_reported() -> None:
    graph = chain([PAGE] * 6)
    seen: list[tuple[int, float, float]] = []
    search(Problem(graph, profile_of(graph), Memory(3 * PAGE, PAGE)), on_progress=lambda *p: seen.append(p))
    assert seen[0][0] == 1
    assert [s[1] for s in seen] == sorted((s[1] for s in seen), reverse=True)


def test_infeasible_budget_says_what_would_do() -> None:
    graph = chain([PAGE, 3 * PAGE, PAGE])
    with pytest.raises(InfeasibleBudget, match=r"chain: op op1 needs a budget of 24\.0 KiB"):
        search(Problem(graph, profile_of(graph), Memory(4 * PAGE, PAGE)))
