"""When a run leaves which bytes of the workspace, against every byte painted step by step."""

import random
from itertools import pairwise

import numpy as np
import pytest

from planner.graph import Graph
from planner.plan import Address, Compute, Drop, Plan, SwapIn, SwapOut
from planner.problem import Limit, Problem
from planner.search.driver import search
from runtime.binding.prefetch import WorkspaceUse, free_after, workspace_uses
from tests.planner.graphs import PAGE, chain, profile_of, random_graph
from tests.runtime.plans import leading_plan, offloading_plan, streaming_plan


def painted(graph: Graph, plan: Plan) -> np.ndarray:
    """For each byte of the workspace the number of compute steps up to the last one that may use it; -1 for none."""
    last = np.full(plan.workspace_bytes, -1)
    live: dict[int, tuple[Address, int]] = {}

    def paint(address: Address, nbytes: int, done: int) -> None:
        if address.region == "workspace":
            part = last[address.offset : address.offset + nbytes]
            np.maximum(part, done, out=part)

    for placed in (*plan.inputs, *plan.residents):
        live[placed.tensor] = placed.address, graph.tensors[placed.tensor].nbytes
    done, leaving = 0, set[int]()
    for step in plan.steps:
        if isinstance(step, SwapIn):
            live[step.tensor] = step.address, graph.tensors[step.tensor].nbytes
        elif isinstance(step, SwapOut):
            leaving.add(step.tensor)
        elif isinstance(step, Compute):
            done += 1
            for tensor, address in zip(graph.ops[step.op].writes, step.outputs, strict=True):
                live[tensor] = address, graph.tensors[tensor].nbytes
            if step.scratch is not None:
                paint(step.scratch, graph.ops[step.op].scratch_bytes, done)
        elif isinstance(step, Drop):
            address, nbytes = live.pop(step.tensor)
            paint(address, nbytes, len(graph.ops) if step.tensor in leaving else done)
            leaving.discard(step.tensor)
    for address, nbytes in live.values():
        paint(address, nbytes, done)
    return last


def agree(graph: Graph, plan: Plan, rng: random.Random) -> None:
    found, expected = workspace_uses(graph, plan), painted(graph, plan)
    assert all(a.stop <= b.start for a, b in pairwise(found))
    told = np.full(plan.workspace_bytes, -1)
    for use in found:
        told[use.start : use.stop] = use.computes
    assert np.array_equal(told, expected)
    for _ in range(50):
        start = rng.randrange(-2 * PAGE, plan.workspace_bytes + PAGE)
        stop = start + rng.choice([1, 64, PAGE, 3 * PAGE])
        inside = expected[max(start, 0) : max(stop, 0)]
        assert free_after(found, start, stop) == max(int(inside.max(initial=0)), 0)


@pytest.mark.parametrize("seed", range(15))
def test_searched_plans_leave_their_bytes_as_painted(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng)
    most = sum(t.nbytes for t in graph.tensors) + sum(op.scratch_bytes for op in graph.ops)
    memory = -(-2 * most // PAGE) * PAGE
    partition = rng.randrange(0, memory // PAGE) * PAGE
    plan = search(Problem(graph, profile_of(graph), partition, memory), limit=Limit(evaluations=20))
    agree(graph, plan, rng)


def test_plans_by_hand_leave_their_bytes_as_painted() -> None:
    rng, graph = random.Random(0), chain([PAGE, 3 * PAGE, 2 * PAGE, PAGE])
    for plan in (
        streaming_plan(graph),
        streaming_plan(graph, frozenset({1})),
        leading_plan(graph),
        leading_plan(graph, reverse=True),
        offloading_plan(graph),
    ):
        agree(graph, plan, rng)


def test_a_parameter_s_bytes_are_free_behind_its_reader_and_the_output_s_never() -> None:
    graph = chain([PAGE] * 3, activation_bytes=64)
    found = workspace_uses(graph, leading_plan(graph))
    assert found[:3] == (
        WorkspaceUse(0, PAGE, 1),
        WorkspaceUse(PAGE, 2 * PAGE, 2),
        WorkspaceUse(2 * PAGE, 3 * PAGE, 3),
    )
    assert free_after(found, 0, PAGE) == 1
    assert free_after(found, PAGE - 1, PAGE + 1) == 2
    assert free_after(found, 0, 1 << 30) == 3
    assert free_after(found, 1 << 20, 1 << 30) == 0
