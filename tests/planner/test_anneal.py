"""Moves of the annealing, by hand."""

from dataclasses import replace

import numpy as np

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.streaming.anneal import anneal
from cohabit.planner.streaming.searcher import Streaming
from cohabit.planner.streaming.stream import KEPT, STREAMED, place_residents, uniform
from cohabit.planner.streaming.workload import Workload
from tests.planner.graphs import PAGE, chain, profile_of


def test_a_large_parameter_is_exchanged_for_small_ones_that_are_a_little_larger_together() -> None:
    """One copy of 40 pages has less latency than four of 41. Each smaller step on the way there copies more."""
    graph = chain([40 * PAGE, 10 * PAGE, 10 * PAGE, 10 * PAGE, 11 * PAGE])
    profile = profile_of(graph, latency_s=5.0)
    footprint = Footprint.of(graph)
    memory = Memory(footprint.activation_bytes + 59 * PAGE, 41 * PAGE)
    work = Workload.of(footprint, profile, memory, GraphArrays.of(graph, profile))
    choice = np.full(5, STREAMED)
    choice[0] = KEPT
    start = uniform(choice, np.zeros(5, np.bool_), 0)
    found = anneal(work.arrays, work.numbering, start, place_residents(work.arrays, choice), False, 200, 0.0, 0)
    assert (found.choice == STREAMED).tolist() == [True, False, False, False, False]


def test_a_walk_begins_with_the_rule_that_each_use_had() -> None:
    graph = chain([4 * PAGE, PAGE, 3 * PAGE, 2 * PAGE])
    searcher = Streaming(Problem(graph, profile_of(graph, bandwidth=PAGE / 2), Memory(8 * PAGE)), seed=0)
    mixed = replace(searcher.first(), fit=bytes([0, 1, 2, 1]))
    searcher.tell([mixed], [Cost(0.0, np.inf, 0)])
    asked = searcher.ask()
    while not asked[0].steps:
        searcher.tell(asked, [searcher.evaluate(c, 0.0) for c in asked])
        asked = searcher.ask()
    assert asked[0].decisions().fit.tolist() == [0, 1, 2, 1]
