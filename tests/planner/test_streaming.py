"""Parts of the streaming search: the page map against arrays of pages; residents, copies and moves by hand."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest

from cohabit.planner.arrays import Floats, GraphArrays, Ints
from cohabit.planner.genetic.searcher import Genetic
from cohabit.planner.genetic.walk import critical, walk
from cohabit.planner.layout.feasible import Footprint
from cohabit.planner.memory import Memory
from cohabit.planner.problem import Cost, Problem
from cohabit.planner.streaming import residents
from cohabit.planner.streaming.page_map import (
    NO_MORE,
    NOWHERE,
    Hole,
    PageMap,
    empty_page_map,
    find_free,
    find_hole,
    put,
    remove,
    tidy,
    use,
)
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

PARTITION, WINDOW, PARAMETERS, OPS = 9, 7, 6, 12
FREE, BORDER = -1, -2


@dataclass
class Pages:
    """The same memory page by page: what is in each, and which op used it last."""

    owner: list[int] = field(default_factory=lambda: [FREE] * PARTITION + [BORDER] + [FREE] * WINDOW)
    last: list[int] = field(default_factory=lambda: [-1] * (PARTITION + 1 + WINDOW))

    def put(self, parameter: int, first: int, count: int) -> int:
        latest = max(self.last[first : first + count])
        displaced = {*self.owner[first : first + count]}
        self.owner = [FREE if owner in displaced and owner >= 0 else owner for owner in self.owner]
        self.owner[first : first + count] = [parameter] * count
        self.last[first : first + count] = [latest] * count
        return latest

    def use(self, parameter: int, op: int) -> None:
        used = [owner == parameter for owner in self.owner]
        self.last = [op if by_op else last for by_op, last in zip(used, self.last, strict=True)]

    def is_open(self, page: int, op: int, locked: Ints) -> bool:
        owner = self.owner[page]
        return self.last[page] < op and owner != BORDER and (owner < 0 or locked[owner] < op)

    def open_run(self, page: int, op: int, locked: Ints) -> int:
        """How many open pages lie side by side around this one."""
        low = high = page
        while low and self.is_open(low - 1, op, locked):
            low -= 1
        while high < len(self.owner) and self.is_open(high, op, locked):
            high += 1
        return high - low


def starts(memory: PageMap, count: int) -> list[int]:
    """Where a range of so many pages begins or ends with an item."""
    begin = memory.begin[: memory.items[0] + 1].tolist()
    found = [page for a, b in pairwise(begin) for page in (a, b - count)]
    return [page for page in found if 0 <= page <= begin[-1] - count]


def check_hole(memory: PageMap, pages: Pages, count: int, locked: Ints, hole: Hole) -> int:
    """The hole that is found is the best of all, by trying them."""

    def rank_of(page: int) -> tuple[float, float]:
        latest = max(pages.last[page : page + count])
        distance = page - hole.cursor if page >= hole.cursor else page - hole.cursor + len(pages.last) + 1
        rank = (latest, pages.open_run(page, hole.op, locked), distance)[hole.fit]
        return max(hole.op_end_s[latest + 1] - hole.link_s, 0.0), rank

    found = find_hole(memory, count, locked, hole)
    holes = [p for p in starts(memory, count) if all(pages.is_open(p + i, hole.op, locked) for i in range(count))]
    assert (found in holes) if holes else (found == NOWHERE)
    if holes:
        assert rank_of(found) == min(map(rank_of, holes))
    return found


def check_room(memory: PageMap, pages: Pages, count: int, op: int, next_use: Ints, early: Ints) -> None:
    """The contents that are given up for an op are those that are needed last, of all that can be."""

    def worth_of(page: int) -> tuple[int, int]:
        owners = {owner for owner in pages.owner[page : page + count] if owner != FREE}
        if BORDER in owners or any(early[owner] > op for owner in owners):
            return -1, 0
        latest = max(pages.last[page : page + count])
        return min((int(next_use[owner]) for owner in owners), default=NO_MORE), -latest

    found = find_free(memory, count, op, next_use, early)
    rooms = [page for page in starts(memory, count) if worth_of(page)[0] > op > -worth_of(page)[1]]
    assert (found in rooms) if rooms else (found == NOWHERE)
    if rooms:
        assert worth_of(found) == max(map(worth_of, rooms))


def check_tidy(memory: PageMap, pages: Pages, next_use: Ints, op_end_s: Floats, link_s: float) -> None:
    """What nothing needs and is free in time is joined; the rest stays as it is."""
    dead = [
        (owner == FREE or (owner >= 0 and next_use[owner] >= NO_MORE)) and op_end_s[last + 1] <= link_s
        for owner, last in zip(pages.owner, pages.last, strict=True)
    ]
    runs = [0]
    for a, b in pairwise(dead):
        runs.append(runs[-1] if a and b else runs[-1] + 1)
    joined = [max(last for other, last in zip(runs, pages.last, strict=True) if other == run) for run in runs]
    pages.owner = [FREE if d else owner for d, owner in zip(dead, pages.owner, strict=True)]
    pages.last = [j if d else last for d, j, last in zip(dead, joined, pages.last, strict=True)]
    tidy(memory, next_use, op_end_s, link_s)
    assert_equal(memory, pages)
    begin = memory.begin.tolist()
    assert not any(dead[begin[i]] and dead[begin[i + 1]] for i in range(int(memory.items[0]) - 1))


@pytest.mark.parametrize("seed", range(12))
def test_a_page_map_is_what_an_array_of_pages_is(seed: int) -> None:
    rng = random.Random(seed)
    size = [rng.randint(1, 4) for _ in range(PARAMETERS)]
    memory, pages = empty_page_map(PARTITION, WINDOW, PARAMETERS, 64), Pages()
    op_end_s = np.cumsum([0.0] + [rng.choice((0.0, 0.5, 2.0)) for _ in range(OPS)])
    for op in range(OPS):
        for _ in range(4):
            p = rng.randrange(PARAMETERS)
            locked = np.array([rng.choice((-1, op - 1, op, op + 1)) for _ in range(PARAMETERS)])
            next_use = np.array([rng.choice((op + 1, op + 3, NO_MORE)) for _ in range(PARAMETERS)])
            early = np.array([rng.choice((-1, -1, op, op + 1)) for _ in range(PARAMETERS)])
            cursor = rng.randrange(PARTITION + WINDOW)
            hole = Hole(op, op_end_s, rng.choice((0.0, 1.0, 5.0)), rng.randrange(3), cursor)
            found = check_hole(memory, pages, size[p], locked, hole)
            check_room(memory, pages, size[p], op, next_use, early)
            if memory.where[p] < 0:
                ends = len(pages.last) - size[p] + 1
                anywhere = [page for page in range(ends) if not page <= PARTITION < page + size[p]]
                page = rng.choice([rng.choice(anywhere), found if found >= 0 else anywhere[0]])
                assert put(memory, p, page, size[p]) == pages.put(p, page, size[p])
            elif rng.random() < 0.5:
                use(memory, p, op)
                pages.use(p, op)
            else:
                remove(memory, p)
                pages.owner = [FREE if owner == p else owner for owner in pages.owner]
            assert_equal(memory, pages)
        next_use = np.array([rng.choice((op + 1, NO_MORE)) for _ in range(PARAMETERS)])
        check_tidy(memory, pages, next_use, op_end_s, float(op_end_s[op]))


def assert_equal(memory: PageMap, pages: Pages) -> None:
    begin, what = memory.begin.tolist(), memory.what.tolist()
    last, items = memory.last.tolist(), int(memory.items[0])
    owner = [what[i] for i in range(items) for _ in range(begin[i], begin[i + 1])]
    assert owner == pages.owner
    assert [last[i] for i in range(items) for _ in range(begin[i], begin[i + 1])] == pages.last
    where = [pages.owner.index(p) if p in pages.owner else NOWHERE for p in range(PARAMETERS)]
    assert memory.where.tolist() == where


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
