"""Where copies are furthest behind, orders in which they are less so, and copies that go ahead: by hand."""

import random
from dataclasses import replace

import numpy as np
import pytest
from cohabit.planner.streaming.bottleneck import least_latency_s, less_behind

from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.lifetimes import lifespans, peak_activation_bytes
from cohabit.planner.order import predecessors, reordered
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.streaming.searcher import Streaming
from cohabit.planner.streaming.stream import RELEASED, STREAMED, homes, play, uniform
from cohabit.planner.streaming.workload import Workload
from tests.planner.graphs import PAGE, chain, profile_of, random_graph


def estimate_s(graph: Graph, memory_pages: int, copy_s: float, order: tuple[int, ...] | None = None) -> float:
    profile = profile_of(graph, bandwidth=PAGE / copy_s)
    if order is not None:
        graph, profile = reordered(graph, profile, order)
    work = Workload.of(Footprint.of(graph, overlay=True), profile, memory_pages * PAGE, 0)
    return least_latency_s(work.arrays)


def late_peak() -> Graph:
    """A weight of four pages is read at the end; an op writes ten pages that the next one reads."""
    tensors = [
        Tensor("x", PAGE, "input"),
        Tensor("w", 4 * PAGE, "parameter"),
        Tensor("thin", PAGE, "activation"),
        Tensor("wide", 10 * PAGE, "activation"),
        Tensor("narrow", PAGE, "activation"),
        Tensor("end", PAGE, "activation"),
    ]
    ops = (
        Op("slow", "aten.op", (0,), (2,)),
        Op("widen", "aten.op", (0,), (3,)),
        Op("narrow", "aten.op", (3,), (4,)),
        Op("read", "aten.op", (1, 2, 4), (5,)),
    )
    graph = Graph("late_peak", 1, "none", tuple(tensors), ops, (5,))
    graph.validate()
    return graph


def test_what_memory_lacks_is_still_to_be_copied() -> None:
    """Four weights of a page, a second per op and two per copy; beside the two activations there is room for one."""
    graph = chain([PAGE] * 4)
    assert estimate_s(graph, 3, copy_s=2.0) == pytest.approx(6.0)  # at the start three are to be copied
    assert estimate_s(graph, 6, copy_s=2.0) == pytest.approx(3.0)  # all fit: the last op starts after the others


def test_an_order_with_an_earlier_peak_is_found() -> None:
    """Of the ten pages, the input and `thin`, memory of twelve pages leaves none for w until "narrow" has run.

    own order  | slow | widen | narrow | w copied (8 s) | read: 2 + 8 s when "narrow" starts
    peak first | widen | narrow | ... : 1 + 7 s, as the input and the wide one leave a page
    """
    graph = late_peak()
    profile = profile_of(graph, bandwidth=PAGE / 2.0)
    order = less_behind(graph, profile, 12 * PAGE, (0, 1, 2, 3), seed=0)
    assert order == (1, 2, 0, 3)


def behind_s(graph: Graph, profile: Profile, memory_bytes: int) -> float:
    """The same measure, written down anew: live bytes from the lifetimes, the room filled by a greedy knapsack."""
    spans = lifespans(graph)
    most_s, start_s = 0.0, 0.0
    for k, op_s in enumerate(profile.op_seconds):
        room, left_s = memory_bytes, 0.0
        for tensor, span in zip(graph.tensors, spans, strict=True):
            if tensor.kind != "parameter" and span is not None and span.first <= k < span.end:
                room -= tensor.nbytes
        later = {t for op in graph.ops[k:] for t in op.reads if graph.tensors[t].kind == "parameter"}
        later = {t for t in later if graph.tensors[t].nbytes}
        costs = sorted(
            (profile.swap_in.seconds(graph.tensors[t].nbytes) / graph.tensors[t].nbytes, t) for t in later
        )
        for cost, t in reversed(costs):
            kept = min(max(room, 0), graph.tensors[t].nbytes)
            room -= kept
            left_s += cost * (graph.tensors[t].nbytes - kept)
        most_s = max(most_s, start_s + left_s)
        start_s += op_s
    return most_s


@pytest.mark.parametrize("seed", range(30))
def test_orders_are_valid_and_copies_are_no_further_behind_in_them(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    profile = profile_of(graph, bandwidth=PAGE / 3.0)
    own = tuple(range(len(graph.ops)))
    weights = [sum(graph.tensors[t].nbytes for t in op.reads if graph.tensors[t].is_weight) for op in graph.ops]
    memory = peak_activation_bytes(graph) + max(weights)  # so that every op fits
    order = less_behind(graph, profile, memory, own, seed)
    position = {k: i for i, k in enumerate(order)}
    assert sorted(order) == list(own)
    assert all(position[j] < position[k] for k, needed in enumerate(predecessors(graph)) for j in needed)
    assert behind_s(*reordered(graph, profile, order), memory) <= behind_s(graph, profile, memory) + 1e-9
    assert order == less_behind(graph, profile, memory, own, seed)


def test_a_small_copy_goes_ahead_into_a_hole_that_the_next_one_does_not_fit() -> None:
    """Five pages beside the activations, three of them taken by W0 until op0 ends; a page is copied in a second.

    in order | op0 4 s         | W1 4 s | op1 | W2: op2 runs from 9
    W2 ahead | W2 during op0   | W1 4 s | op1 | op2 runs from 8.5
    """
    graph = chain([3 * PAGE, 4 * PAGE, PAGE])
    profile = profile_of(graph, op_s=[4.0, 0.5, 0.5])
    work = Workload.of(Footprint.of(graph, overlay=True), profile, 7 * PAGE, 0)
    fate = np.array([RELEASED, STREAMED, STREAMED])
    latency_s = {}
    for ahead in (0, 2):
        decisions = uniform(fate, np.zeros(3, np.bool_), 0)._replace(lead=np.array([0, 0, ahead]))
        swaps, latency_s[ahead] = play(work.arrays, homes(work.arrays, fate), decisions)
    assert latency_s == {0: pytest.approx(9.5), 2: pytest.approx(9.0)}
    assert swaps.parameter[: swaps.length[0]].tolist() == [2, 1, 0]  # and W0 is restored at last


def test_swaps_for_other_writers_are_in_the_order_of_their_ops() -> None:
    """Offloading writes returns of activations between the copies, and counts on their order."""
    graph = chain([3 * PAGE, 4 * PAGE, PAGE])
    problem = Problem(graph, profile_of(graph, op_s=[4.0, 0.5, 0.5]), 7 * PAGE, overlay=True)
    streaming = Streaming(problem, 0)
    fate = np.array([RELEASED, STREAMED, STREAMED], np.int8).tobytes()
    ahead = replace(streaming.first(), fate=fate, lead=np.array([0, 0, 2], np.int32).tobytes())
    _, _, swaps = streaming.played(ahead)
    assert swaps.op[: swaps.length[0]].tolist() == [1, 2, 3]
    assert streaming.evaluate(ahead, 0.0).latency_s == pytest.approx(9.0)
