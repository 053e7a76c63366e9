"""Other orders of ops: each runs every op after what it depends on, and does what it is for."""

import random

import pytest

from cohabit.planner.check import check
from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.memory import single_budget
from cohabit.planner.order import by_parameters, has_reuse, in_original_order, predecessors, reordered
from cohabit.planner.plan import Compute
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import PAGE, profile_of, random_graph, unrolled


@pytest.mark.parametrize("seed", range(20))
def test_ops_run_after_what_they_depend_on(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    before = predecessors(graph)
    order = by_parameters(graph)
    position = {k: i for i, k in enumerate(order)}
    assert sorted(order) == list(range(len(graph.ops)))
    assert all(position[j] < position[k] for k, needed in enumerate(before) for j in needed)


def test_an_op_that_reads_a_number_runs_before_all_later_ops() -> None:
    """The number may be an argument of theirs. The graph does not say so."""
    tensors = (Tensor("rate", 8, "input"), Tensor("x", PAGE, "input"), Tensor("y", PAGE, "activation"))
    ops = (Op("item", "item", (0,), ()), Op("scale", "mul", (1,), (2,)))
    assert predecessors(Graph("scaled", 1, "", tensors, ops, (2,))) == [set(), {0}]


def test_an_op_runs_next_to_those_that_read_the_same_weights() -> None:
    """Of two layers in three time steps: all steps of the first layer, then all of the second."""
    graph = unrolled(2, 3, 1000)
    assert [op.name for op in graph.ops] == ["h0.0", "h1.0", "h0.1", "h1.1", "h0.2", "h1.2"]
    assert has_reuse(graph)
    assert [graph.ops[k].name for k in by_parameters(graph)] == ["h0.0", "h0.1", "h0.2", "h1.0", "h1.1", "h1.2"]


def test_the_plan_of_a_reordered_graph_runs_the_ops_of_the_graph_in_that_order() -> None:
    graph = unrolled(2, 3, PAGE)
    profile = profile_of(graph)
    order = by_parameters(graph)
    other, other_profile = reordered(graph, profile, order)
    problem = Problem(other, other_profile, single_budget(20 * PAGE))
    plan = in_original_order(search(problem, "on_demand"), order, graph, profile)
    check(graph, profile, plan)
    assert [s.op for s in plan.steps if isinstance(s, Compute)] == list(order)
