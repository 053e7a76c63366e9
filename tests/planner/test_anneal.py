"""Moves of the annealing, by hand."""

import numpy as np

from planner.layout.feasible import Footprint
from planner.streaming.anneal import anneal
from planner.streaming.stream import KEPT, STREAMED, homes, uniform
from planner.streaming.workload import Workload
from tests.planner.graphs import PAGE, chain, profile_of


def test_a_large_parameter_is_exchanged_for_small_ones_that_are_a_little_larger_together() -> None:
    """One copy of 40 pages has less latency than four of 41. Each smaller step on the way there copies more."""
    graph = chain([40 * PAGE, 10 * PAGE, 10 * PAGE, 10 * PAGE, 11 * PAGE])
    work = Workload.of(Footprint.of(graph, overlay=True), profile_of(graph, latency_s=5.0), 100 * PAGE, 0)
    fate = np.full(5, STREAMED)
    fate[0] = KEPT
    start = uniform(fate, np.zeros(5, np.bool_), 0)
    found = anneal(work.arrays, start, homes(work.arrays, fate), False, 42, 200, 0.0, 0)
    assert (found.fate == STREAMED).tolist() == [True, False, False, False, False]
