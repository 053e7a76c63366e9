"""The genetic search for served models: operators stay in their space, generations do not get worse, plans transfer."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.genetic.chromosome import ServedChromosome, order_of
from cohabit.planner.genetic.searcher import GENERATIONS, POPULATION, Genetic
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Compute, SwapIn
from cohabit.planner.problem import UNFIT, Limit, Problem
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.streaming.stream import Decisions
from tests.support.planner.graphs import PAGE, chain, profile_of, random_graph, random_profile

seeds = st.integers(0, 10**6)


def random_problem(rng: random.Random) -> Problem:
    graph = random_graph(rng, 20)
    profile, partition = random_profile(rng, graph), PAGE * rng.randint(0, 16)
    workspace = Footprint.of(graph).least_workspace_bytes(partition) + PAGE * rng.choice((1, 1, 2, 3, 9))
    problem = Problem(graph, profile, Memory(workspace, partition))
    if rng.random() < 0.6:
        return problem
    residents = search(problem, "genetic", limit=Limit(evaluations=5)).residents
    return Problem(graph, profile, Memory(workspace, partition), residents)


def evolved(searcher: Genetic, rounds: int) -> list[list[tuple[ServedChromosome, float]]]:
    """Candidates of each round, with their latencies."""
    asked = []
    for _ in range(rounds):
        candidates = searcher.ask()
        costs = [searcher.evaluate(c, np.inf) for c in candidates]
        searcher.tell(candidates, costs)
        asked.append([(c, cost.latency_s) for c, cost in zip(candidates, costs, strict=True)])
    return asked


@pytest.mark.long
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=seeds)
def test_every_chromosome_of_every_generation_has_a_safe_plan(seed: int) -> None:
    problem = random_problem(random.Random(seed))
    searcher = Genetic(problem, seed)
    for generation in evolved(searcher, 20):
        for candidate, latency_s in generation[:6]:
            if latency_s == UNFIT.latency_s:
                continue
            plan = searcher.write(candidate)
            check(problem.graph, problem.profile, plan)
            if problem.profile.compute_slowdown == problem.profile.swap_slowdown == 1.0:
                assert simulate(problem.graph, plan, problem.profile).latency_s <= latency_s * (1 + 1e-9)
            order = searcher.reordered[candidate.order].order
            assert tuple(s.op for s in plan.steps if isinstance(s, Compute)) == order == order_of(plan)
            assert problem.residents in (None, plan.residents)


@pytest.mark.long
def test_later_generations_are_never_worse_and_find_what_the_first_did_not() -> None:
    better = 0
    for seed in range(12):
        rng = random.Random(seed)
        graph = chain([rng.randint(1, 9) * PAGE for _ in range(24)])
        problem = Problem(graph, random_profile(rng, graph), Memory(24 * PAGE, 40 * PAGE))
        searcher = Genetic(problem, seed)
        effort = searcher.evaluations
        first = search(problem, "genetic", limit=Limit(evaluations=effort - GENERATIONS * (POPULATION + 4)))
        more = search(problem, "genetic", limit=Limit(evaluations=4 * effort))
        assert first.provenance is not None
        assert more.provenance is not None
        assert more.provenance.latency_s <= first.provenance.latency_s * (1 + 1e-3)
        better += more.provenance.latency_s < first.provenance.latency_s * (1 - 1e-6)
        if better and seed >= 3:
            break
    assert better > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_search_without_a_limit_ends_before_its_most_evaluations(seed: int) -> None:
    rng = random.Random(seed)
    graph = chain([rng.randint(1, 9) * PAGE for _ in range(24)])
    problem = Problem(graph, random_profile(rng, graph), Memory(24 * PAGE, 40 * PAGE))
    most = Genetic(problem, seed).evaluations
    plan = search(problem, "genetic", seed=seed)
    assert plan.provenance is not None
    assert plan.provenance.evaluations < most


def test_a_search_from_neighbours_is_shorter() -> None:
    graph = chain([(7 * i % 5 + 1) * PAGE for i in range(40)])
    problem = Problem(graph, profile_of(graph, 1.0, bandwidth=PAGE / 2), Memory(14 * PAGE, 40 * PAGE))
    plan = search(problem, "genetic", limit=Limit(evaluations=10))
    larger = replace(problem, memory=Memory(14 * PAGE, 44 * PAGE))
    fresh, seeded = Genetic(larger, 0), Genetic(replace(larger, neighbours=(plan,)), 0)
    assert seeded.evaluations < 0.8 * fresh.evaluations


def test_a_plan_for_another_size_is_a_start() -> None:
    graph = chain([(7 * i % 5 + 1) * PAGE for i in range(40)])
    profile = profile_of(graph, 1.0, bandwidth=PAGE / 2)
    smaller = search(Problem(graph, profile, Memory(14 * PAGE, 40 * PAGE)), "genetic")
    problem = Problem(graph, profile, Memory(14 * PAGE, 44 * PAGE), neighbours=(smaller,))
    candidates = [c for generation in evolved(Genetic(problem, 0), 5) for c, _ in generation]
    before = {r.tensor for r in smaller.residents}
    parameters = Genetic(problem, 0).reordered[0].work.parameters
    assert any(before <= {parameters[i] for i in c.residents()} for c in candidates)


def test_all_batch_sizes_share_the_residents_that_the_smallest_chose() -> None:
    graphs = {Bucket(b): chain([(7 * i % 5 + 1) * PAGE for i in range(12)], PAGE * b, b) for b in (1, 2)}
    demand = ModelDemand("chain", graphs, {b: profile_of(g, float(b.batch)) for b, g in graphs.items()})
    plans = plan_model(demand, Memory(14 * PAGE, 10 * PAGE), None, "genetic")
    assert plans[Bucket(1)].residents == plans[Bucket(2)].residents != ()
    for batch, plan in plans.items():
        check(graphs[batch], demand.profiles[batch], plan)
        assert plan.provenance is not None
        assert plan.provenance.searcher == "genetic"


def test_a_copy_may_go_ahead_of_one_that_waits_for_its_place() -> None:
    """W2 needs all of the window, where op1 reads W1; W3 has room in the partition while the link would wait.

    compute | op0 (4 s)         | op1 (1 s) |          | op2 (0.5 s) | op3
    swap_in | W1 (2 s) | W3     |           | W2 (3 s) |
    """
    graph = chain([PAGE, 2 * PAGE, 3 * PAGE, PAGE])
    profile = profile_of(graph, [4.0, 1.0, 0.5, 1.0])
    problem = Problem(graph, profile, Memory(5 * PAGE, 2 * PAGE))
    searcher = Genetic(problem, 0)
    choice, hold, fit = np.array([2, 0, 0, 0]), np.zeros(4, np.bool_), np.zeros(4, np.int64)
    latencies_s, orders = [], []
    for lead in (0, 2):
        found = ServedChromosome.of(0, Decisions(choice, hold, fit, np.array([0, 0, 0, lead])))
        latencies_s.append(searcher.evaluate(found, np.inf).latency_s)
        plan = searcher.write(found)
        check(graph, profile, plan)
        orders.append([s.tensor for s in plan.steps if isinstance(s, SwapIn)])
    assert orders == [[1, 2, 3], [1, 3, 2]]
    assert latencies_s == [10.0, 9.5]


def test_the_search_ends_where_nothing_is_left_to_improve() -> None:
    graph = chain([PAGE] * 6)
    plan = search(Problem(graph, profile_of(graph), Memory(4 * PAGE, 6 * PAGE)), "genetic")
    assert plan.provenance is not None
    assert plan.provenance.evaluations == 1
    assert len(plan.residents) == 6
