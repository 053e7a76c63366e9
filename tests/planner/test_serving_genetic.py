"""The genetic search where models are served: its plans are safe and as simulated, and optimal where that is known."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.check import check
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.papers.swapadvisor.serving import LONGEST_LEAD, ServingChromosome, ServingGenetic
from cohabit.planner.plan import Compute, SwapIn
from cohabit.planner.problem import UNFIT, Limit, Problem
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import ModelDemand
from cohabit.planner.streaming.anneal import FITS
from tests.support.planner.graphs import PAGE, chain, profile_of, random_graph, random_profile

seeds = st.integers(0, 10**6)


def random_problem(rng: random.Random) -> Problem:
    graph = random_graph(rng, 20)
    profile, partition = random_profile(rng, graph), PAGE * rng.randint(0, 16)
    workspace = Footprint.of(graph).least_workspace_bytes(partition) + PAGE * rng.choice((1, 1, 2, 3, 9))
    problem = Problem(graph, profile, Memory(workspace, partition))
    if rng.random() < 0.6:
        return problem
    residents = search(problem, "streaming", limit=Limit(evaluations=5)).residents
    return Problem(graph, profile, Memory(workspace, partition), residents)


def disturbed(found: ServingChromosome, rng: random.Random) -> ServingChromosome:
    """The same with any holes, and many copies that go first."""
    lead = np.array([rng.choice((0, 1, 3, LONGEST_LEAD)) for _ in found.decisions.lead], np.int64)
    fit = np.array([rng.randrange(FITS) for _ in found.decisions.fit], np.int64)
    return ServingChromosome(found.order, found.decisions._replace(lead=lead, fit=fit))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=seeds)
def test_every_chromosome_has_a_safe_plan_that_takes_no_longer_than_its_cost(seed: int) -> None:
    """Unless it is unfit, which only other orders and copies that go first can be.

    The plan waits for the bytes that it overwrites alone, and so may be a little faster. Where ops and copies slow
    each other down, an earlier copy may also make it slower.
    """
    rng = random.Random(seed)
    problem = random_problem(rng)
    graph, profile = problem.graph, problem.profile
    searcher = ServingGenetic(problem, seed, population=6)
    for _ in range(4):
        candidates = searcher.ask()
        costs = [searcher.evaluate(c, np.inf) for c in candidates]
        searcher.tell(candidates, costs)
        for candidate in (*candidates, *(disturbed(c, rng) for c in candidates)):
            cost = searcher.evaluate(candidate, np.inf)
            if cost.latency_s == UNFIT.latency_s:
                assert candidate.order != tuple(range(len(graph.ops))) or candidate.decisions.lead.any()
                continue
            plan = searcher.write(candidate)
            check(graph, profile, plan)
            timeline = simulate(graph, plan, profile)
            if profile.compute_slowdown == profile.swap_slowdown == 1.0:
                assert timeline.latency_s <= cost.latency_s * (1 + 1e-9)
            assert tuple(s.op for s in plan.steps if isinstance(s, Compute)) == candidate.order
            assert problem.residents in (None, plan.residents)


def test_a_copy_may_go_ahead_of_one_that_waits_for_its_place() -> None:
    """W2 needs all of the window, where op1 reads W1; W3 has room in the partition while the link would wait.

    compute | op0 (4 s)         | op1 (1 s) |          | op2 (0.5 s) | op3
    swap_in | W1 (2 s) | W3     |           | W2 (3 s) |
    """
    graph = chain([PAGE, 2 * PAGE, 3 * PAGE, PAGE])
    profile = profile_of(graph, [4.0, 1.0, 0.5, 1.0])
    problem = Problem(graph, profile, Memory(5 * PAGE, 2 * PAGE))
    searcher = ServingGenetic(problem, 0)
    (first,) = searcher.ask()
    choice = np.array([2, 0, 0, 0])
    latencies_s, orders = [], []
    for lead in (0, 2):
        decisions = first.decisions._replace(choice=choice, lead=np.array([0, 0, 0, lead]))
        found = ServingChromosome(first.order, decisions)
        latencies_s.append(searcher.evaluate(found, np.inf).latency_s)
        plan = searcher.write(found)
        check(graph, profile, plan)
        orders.append([s.tensor for s in plan.steps if isinstance(s, SwapIn)])
    assert orders == [[1, 2, 3], [1, 3, 2]]
    assert latencies_s == [10.0, 9.5]


def test_all_batch_sizes_share_the_residents_that_the_smallest_chose() -> None:
    graphs = {Bucket(b): chain([(7 * i % 5 + 1) * PAGE for i in range(12)], PAGE * b, b) for b in (1, 2)}
    demand = ModelDemand("chain", graphs, {b: profile_of(g, float(b.batch)) for b, g in graphs.items()})
    plans = plan_model(demand, Memory(14 * PAGE, 10 * PAGE), None, "genetic")
    assert plans[Bucket(1)].residents == plans[Bucket(2)].residents != ()
    for batch, plan in plans.items():
        check(graphs[batch], demand.profiles[batch], plan)
        assert plan.provenance is not None
        assert plan.provenance.searcher == "genetic"


def test_the_search_ends_where_nothing_is_left_to_improve() -> None:
    graph = chain([PAGE] * 6)
    plan = search(Problem(graph, profile_of(graph), Memory(4 * PAGE, 6 * PAGE)), "genetic")
    assert plan.provenance is not None
    assert plan.provenance.evaluations == 1
    assert len(plan.residents) == 6
