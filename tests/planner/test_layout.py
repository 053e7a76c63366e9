"""Lifespans, and offsets that respect them."""

import random

import pytest

from planner.layout.feasible import Footprint
from planner.layout.placement import Block, most_live_bytes, place, place_activations
from planner.lifetimes import Lifespan, lifespans, needed_bytes, peak_activation_bytes
from tests.planner.graphs import PAGE, chain, random_graph


def test_lifespans_are_half_open() -> None:
    graph = chain([PAGE] * 3)
    assert lifespans(graph)[0] == Lifespan(0, 1)  # W0
    assert lifespans(graph)[3] == Lifespan(0, 1)  # A0, the input
    assert lifespans(graph)[4] == Lifespan(0, 2)  # A1, written by op0 and read by op1
    assert lifespans(graph)[6] == Lifespan(2, 3)  # A3, the output


def test_chain_needs_two_activations_at_a_time() -> None:
    graph = chain([PAGE] * 3)
    assert peak_activation_bytes(graph) == 2 * PAGE
    assert needed_bytes(graph) == (3 * PAGE, 3 * PAGE, 3 * PAGE)
    assert place_activations(graph).peak_bytes == 2 * PAGE


@pytest.mark.parametrize("seed", range(20))
def test_layouts_do_not_overlap_and_come_close_to_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    blocks = []
    for _ in range(rng.randint(1, 60)):
        first = rng.randint(0, 40)
        alignment = rng.choice((1, 64, 256))
        blocks.append(
            Block(rng.choice((0, 1, 100, 5000, 70000)), alignment, Lifespan(first, first + rng.randint(1, 9)))
        )
    layout = place(blocks)
    ends = [o + b.nbytes for o, b in zip(layout.offsets, blocks, strict=True)]
    assert layout.peak_bytes == max(ends)
    assert most_live_bytes(blocks) <= layout.peak_bytes <= 1.3 * most_live_bytes(blocks) + 256
    for i, a in enumerate(blocks):
        assert layout.offsets[i] % a.alignment == 0
        for j, b in enumerate(blocks[:i]):
            disjoint = ends[i] <= layout.offsets[j] or ends[j] <= layout.offsets[i]
            assert disjoint or not a.span.overlaps(b.span) or not a.nbytes or not b.nbytes


@pytest.mark.parametrize("seed", range(20))
def test_activations_take_at_least_their_peak(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    assert place_activations(graph).peak_bytes >= peak_activation_bytes(graph)
    assert Footprint.of(graph).activation_bytes >= peak_activation_bytes(graph)


def test_nothing_takes_nothing() -> None:
    assert place([]).peak_bytes == most_live_bytes([]) == 0
