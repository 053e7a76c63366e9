"""Copies that an inference waits for, by hand."""

import numpy as np
import pytest

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.streaming.anneal import critical
from cohabit.planner.streaming.stream import RELEASED, STREAMED, place_residents, play, uniform
from cohabit.planner.streaming.workload import Workload
from tests.planner.graphs import PAGE, chain, profile_of


def waited_for(copy_s: float, residents: tuple[int, ...], memory_pages: int = 20, last_pages: int = 1) -> list[int]:
    """Four ops of a second with a weight of a page each (the last of `last_pages`), and no window."""
    graph = chain([PAGE, PAGE, PAGE, last_pages * PAGE])
    profile = profile_of(graph, bandwidth=PAGE / copy_s)
    footprint = Footprint.of(graph)
    memory = Memory(footprint.activation_bytes, memory_pages * PAGE - footprint.activation_bytes)
    work = Workload.of(footprint, profile, memory, GraphArrays.of(graph, profile))
    choice = np.full(4, STREAMED)
    choice[list(residents)] = RELEASED
    decisions = uniform(choice, np.zeros(4, np.bool_), 0)
    swaps, _ = play(work.arrays, place_residents(work.arrays, choice), decisions)
    return sorted(critical(work.arrays, swaps).parameter.tolist())


@pytest.mark.parametrize(
    ("copy_s", "residents", "found"),
    [
        (2.0, (), [0, 1, 2, 3]),  # each op waits for its copy
        (2.0, (0, 1), [2, 3]),  # W2 is in time, but W3 comes after it, after 4 s: op3 could start at 3
        (0.5, (), [0]),  # only the first is waited for
        (0.5, (0,), []),
        (1.5, (0,), [1, 2, 3]),  # 1.5, 3, 4.5 s for ops that could start at 1, 2.5, 4
        (2.5, (0, 1), [2, 3]),
    ],
)
def test_what_ops_wait_for(copy_s: float, residents: tuple[int, ...], found: list[int]) -> None:
    assert waited_for(copy_s, residents) == found


def test_a_copy_before_a_pause_of_the_link_is_not_to_blame() -> None:
    """
    Two pages beside the activations; W3 takes both, and can be copied when W1 and W2 have been used.

    compute | op0 | op1 | op2 |  wait   | op3
    swap_in | W1  | W2  |     | W3 (2 s)|
    """
    assert waited_for(1.0, (0,), memory_pages=4, last_pages=2) == [3]
