"""Parts of the streaming search by hand: holes, residents, copies and moves."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from cohabit.planner.arrays import GraphArrays
from cohabit.planner.genetic.searcher import Genetic
from cohabit.planner.genetic.walk import critical, walk
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.streaming import residents
from cohabit.planner.streaming.page_map import NOWHERE, Hole, empty_page_map, find_hole, put, remove, use
from cohabit.planner.streaming.stream import (
    KEPT,
    RELEASED,
    STREAMED,
    Decisions,
    place_residents,
    play,
    uniform,
)
from cohabit.planner.streaming.workload import Workload
from tests.support.planner.graphs import PAGE, chain, profile_of


@pytest.mark.parametrize(("fit", "first_page"), [(0, 0), (1, 4), (2, 7)])
def test_each_rule_finds_its_hole(fit: int, first_page: int) -> None:
    """Of pages 0 to 2, idle longest; 4 and 5, the tightest; 7 to 9, the next after the last copy."""
    memory = empty_page_map(10, 0, 5, 32)
    for parameter, page, pages, op in ((0, 0, 3, 0), (1, 3, 1, 2), (2, 4, 2, 1), (3, 6, 1, 2), (4, 7, 3, 1)):
        put(memory, parameter, page, pages)
        use(memory, parameter, op)
    for parameter in (0, 2, 4):
        remove(memory, parameter)
    locked = np.array([-1, 3, -1, 3, -1])
    assert find_hole(memory, 2, locked, Hole(3, np.zeros(5), 0.0, fit, 7)) == first_page


def workload(
    sizes: list[int], partition: int, window: int, bandwidth: float = PAGE, latency_s: float = 0.0
) -> Workload:
    """A chain of ops of a second, each with a weight of so many pages."""
    graph = chain([size * PAGE for size in sizes])
    profile = profile_of(graph, bandwidth=bandwidth, latency_s=latency_s)
    footprint = Footprint.of(graph)
    memory = Memory(footprint.activation_bytes + window * PAGE, partition * PAGE)
    return Workload.of(footprint, profile, memory, GraphArrays.of(graph, profile))


@pytest.mark.parametrize(
    ("choose", "kept"),
    [
        (residents.fill, (0, 1, 2)),  # 3 + 1 + 2 of 6 pages, in the order of use
        (residents.largest_first, (1, 3)),  # 5 pages, then of 3 and 2 none fits; then the one of 1
        (residents.costly_first, (1, 2, 0)),  # with a latency per copy, the smallest
        (residents.spread, (0, 1, 2)),
    ],
)
def test_residents_are_chosen_by_size_and_order(
    choose: Callable[[Workload, int], residents.Choice], kept: tuple[int, ...]
) -> None:
    work = workload([3, 1, 2, 5], 6, 6, latency_s=1.0)
    assert choose(work, 6) == tuple(sorted(kept))


def test_shares_of_a_relaxation_are_kept_in_their_order() -> None:
    work = workload([3, 1, 2, 5], 6, 6)
    assert residents.by_share(work, np.array([0.1, 0.2, 0.9, 0.8]), 6) == (0, 1, 2)  # 5 pages do not fit beside 2
    assert residents.by_share(work, np.array([0.1, 0.2, 0.9, 0.8]), 7) == (2, 3)


def test_paced_residents_are_those_whose_copies_would_be_late() -> None:
    """Copies of 1, 1, 1 and 4 s for ops that start at 0, 1, 2 and 3 s: the first, and the last after two others."""
    assert residents.paced(workload([1, 1, 1, 4], 5, 6), 5) == (0, 3)
    # With room for one page, ops that are twice as slow would start at 0, 2, 4 and 6: the last is there at 6.
    assert residents.paced(workload([1, 1, 1, 4], 1, 6), 1) == (0,)


def test_kept_residents_lie_before_those_that_are_released() -> None:
    work = workload([3, 1, 2, 5], 9, 6)
    choice = np.array([RELEASED, KEPT, STREAMED, RELEASED])
    assert place_residents(work.arrays, choice).tolist() == [1, 0, NOWHERE, 4]


def played(
    work: Workload, choice: list[int], hold: bool = False, lead: tuple[int, ...] = ()
) -> list[tuple[int, ...]]:
    """Parameter, page, last user of its bytes, and the op that reads it first, of each copy."""
    decisions = uniform(np.array(choice), np.full(len(work.arrays.use_op), hold), 0)
    if lead:
        decisions = Decisions(decisions.choice, decisions.hold, decisions.fit, np.array(lead))
    swaps, _ = play(work.arrays, place_residents(work.arrays, np.array(choice)), decisions)
    count = int(swaps.length[0])
    columns = (swaps.parameter, swaps.page, swaps.after_op, swaps.op)
    return list(zip(*(column[:count].tolist() for column in columns), strict=True))


def test_copies_go_into_bytes_that_nothing_needs_any_more() -> None:
    """The partition of three pages keeps W0; W1 and W2 go beside it, and W3 into the bytes of W1."""
    work = workload([1, 1, 1, 1], 3, 0)
    assert played(work, [KEPT, STREAMED, STREAMED, STREAMED]) == [(1, 1, -1, 1), (2, 2, -1, 2), (3, 1, 1, 3)]


def test_a_released_resident_makes_room_and_comes_back_at_the_end() -> None:
    work = workload([2, 2, 2], 4, 0)
    assert played(work, [RELEASED, KEPT, STREAMED]) == [(2, 2, 0, 2), (0, 2, 2, 3)]


def test_the_rule_of_the_next_hole_goes_on_where_the_last_copy_ended() -> None:
    """In a partition of four pages, W0 to W3 go one after the other, whichever bytes have been idle longer."""
    work = workload([1, 1, 1, 1, 1, 1], 4, 0)
    choice = np.full(6, STREAMED)
    swaps, _ = play(work.arrays, place_residents(work.arrays, choice), uniform(choice, np.zeros(6, np.bool_), 2))
    assert swaps.page[:6].tolist() == [0, 1, 2, 3, 0, 1]


def waited_for(copy_s: float, released: tuple[int, ...], partition: int = 18, last_pages: int = 1) -> list[int]:
    """The copies that an inference waits for, of four ops of a second with a weight of a page (the last: of more)."""
    work = workload([1, 1, 1, last_pages], partition, 0, PAGE / copy_s)
    choice = np.full(4, STREAMED)
    choice[list(released)] = RELEASED
    swaps, _ = play(work.arrays, place_residents(work.arrays, choice), uniform(choice, np.zeros(4, np.bool_), 0))
    return sorted(critical(work.arrays, swaps).parameter.tolist())


@pytest.mark.parametrize(
    ("copy_s", "released", "found"),
    [
        (2.0, (), [0, 1, 2, 3]),  # each op waits for its copy
        (2.0, (0, 1), [2, 3]),  # W2 is in time, but W3 comes after it, after 4 s: op3 could start at 3
        (0.5, (), [0]),  # only the first is waited for
        (0.5, (0,), []),
        (1.5, (0,), [1, 2, 3]),  # 1.5, 3, 4.5 s for ops that could start at 1, 2.5, 4
        (2.5, (0, 1), [2, 3]),
    ],
)
def test_what_ops_wait_for(copy_s: float, released: tuple[int, ...], found: list[int]) -> None:
    assert waited_for(copy_s, released) == found


def test_a_copy_before_a_pause_of_the_link_is_not_to_blame() -> None:
    """
    Two pages beside the activations; W3 takes both, and can be copied when W1 and W2 have been used.

    compute | op0 | op1 | op2 |  wait   | op3
    swap_in | W1  | W2  |     | W3 (2 s)|
    """
    assert waited_for(1.0, (0,), partition=2, last_pages=2) == [3]


def test_a_large_parameter_is_exchanged_for_small_ones_that_are_a_little_larger_together() -> None:
    """One copy of 40 pages has less latency than four of 41. Each smaller step on the way there copies more."""
    work = workload([40, 10, 10, 10, 11], 41, 59, latency_s=5.0)
    choice = np.array([KEPT, STREAMED, STREAMED, STREAMED, STREAMED])
    start = uniform(choice, np.zeros(5, np.bool_), 0)
    found = walk(work.arrays, work.numbering, start, place_residents(work.arrays, choice), False, 200, 0.0, 0)
    assert (found.choice == STREAMED).tolist() == [True, False, False, False, False]


def test_a_walk_begins_with_the_rule_that_each_use_had() -> None:
    graph = chain([4 * PAGE, PAGE, 3 * PAGE, 2 * PAGE])
    searcher = Genetic(Problem(graph, profile_of(graph, bandwidth=PAGE / 2), Memory(8 * PAGE)), seed=0)
    mixed = replace(searcher.first(), fit=bytes([0, 1, 2, 1]))
    searcher.tell([mixed], [Cost(0.0, np.inf, 0)])
    asked = searcher.ask()
    while not asked[0].steps:
        searcher.tell(asked, [searcher.evaluate(c, 0.0) for c in asked])
        asked = searcher.ask()
    assert asked[0].decisions().fit.tolist() == [0, 1, 2, 1]
