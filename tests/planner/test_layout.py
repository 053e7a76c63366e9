"""Lifespans, live ranges, and offsets that respect them."""

import random
from collections.abc import Sequence
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.planner.graph import Graph, Op, Tensor
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.layout.placement import (
    Block,
    Layout,
    activation_pool_bytes,
    most_live_bytes,
    place,
)
from cohabit.planner.lifetimes import START, Lifespan, lifespans, live_ranges, peak_activation_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.plan import Address, Compute, Drop, Placement, Plan, SwapIn, SwapOut
from cohabit.planner.problem import Problem
from cohabit.planner.search.driver import search
from tests.support.planner.graphs import PAGE, chain, hand_written_plan, profile_of, random_graph
from tests.support.planner.reference import aligned_bytes, aligned_scratch_bytes


def meet(a: Block, b: Block) -> bool:
    """Whether two blocks are ever needed at the same time."""
    return a.span.first < b.span.end and b.span.first < a.span.end


def assert_sound(blocks: Sequence[Block], layout: Layout) -> None:
    """Independent of the search: no two blocks share a byte at any time, all are aligned, the peak is the peak."""
    for offset, block in zip(layout.offsets, blocks, strict=True):
        assert offset >= 0
        assert offset % block.alignment == 0
        assert offset + block.nbytes <= layout.peak_bytes
    for (at, a), (bt, b) in combinations(zip(layout.offsets, blocks, strict=True), 2):
        if meet(a, b) and a.nbytes and b.nbytes:
            assert at + a.nbytes <= bt or bt + b.nbytes <= at


def test_lifespans_are_half_open() -> None:
    graph = chain([PAGE] * 3)
    assert lifespans(graph)[0] == Lifespan(0, 1)  # W0
    assert lifespans(graph)[3] == Lifespan(0, 1)  # A0, the input
    assert lifespans(graph)[4] == Lifespan(0, 2)  # A1, written by op0 and read by op1
    assert lifespans(graph)[6] == Lifespan(2, 3)  # A3, the output
    assert peak_activation_bytes(graph) == activation_pool_bytes(graph) == 2 * PAGE


def test_live_ranges_of_a_plan_are_found_by_hand() -> None:
    graph = chain([PAGE] * 3)
    found = live_ranges(graph, hand_written_plan(graph, profile_of(graph)))
    assert [(r.tensor, r.start, r.end, r.uses) for r in found] == [
        (3, START, 2, (1,)),  # A0
        (0, START, 10, (1,)),  # W0 stays
        (1, 0, 4, (3,)),
        (4, 1, 5, (1, 3)),
        (5, 3, 9, (3, 7)),
        (2, 6, 8, (7,)),
        (6, 7, 10, (7,)),
    ]


def test_an_activation_that_returns_has_two_live_ranges() -> None:
    graph = chain([0, 0, 0])
    steps = (Compute(0), SwapOut(4, (0,)), Drop(4), SwapIn(4, None, (1,)), Compute(1, (3,)))
    weights = tuple(Placement(i, Address("partition", 0)) for i in range(3))
    plan = Plan(graph.fingerprint, "", Memory(3 * PAGE), 3 * PAGE, weights, steps)
    found = [r for r in live_ranges(graph, plan) if r.tensor == 4]
    assert [(r.address, r.start, r.end, r.uses) for r in found] == [(None, 0, 2, (0, 1)), (None, 3, 5, (4,))]


@pytest.mark.parametrize("seed", range(20))
def test_layouts_do_not_overlap_and_come_close_to_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    blocks = []
    for _ in range(rng.randint(1, 60)):
        span = Lifespan(first := rng.randint(0, 40), first + rng.randint(1, 9))
        blocks.append(Block(rng.choice((0, 1, 100, 5000, 70000)), rng.choice((1, 64, 256)), span))
    layout = place(blocks)
    assert_sound(blocks, layout)
    assert most_live_bytes(blocks) <= layout.peak_bytes <= 1.3 * most_live_bytes(blocks) + 256
    graph = random_graph(rng)
    assert activation_pool_bytes(graph) >= peak_activation_bytes(graph)
    assert Footprint.of(graph).activation_bytes >= peak_activation_bytes(graph)


@given(st.integers(0, 10**6))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_pool_for_activations_holds_their_aligned_bytes_during_every_op(seed: int) -> None:
    """Plans count each tensor rounded up to its alignment; a layout may put a small one into what that leaves."""
    graph = random_graph(random.Random(seed))
    pool_bytes, counted = activation_pool_bytes(graph), aligned_bytes(graph)
    for k in range(len(graph.ops)):
        alive = [
            t
            for t, span in enumerate(lifespans(graph))
            if span is not None and span.first <= k < span.end and graph.tensors[t].kind != "parameter"
        ]
        assert sum(counted[t] for t in alive) + aligned_scratch_bytes(graph, k) <= pool_bytes


def test_a_pool_is_not_smaller_than_what_is_counted() -> None:
    """4000 bytes, which count as 4032, and 96 are less than a page in a layout, and more where they are counted."""
    tensors = (Tensor("X", 4000, "input", 64), Tensor("Y", 96, "activation", 1))
    graph = Graph("full page", 1, "w", tensors, (Op("op", "any", (0,), (1,)),), (1,))
    assert Footprint.of(graph).activation_bytes == 2 * PAGE
    search(Problem(graph, profile_of(graph), Memory(2 * PAGE)), "genetic")


def test_two_blocks_share_bytes_where_their_spans_do_not_meet() -> None:
    spans = [Lifespan(first, end) for first in range(4) for end in range(first + 1, 5)]
    times = {span: set(range(span.first, span.end)) for span in spans}
    for one, other in product(spans, spans):
        peak_bytes = place([Block(3, 1, one), Block(2, 1, other)]).peak_bytes
        assert peak_bytes == (3 if times[one].isdisjoint(times[other]) else 5), (one, other)


def test_nothing_takes_nothing() -> None:
    assert place([]).peak_bytes == most_live_bytes([]) == 0
