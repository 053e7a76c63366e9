"""Measurements in turns: the order of turns, and ratios within a round."""

from benchmarks.record import table_of
from benchmarks.turns import Quartiles, in_turns, turns


def test_each_round_begins_with_the_next_contestant() -> None:
    assert list(turns("abc", 4)) == [
        *((0, "a"), (0, "b"), (0, "c")),
        *((1, "b"), (1, "c"), (1, "a")),
        *((2, "c"), (2, "a"), (2, "b")),
        *((3, "a"), (3, "b"), (3, "c")),
    ]


def test_figures_of_one_round_have_the_same_place_whatever_the_order() -> None:
    calls: list[str] = []

    def call(way: str) -> int:
        calls.append(way)
        return calls.count(way)

    found = in_turns({way: lambda way=way: call(way) for way in "ab"}, 3)  # type: ignore[misc]
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert calls == ["a", "b", "b", "a", "a", "b"]


def test_ratios_are_taken_within_a_round() -> None:
    assert str(Quartiles.of_ratios([2.0, 20.0, 200.0], [1.0, 10.0, 100.0])) == "2.00 (2.00-2.00)"
    assert str(Quartiles.of_ratios([3.0], [2.0])) == "1.50 (1.50-1.50)"


def test_a_cell_is_in_the_column_of_its_heading() -> None:
    rows = [{"model": "a", "ms": "1.0"}, {"ms": "2.0", "model": "b"}]
    assert table_of(rows) == "| model | ms |\n| --- | ---: |\n| a | 1.0 |\n| b | 2.0 |\n"
