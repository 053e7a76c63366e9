"""Other orders of ops: each runs every op behind what it depends on, and does what it is for."""

import random

import pytest

from planner.graph import Graph, Op, Tensor
from planner.liveness import peak_activation_bytes
from planner.order import by_memory, by_parameters, orders, predecessors
from tests.planner.graphs import random_graph


def branches(parameter_bytes: int) -> Graph:
    """An input of which four branches make 100 bytes and then 10 each; a last op reads the tens."""
    tensors = [Tensor("x", 10, "input"), Tensor("w", parameter_bytes, "parameter")]
    ops = []
    for i in range(4):
        tensors.append(Tensor(f"wide{i}", 100, "activation"))
        ops.append(Op(f"widen{i}", "aten.op", (0,), (len(tensors) - 1,)))
    for i in range(4):
        tensors.append(Tensor(f"thin{i}", 10, "activation"))
        ops.append(Op(f"narrow{i}", "aten.op", (2 + i,), (len(tensors) - 1,)))
    tensors.append(Tensor("sum", 10, "activation"))
    ops.append(Op("add", "aten.op", (6, 7, 8, 9, 1), (10,)))
    graph = Graph("branches", 1, "none", tuple(tensors), tuple(ops), (10,))
    graph.validate()
    return graph


def test_branches_run_one_after_the_other_where_that_takes_less_memory() -> None:
    graph = branches(1)
    order = by_memory(graph)
    assert peak_activation_bytes(graph) == 410
    assert peak_activation_bytes(graph, order) == 10 + 3 * 10 + 100
    assert order in orders(graph)


def test_an_order_that_saves_little_beside_the_parameters_is_not_planned() -> None:
    assert orders(branches(10**6)) == (tuple(range(9)),)


@pytest.mark.parametrize("seed", range(20))
def test_ops_run_behind_what_they_depend_on(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    before = predecessors(graph)
    for order in (by_memory(graph), by_parameters(graph)):
        position = {k: i for i, k in enumerate(order)}
        assert sorted(order) == list(range(len(graph.ops)))
        assert all(position[j] < position[k] for k, needed in enumerate(before) for j in needed)
