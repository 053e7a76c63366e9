"""Results: tables of rows, which are written as data, and the page that shows them.

`docs/results/data/NAME.json` has every table of a benchmark with the command, the commit, the date and the machine;
headings have the units. `docs/results/NAME.md` shows the tables that a reader needs. `python -m benchmarks.record`
lists the records by age.
"""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

RESULTS = Path(__file__).parent.parent / "docs" / "results"


class TableData(msgspec.Struct):
    """A table's cells, the heading of its section, and the last paragraph before it."""

    section: str
    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class ResultData(msgspec.Struct):
    """What one run of a benchmark found."""

    title: str
    command: str
    date: str
    commit: str
    machine: str
    tables: list[TableData]


class Table(str):
    """A Markdown table that keeps its cells."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    shown: bool
    """Whether the page has it, too."""


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, shown: bool = True) -> Table:
    """Return a table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    lines = [f"| {' | '.join(row)} |" for row in [header, rule, *rows]]
    table = Table("\n".join(lines) + "\n")
    table.header, table.rows, table.shown = header, rows, shown
    return table


def table_of(rows: Sequence[Mapping[str, str]], *, shown: bool = True) -> Table:
    """Return a table of rows that are given as cells by heading.

    Columns are in the first row's order; all rows have the same.
    """
    header = list(rows[0]) if rows else []
    return markdown_table(header, [[row[heading] for heading in header] for row in rows], shown=shown)


def record(name: str, title: str, module: str, sections: Sequence[str], folder: Path | None = None) -> Path:
    """Write `NAME.md` and `data/NAME.json` to a folder, by default `docs/results`; returns the page's path.

    `module` is what `python -m` was given. Sections are Markdown; each table is one. From a tree with changes, whose
    commit does not say what ran, the files go to `.unrecorded` instead. Absolute paths, which are one machine's, are
    shown by their last part.
    """
    path = (results_folder() if folder is None else folder) / f"{name}.md"
    data = path.parent / "data" / f"{name}.json"
    data.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(
        ["python", "-m", module, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
    )
    found = ResultData(title, command, _date(), _commit(), _machine(), list(_tables(title, sections)))
    data.write_bytes(msgspec.json.encode(found).replace(b'],["', b'],\n["') + b"\n")  # a line per row
    machine = f"{_processor()}, {_processors()} virtual CPUs, torch {_version('torch')}."
    head = [f"# {title}", "", f"    {command}", "", f"{found.date}, commit {found.commit}. {machine}", ""]
    shown = _shown(sections)
    if any(isinstance(section, Table) and not section.shown for section in sections):
        shown.append(f"More rows are in [data/{name}.json](data/{name}.json).\n")
    path.write_text("\n".join([*head, *shown]).rstrip() + "\n")
    return path


def _shown(sections: Sequence[str]) -> list[str]:
    """Return the page's sections: without hidden tables, and without the captions and headings of nothing else."""
    shown = list[str]()
    before_hidden = below_heading = False
    """Whether a hidden table follows; whether anything is shown between here and the next heading."""
    for section in reversed(sections):
        is_heading = section.startswith("#") and "\n" not in section.strip()
        is_caption = section.rstrip().endswith(":")
        if isinstance(section, Table) and not section.shown:
            before_hidden = True
        elif before_hidden and (is_caption or (is_heading and not below_heading)):
            below_heading = below_heading and not is_heading
        else:
            shown.append(section)
            before_hidden, below_heading = False, not section.startswith("#")
    return shown[::-1]


def _tables(title: str, sections: Sequence[str]) -> Iterator[TableData]:
    heading, about = title, ""
    for section in sections:
        if isinstance(section, Table):
            yield TableData(heading, about, section.header, section.rows)
            continue
        for paragraph in section.strip().split("\n\n"):
            if paragraph.startswith("## "):
                heading = paragraph.removeprefix("## ")
            else:
                about = paragraph.replace("\n", " ")


def results_folder() -> Path:
    """Return `docs/results`, or `.unrecorded` if the tree has changes of anything else."""
    if not (changed := _changes()):
        return RESULTS
    print(f"not recorded in {RESULTS}, because the tree has changes:\n{changed}", file=sys.stderr)
    return RESULTS.parent.parent / ".unrecorded"


def parser_of(module: str, about: str | None, *, has_folder: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the arguments that benchmarks have in common, for `publish`.

    `module` is what `python -m` is given. The result file has its name, with dashes; a benchmark with several result
    files adds an option `--record-as`. `--folder` is for models on disk.
    """
    name = module.removeprefix("benchmarks.").replace(".", "-").replace("_", "-")
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.set_defaults(module=module, record_as=name)
    parser.add_argument("--record", action="store_true", help="write the result file below docs/results, too")
    if has_folder:
        parser.add_argument(
            "--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)"
        )
    return parser


def publish(options: argparse.Namespace, title: str, sections: Sequence[str]) -> Path | None:
    """Print a benchmark's sections and, with `--record`, write its result file. Returns the file's path.

    `options` are those of `parser_of`'s parser. Sections are Markdown.
    """
    print("\n".join(sections))
    if not options.record:
        return None
    path = record(options.record_as, title, options.module, sections)
    print(f"wrote {path}")
    return path


def work_of_two() -> float:
    """How much work two busy processes do at once, over what one does: 2 on two cores, little more than 1 on one's two
    threads."""
    alone, together = _loops(1), _loops(2)
    return together / alone


def _loops(processes: int) -> int:
    """Matrix products in a second, of so many processes at once, on one thread each."""
    command = [sys.executable, "-c", _TURNS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(processes)]
    return sum(int(one.communicate()[0]) for one in running)


_TURNS = """
import time, numpy
a = numpy.ones((256, 256), numpy.float32)
def turns(seconds):
    end, count = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        a @ a
        count += 1
    return count
turns(0.5)
print(turns(1.0))
"""


def ages() -> Table:
    """Return the records, the oldest first, with the commits since."""
    rows = []
    for path in sorted((RESULTS / "data").glob("*.json")):
        found = msgspec.json.decode(path.read_bytes(), type=ResultData)
        since = _git("rev-list", "--count", f"{found.commit.removesuffix('-dirty')}..HEAD")
        rows.append([path.stem, found.date, found.commit, since or "unknown"])
    return markdown_table(["record", "date", "commit", "commits since"], sorted(rows, key=lambda row: row[1]))


def _date() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")


def _commit() -> str:
    commit = _git("describe", "--always") or "unknown"
    return f"{commit}-dirty" if _changes() else commit


def _changes() -> str:
    """Return the changed files of the tree but for results."""
    return _git("status", "--porcelain", "--", ":/", ":(exclude,top)docs/results")


def _git(*arguments: str) -> str:
    """Return what git prints; empty without git, or outside of a repository."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=RESULTS.parent)
    except OSError:
        return ""
    return done.stdout.strip()


def _machine() -> str:
    packages = ", ".join(f"{p} {_version(p)}" for p in ("torch", "numpy", "numba", "tritonclient"))
    return (
        f"{_processor()}, {_processors()} virtual CPUs (shared with other machines), Linux {platform.release()},"
        f" Python {platform.python_version()}, {packages}."
    )


def _processor() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.machine()


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    print(ages())
