"""Holds docs/results/papers.md against the result files that it cites.

A figure is written as a label in backticks and its values, before the link to the file: `row: column; column` for cells
of a table, where `row` is one or more leading cells, joined by commas; `caption > row: column` where several tables
have that row; or the words of a sentence that precede the value. A link with an anchor narrows the search to a section.
Derived values follow after the links: *computed: 1.09 = 0.83 / 0.76*, or *= mean(...)*, of values in the same row.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import msgspec
import pytest

from benchmarks.record import ResultData

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "docs" / "results"
COLUMNS: Final = (
    "paper's table or figure",
    "like for like or in kind",
    "simulated or executed",
    "our figure",
    "the paper's figure",
    "what differs",
)
NUMBER: Final = re.compile(r"(?<![\w.+-])[+-]?\d+(?:\.\d+)?%?(?!\w|\.\d)")
VALUE: Final = re.compile(rf"{NUMBER.pattern}|\bInfeasibleBudget\b")
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE: Final = re.compile(r"`([^`]*)`")
QUOTIENT: Final = re.compile(r"(\S+) = (?:mean\(([^)]*)\)|(\S+) / (\S+))")
HEADING: Final = re.compile(r"(#+) (.*)")
COMMIT: Final = re.compile(r"\bcommit ([0-9a-f]{7,40}(?:-dirty)?)(?![\w-])")


class Table(NamedTuple):
    """A table of a result file, and the last paragraph before it."""

    caption: str
    header: list[str]
    rows: list[list[str]]


class Content(NamedTuple):
    """Paragraphs and tables of a result file or of one of its sections."""

    paragraphs: list[str]
    tables: list[Table]


class Row(NamedTuple):
    """A row of papers.md: the heading above it, and its cells."""

    paper: str
    cells: list[str]


@dataclass(frozen=True, slots=True)
class Figure:
    """Values that papers.md cites, with their label and the file, or file and section, that should have them."""

    label: str
    values: tuple[str, ...]
    target: str


def plain(text: str) -> str:
    """Return the text without commas in thousands and spaces before percent signs."""
    return re.sub(r"(?<=\d)\s+%", "%", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def cells_of(line: str) -> list[str]:
    return [plain(cell.strip()) for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


@cache
def lines_of(path: Path, anchor: str) -> tuple[str, ...]:
    """Return the lines of a file, or of the section with this anchor; none if there is no such section."""
    lines = path.read_text().splitlines()
    if not anchor:
        return tuple(lines)
    level, found = 0, list[str]()
    for line in lines:
        heading = HEADING.fullmatch(line)
        if level and heading and len(heading[1]) <= level:
            break
        if level:
            found.append(line)
        elif heading and slug(heading[2]) == anchor:
            level = len(heading[1])
    return tuple(found)


@cache
def data_of(path: Path) -> ResultData | None:
    """Return the data of a result file, which have all its tables; None if there are none."""
    data = path.parent / "data" / f"{path.stem}.json"
    return msgspec.json.decode(data.read_bytes(), type=ResultData) if data.exists() else None


def plain_cells(cells: Sequence[str]) -> list[str]:
    return [plain(cell) for cell in cells]


@cache
def content_of(path: Path, anchor: str = "") -> Content:
    """Return the paragraphs of a page or a section of it, with the tables that its data have there."""
    found, data = page_of(path, anchor), data_of(path)
    if data is not None:
        found.tables[:] = [
            Table(plain(table.about), plain_cells(table.header), [plain_cells(row) for row in table.rows])
            for table in data.tables
            if anchor in ("", slug(table.section))
        ]
    return found


def page_of(path: Path, anchor: str = "") -> Content:
    found = Content([], [])
    for block in "\n".join(lines_of(path, anchor)).split("\n\n"):
        lines = block.strip().splitlines()
        if len(lines) > 2 and all(line.startswith("|") for line in lines):
            caption = found.paragraphs[-1] if found.paragraphs else ""
            found.tables.append(Table(caption, cells_of(lines[0]), [cells_of(line) for line in lines[2:]]))
        else:
            found.paragraphs.append(plain(" ".join(lines)))
    return found


def rows_of(path: Path) -> list[Row]:
    """Return the rows of the tables with COLUMNS."""
    rows, paper, is_row = list[Row](), "", False
    for line in path.read_text().splitlines():
        heading = HEADING.fullmatch(line)
        if heading:
            paper = heading[2]
        if not line.startswith("|"):
            is_row = False
        elif tuple(cells_of(line)) == COLUMNS:
            is_row = True
        elif is_row and not set(line) <= set("|-: "):
            rows.append(Row(paper, cells_of(line)))
    return rows


def read(cell: str) -> tuple[list[Figure], list[str], list[str]]:
    """Return a cell's figures, its computed clauses, and what is wrong with its form."""
    cited, *computed = plain(cell).split("computed:")
    figures, wrong, at = list[Figure](), list[str](), 0
    for link in LINK.finditer(cited):
        text, at = cited[at : link.start()], link.end()
        before, *pieces = CODE.split(text)
        wrong += [f"{value} has no label" for value in VALUE.findall(before)]
        for label, after in zip(pieces[::2], pieces[1::2], strict=True):
            values = tuple(VALUE.findall(after))
            if values:
                figures.append(Figure(label, values, link[1]))
            elif ": " in label:
                wrong.append(f"`{label}` has no value")
    wrong += [f"{value} has no link" for value in VALUE.findall(CODE.sub("", cited[at:]))]
    return figures, [clause.strip().rstrip(";.") for clause in computed], wrong


def has(figure: Figure) -> bool:
    """Whether the linked file, or section, has the figure where its label says."""
    name, _, anchor = figure.target.partition("#")
    if not (RESULTS / name).is_file():
        return False
    content = content_of(RESULTS / name, anchor)
    if ": " not in figure.label:
        phrase = re.compile(rf"{re.escape(f'{figure.label} {figure.values[0]}')}(?!\w|%|\.\d)")
        return len(figure.values) == 1 and any(phrase.search(text) for text in content.paragraphs)
    caption, _, label = figure.label.rpartition(" > ")
    row, _, names = label.rpartition(": ")
    columns = names.split("; ")
    return any(
        row in (", ".join(cells[:count]) for count in range(1, len(cells)))
        and len(figure.values) == len(columns)
        and all(
            value in VALUE.findall(cells[table.header.index(column)])
            for value, column in zip(figure.values, columns, strict=True)
        )
        for table in content.tables
        if table.caption.lower().startswith(caption.lower()) and all(table.header.count(c) == 1 for c in columns)
        for cells in table.rows
    )


def holds(clause: str, known: set[str]) -> bool:
    """Whether a computed value follows, to its last digit, from values that are known."""
    parts = QUOTIENT.fullmatch(clause)
    if parts is None:
        return False
    value, mean, over, under = parts.groups()
    terms = mean.split(", ") if mean else [over, under]
    if not known.issuperset(terms):
        return False
    numbers = [float(term.rstrip("%")) for term in terms]
    exact = fmean(numbers) if mean else numbers[0] / numbers[1]
    digits = len(value.partition(".")[2])
    return abs(exact - float(value)) <= 0.5 * 10.0**-digits + 1e-9


def problems(row: Row) -> list[str]:
    """Return what is wrong with a row."""
    if len(row.cells) != len(COLUMNS) or not all(row.cells):
        return [f"{len(row.cells)} cells, or an empty one"]
    figures, computed, wrong = read(row.cells[3])
    known = {value for figure in figures for value in figure.values} | set(NUMBER.findall(row.cells[4]))
    wrong += [f"{f.target} has no {', '.join(f.values)} at `{f.label}`" for f in figures if not has(f)]
    return wrong + [f"does not follow: {clause}" for clause in computed if not holds(clause, known)]


def other(value: str) -> str:
    """Return a value that differs in its last digit."""
    return re.sub(r"\d(?=%?$)", lambda digit: str((int(digit[0]) + 1) % 10), value)


PAPERS: Final = RESULTS / "papers.md"
ROWS: Final = rows_of(PAPERS)
by_row = pytest.mark.parametrize("row", ROWS, ids=[f"{row.paper[:12]}, {row.cells[0][:24]}" for row in ROWS])


def test_every_paper_has_rows() -> None:
    papers = ("SwapAdvisor", "Spartan", "HOME", "TENSILE", "Beaumont")
    assert [p for p in papers if not any(row.paper.startswith(p) for row in ROWS)] == []


@by_row
def test_figures_are_those_of_the_result_files(row: Row) -> None:
    assert problems(row) == []


@by_row
def test_a_changed_figure_is_noticed(row: Row) -> None:
    figures, computed, _ = read(row.cells[3])
    known = {value for figure in figures for value in figure.values} | set(NUMBER.findall(row.cells[4]))
    for figure in figures:
        for i, value in enumerate(figure.values):
            if value != "InfeasibleBudget":
                changed = (*figure.values[:i], other(value), *figure.values[i + 1 :])
                assert not has(Figure(figure.label, changed, figure.target)), (figure, other(value))
    for clause in computed:
        value, _, rest = clause.partition(" = ")
        assert not holds(f"{other(value)} = {rest}", known), clause


def test_tables_of_pages_are_those_of_their_data() -> None:
    shown, wrong = 0, []
    for path in RESULTS.glob("*.md"):
        for table in page_of(path).tables if data_of(path) is not None else ():
            shown += 1
            if not any((table.header, table.rows) == (t.header, t.rows) for t in content_of(path).tables):
                wrong.append(f"{path.name}: {table.header}")
    assert shown > 50
    assert wrong == []


def test_links_lead_to_files_and_sections() -> None:
    missing = []
    for target in LINK.findall(PAPERS.read_text()):
        name, _, anchor = target.partition("#")
        path = RESULTS / name if name else PAPERS
        if not path.exists() or (anchor and not lines_of(path, anchor)):
            missing.append(target)
    assert missing == []


def test_linked_results_were_recorded_from_clean_commits() -> None:
    documents = (ROOT / "README.md", PAPERS)
    linked = {(d.parent / t.partition("#")[0]).resolve() for d in documents for t in LINK.findall(d.read_text())}
    results = {path for path in linked if path.parent == RESULTS and path.suffix == ".md"}
    measured = sorted(results - {PAPERS, RESULTS / "README.md"})
    commits = {path.name: COMMIT.findall(path.read_text()) for path in measured}
    unclean = {name: c for name, c in commits.items() if not c or any(each.endswith("-dirty") for each in c)}
    assert len(commits) > 1
    assert unclean == {}


def test_names_of_tests_and_modules_are_those_of_the_repository() -> None:
    names = set(CODE.findall(PAPERS.read_text()))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert {name for name in names if name.startswith("test_")} - defined == set()
    modules = {name for name in names if re.fullmatch(r"(planner|benchmarks|tests)/[\w/]+(\.py)?", name)}
    assert {name for name in modules if not (ROOT / name).exists()} == set()
