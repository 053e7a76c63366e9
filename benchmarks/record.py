"""Writes result files: the command, the machine, the versions and the date, and the numbers as they came out."""

import argparse
import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent.parent / "docs" / "results"


def record(name: str, title: str, module: str, sections: Sequence[str], folder: Path | None = None) -> Path:
    """Write `NAME.md` to a folder, by default `docs/results`. `module` is what `python -m` was given.

    From a tree with changes, whose commit does not say what ran, the file goes to `.unrecorded` instead. Sections are
    Markdown.
    Absolute paths, which are one machine's, are shown by their last part.
    """
    path = (results_folder() if folder is None else folder) / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(
        ["python", "-m", module, *(Path(a).name if a.startswith("/") else a for a in sys.argv[1:])]
    )
    head = [f"# {title}", "", f"    {command}", "", f"{_date()}, commit {_commit()}. {_machine()}", ""]
    path.write_text("\n".join([*head, *sections]).rstrip() + "\n")
    return path


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


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, rule, *rows]) + "\n"


def table_of(rows: Sequence[Mapping[str, str]]) -> str:
    """A Markdown table of rows that are given as cells by heading: a heading stands beside its cell.

    Columns are in the first row's order; all rows have the same.
    """
    header = list(rows[0]) if rows else []
    return markdown_table(header, [[row[heading] for heading in header] for row in rows])


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
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].split(":", 1)[1].strip() if names else platform.machine()
    packages = ", ".join(f"{p} {_version(p)}" for p in ("torch", "numpy", "numba", "tritonclient"))
    return (
        f"{processor}, {len(os.sched_getaffinity(0))} virtual CPUs (shared with other machines), "
        f"Linux {platform.release()}, Python {platform.python_version()}, {packages}."
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
