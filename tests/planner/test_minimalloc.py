"""MiniMalloc's file format, and the search behind placements that must be tight."""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.minimalloc import HEIGHT, guillotine
from planner.errors import FormatError
from planner.layout.minimalloc import Problem, Score, read, score, write
from planner.layout.placement import Block, Layout, most_live_bytes, place
from planner.lifetimes import Lifespan

# The example of MiniMalloc's README, which fits in 12.
EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def spans(block: Block) -> list[Lifespan]:
    return [block.span, *([block.again] if block.again is not None else [])]


def assert_sound(blocks: Sequence[Block], layout: Layout) -> None:
    """Independent of the search: no two blocks share a byte at any time, all are aligned, the peak is the peak."""
    for offset, block in zip(layout.offsets, blocks, strict=True):
        assert offset >= 0
        assert offset % block.alignment == 0
        assert offset + block.nbytes <= layout.peak_bytes
    for (at, a), (bt, b) in combinations(zip(layout.offsets, blocks, strict=True), 2):
        if any(x.overlaps(y) for x in spans(a) for y in spans(b)):
            assert at + a.nbytes <= bt or bt + b.nbytes <= at


def written(folder: Path, text: str) -> Path:
    path = folder / "problem.csv"
    path.write_text(text)
    return path


def test_the_example_is_read_and_fits_in_twelve(tmp_path: Path) -> None:
    problem = read(written(tmp_path, EXAMPLE))
    assert problem.names == ("b1", "b2", "b3", "b4", "b5")
    assert problem.blocks[1] == Block(4, 1, Lifespan(3, 9))
    assert score(problem.blocks) == Score(12, 12)
    assert score(problem.blocks).ratio == 1


def test_an_end_is_the_last_time_that_counts(tmp_path: Path) -> None:
    old = "buffer_id,start,end,size\nb1,0,2,4\nb2,3,8,4\nb3,0,8,4\nb4,9,20,4\nb5,0,20,4\n"
    assert read(written(tmp_path, old)) == read(written(tmp_path, EXAMPLE))


def test_alignment_and_gaps_count_and_hints_do_not(tmp_path: Path) -> None:
    text = "size,id,lower,upper,alignment,hint,gaps\n8,a,0,30,4,-1,5-10 12-20 21-29@0:4\n8,b,12,20,8,0,\n"
    problem = read(written(tmp_path, text))
    assert problem.blocks == (
        Block(8, 4, Lifespan(0, 12), Lifespan(20, 30)),
        Block(8, 8, Lifespan(12, 20)),
    )
    assert score(problem.blocks) == Score(8, 8)


def test_a_solution_is_written_beside_its_problem(tmp_path: Path) -> None:
    blocks = (Block(4, 2, Lifespan(0, 3), Lifespan(5, 9)), Block(6, 1, Lifespan(1, 2)))
    problem = Problem(("a", "b"), blocks)
    path = tmp_path / "solution.csv"
    write(path, problem, Layout((6, 0), 10))
    assert path.read_text() == "id,lower,upper,size,alignment,gaps,offset\na,0,9,4,2,3-5,6\nb,1,2,6,1,,0\n"
    assert read(path) == problem
    write(path, problem)
    assert read(path) == problem


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the file is empty"),
        ("id,lower,size\n", "line 1: column upper is missing"),
        ("id,lower,upper,size,colour\n", "line 1: column colour is unknown"),
        ("id,lower,start,upper,size\n", "line 1: column lower is there twice"),
        ("id,lower,upper,size\na,0,1,8\nb,0,1\n", "line 3: 3 fields"),
        ("id,lower,upper,size\na,0,1,8\nb,0,one,8\n", "line 3: column upper: 'one'"),
        ("id,lower,upper,size\na,3,3,8\n", "line 2: column upper: the lifespan 3 to 3"),
        ("id,lower,upper,size\na,0,3,-8\n", "line 2: column size: -8"),
        ("id,lower,upper,size,alignment\na,0,3,8,0\n", "line 2: column alignment: 0"),
        ("id,lower,upper,size,gaps\na,0,9,8,4\n", "line 2: column gaps: '4'"),
        ("id,lower,upper,size,gaps\na,0,9,8,4-5@3\n", "line 2: column gaps: '4-5@3'"),
    ],
)
def test_errors_name_file_line_and_column(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        read(written(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path / 'problem.csv'}: {says}")


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_rectangle_has_no_holes(seed: int) -> None:
    blocks = guillotine(40, seed)
    assert len(blocks) == 40
    assert most_live_bytes(blocks) == HEIGHT
    assert sum(b.nbytes * (b.span.end - b.span.first) for b in blocks) == HEIGHT * 1000
    assert blocks == guillotine(40, seed)


@pytest.mark.parametrize(("count", "seed"), [(30, 0), (60, 0), (100, 1)])
def test_a_search_closes_the_gap_that_greedy_rules_leave(count: int, seed: int) -> None:
    blocks = guillotine(count, seed)
    greedy, searched = place(blocks), place(blocks, nodes=20_000)
    assert_sound(blocks, searched)
    assert greedy.peak_bytes > HEIGHT  # else these instances show nothing
    assert searched.peak_bytes - HEIGHT < 0.5 * (greedy.peak_bytes - HEIGHT)


def test_the_same_seed_finds_the_same_layout() -> None:
    blocks = guillotine(60, 3)
    assert place(blocks, nodes=3000, seed=1) == place(blocks, nodes=3000, seed=1)
    assert place(blocks) == place(blocks, nodes=0, seed=7)


def test_enough_is_enough() -> None:
    blocks = guillotine(30, 0)
    greedy = place(blocks)
    assert place(blocks, greedy.peak_bytes, nodes=20_000) == greedy


SPANS = st.tuples(st.integers(0, 9), st.integers(1, 4)).map(lambda s: Lifespan(s[0], s[0] + s[1]))
LATER = st.one_of(
    st.none(), st.tuples(st.integers(14, 18), st.integers(1, 3)).map(lambda s: Lifespan(s[0], sum(s)))
)
BLOCKS = st.lists(st.builds(Block, st.integers(0, 9), st.sampled_from([1, 2, 4]), SPANS, LATER), max_size=12)


@settings(max_examples=150, deadline=None)
@given(BLOCKS)
def test_searched_layouts_are_sound_and_never_worse(blocks: list[Block]) -> None:
    searched = place(blocks, nodes=400)
    assert_sound(blocks, searched)
    assert most_live_bytes(blocks) <= searched.peak_bytes <= place(blocks).peak_bytes


def best_peak(blocks: Sequence[Block]) -> int:
    """By trying every order with every block as low as it goes: some order yields an optimal layout."""

    def least(placed: tuple[tuple[int, Block], ...], rest: tuple[Block, ...]) -> int:
        if not rest:
            return max((at + b.nbytes for at, b in placed), default=0)
        peaks = []
        for i, block in enumerate(rest):
            in_the_way = [(at, b) for at, b in placed if b.span.overlaps(block.span)]
            starts = [0, *(at + b.nbytes for at, b in in_the_way)]
            lowest = min(
                s for s in starts if all(s + block.nbytes <= at or at + b.nbytes <= s for at, b in in_the_way)
            )
            peaks.append(least((*placed, (lowest, block)), rest[:i] + rest[i + 1 :]))
        return min(peaks)

    return least((), tuple(blocks))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.builds(Block, st.integers(1, 9), st.just(1), SPANS), min_size=2, max_size=6))
def test_small_problems_are_solved_to_the_optimum(blocks: list[Block]) -> None:
    assert place(blocks, nodes=50_000).peak_bytes == best_peak(blocks)
