"""Measurements in turns: the order of turns, ratios within a round, and how results are written."""

from pathlib import Path

import msgspec

from benchmarks.record import ResultData, markdown_table, record, table_of
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


def test_the_data_have_all_tables_and_the_page_those_that_are_shown(tmp_path: Path) -> None:
    hidden = markdown_table(["model", "MiB"], [["a", "7"]], shown=False)
    shown = table_of([{"model": "a", "ms": "1.0"}])
    sections = ["## Memory\n", "Of each model:\n", hidden, "## Time\n\nMedians.\n", shown]
    page = record("speed", "Speed", "benchmarks.speed", sections, tmp_path).read_text()
    data = msgspec.json.decode((tmp_path / "data" / "speed.json").read_bytes(), type=ResultData)
    assert [(t.section, t.about, t.header, t.rows) for t in data.tables] == [
        ("Memory", "Of each model:", ["model", "MiB"], [["a", "7"]]),
        ("Time", "Medians.", ["model", "ms"], [["a", "1.0"]]),
    ]
    assert page.endswith(f"## Time\n\nMedians.\n\n{shown}\nMore rows are in [data/speed.json](data/speed.json).\n")
    assert "Memory" not in page
    assert "Of each model" not in page


def test_a_heading_is_shown_with_any_of_its_tables(tmp_path: Path) -> None:
    hidden = markdown_table(["model", "MiB"], [["a", "7"]], shown=False)
    shown = table_of([{"model": "a", "ms": "1.0"}])
    sections = ["## First\n", hidden, shown, hidden, "## Second\n", hidden, "## Third\n", shown]
    page = record("speed", "Speed", "benchmarks.speed", sections, tmp_path).read_text()
    assert f"## First\n\n{shown}\n## Third\n\n{shown}\n" in page
