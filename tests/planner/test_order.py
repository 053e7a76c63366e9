"""Other orders of ops: each runs every op behind what it depends on, and does what it is for."""

import random

import pytest
from msgspec.structs import replace

from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.lifetimes import peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.order import by_parameters, predecessors
from cohabit.planner.problem import Problem
from cohabit.planner.streaming.memory_order import by_memory
from cohabit.planner.streaming.searcher import Streaming
from tests.planner.graphs import profile_of, random_graph


def branches(parameter_bytes: int, wide_bytes: int = 100) -> Graph:
    """An input of which four branches make wide tensors and then 10 bytes each; a last op reads the tens."""
    tensors = [Tensor("x", 10, "input"), Tensor("w", parameter_bytes, "parameter")]
    ops = []
    for i in range(4):
        tensors.append(Tensor(f"wide{i}", wide_bytes, "activation"))
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
    order = by_memory(graph, [1.0] * len(graph.ops))
    assert peak_activation_bytes(graph) == 410
    assert peak_activation_bytes(replace(graph, ops=tuple(graph.ops[k] for k in order))) == 10 + 3 * 10 + 100


def test_an_op_that_frees_a_parameter_runs_before_others_that_do_not_need_it() -> None:
    """ "read" is the last to read w, and needs "begin"; the results of "small" ops are needed at the end only."""
    tensors = [Tensor("x", 10, "input"), Tensor("w", 1000, "parameter")]
    tensors += [Tensor(f"a{k}", 1, "activation") for k in range(6)]
    ops = [Op(f"small{k}", "aten.op", (0,), (2 + k,)) for k in range(3)]
    ops += [Op("begin", "aten.op", (0,), (5,)), Op("read", "aten.op", (1, 5), (6,))]
    ops.append(Op("end", "aten.op", (2, 3, 4, 6), (7,)))
    graph = Graph("frees", 1, "none", tuple(tensors), tuple(ops), (7,))
    graph.validate()
    assert by_memory(graph, [1.0] * 6)[:2] == (3, 4)


def test_the_lighter_order_is_planned_where_the_memory_is_tight() -> None:
    graph = branches(1 << 20, wide_bytes=1 << 18)
    profile = profile_of(graph)
    views = [
        len(Streaming(Problem(graph, profile, Memory(kibibytes << 10, counted=True)), 0).views)
        for kibibytes in (1536, 300_000)
    ]
    assert views == [2, 1]


@pytest.mark.parametrize("seed", range(20))
def test_ops_run_behind_what_they_depend_on(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    before = predecessors(graph)
    for order in (by_memory(graph, [1.0] * len(graph.ops)), by_parameters(graph)):
        position = {k: i for i, k in enumerate(order)}
        assert sorted(order) == list(range(len(graph.ops)))
        assert all(position[j] < position[k] for k, needed in enumerate(before) for j in needed)
