"""A step of `make gpu-check`: cells that are measured in a process each, and one results file.

A cell that crashes, hangs or takes too long costs itself only. Its rows are written to `gpu-STEP.new` as they come, and
what the processes print to `gpu-STEP.log`. After every cell, its rows replace those of earlier runs in
`data/gpu-STEP.jsonl`, and `gpu-STEP.md` is rewritten from all.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import torch

from benchmarks.record import RESULTS, record

Row = TypeVar("Row")
STEP_S = 530.0
"""What a step may take by default."""
MOST_LOG_BYTES = 64 << 10
"""So much of a log's end is kept in the results."""
LEAST_S = 5.0
"""With less time left, no cell is begun."""
_LAST_LINES = 3


@dataclass(frozen=True)
class Step(Generic[Row]):
    """What is measured, cell by cell, and how it is told."""

    module: str
    """Which `python -m` runs; its last part names the results."""
    title: str
    row: type[Row]
    """A dataclass or Struct of plain values."""
    cells: Callable[[], Sequence[str]]
    measure: Callable[[str], Iterator[Row | str]]
    """Yields the rows of a cell, and notes, as they are known."""
    sections: Callable[[Sequence[Row], Sequence[str]], list[str]]
    """Markdown of rows and notes."""
    cell_s: float
    """What a cell may take."""

    @property
    def name(self) -> str:
        return self.module.rpartition(".")[2]


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the rows' file; each has one of the last three."""

    cell: str
    device: str | None = None
    row: Any = None
    note: str | None = None


def main(step: Step[Any], argv: Sequence[str] | None = None) -> int:
    """Measure all cells, or one of them in this process. Exit status 0 if there is a row, and no cell failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {step.module}", description=step.title)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=STEP_S, help="time for all cells (default: %(default)s)")
    parser.add_argument("--cells", nargs="+", default=step.cells(), help="cells to measure (default: all)")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    options = parser.parse_args(argv)
    if options.here:
        for cell in options.cells:
            _measure_here(step, cell, options.output)
        return 0
    return _run(step, options.cells, options.output, time.monotonic() + options.seconds)


def rows_path(step: Step[Any], output: Path) -> Path:
    """Where the rows of all runs are."""
    return output / "data" / f"gpu-{step.name}.jsonl"


def new_path(step: Step[Any], output: Path) -> Path:
    return output / f"gpu-{step.name}.new"


def _measure_here(step: Step[Any], cell: str, output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    libraries = f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}"
    device = f"{torch.cuda.get_device_name()}, {libraries}, {time.strftime('%Y-%m-%d', time.gmtime())}"
    with new_path(step, output).open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(_Line(cell, device=device)) + b"\n")
        for found in step.measure(cell):
            line = _Line(cell, note=found) if isinstance(found, str) else _Line(cell, row=found)
            file.write(msgspec.json.encode(line) + b"\n")
            print(found, flush=True)


def _run(step: Step[Any], cells: Sequence[str], output: Path, end_s: float) -> int:
    path, new, log = rows_path(step, output), new_path(step, output), output / f"gpu-{step.name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    failures: list[str] = []
    measured = 0
    for number, cell in enumerate(cells):
        left_s = end_s - time.monotonic()
        if left_s < LEAST_S:
            failures.append(f"The time ran out: not measured are {', '.join(cells[number:])}.")
        else:
            new.unlink(missing_ok=True)
            print(f"== {cell}: at most {min(step.cell_s, left_s):.0f} s", flush=True)
            failure = _in_process(step, cell, output, log, min(step.cell_s, left_s))
            failures += [] if failure is None else [f"{cell}: {failure}"]
            measured += merge(path, cell, new)
        lines = [msgspec.json.decode(line, type=_Line) for line in _lines(path)]
        rows = [msgspec.convert(line.row, step.row) for line in lines if line.row is not None]
        notes = [line.note for line in lines if line.note is not None] + failures
        devices = dict.fromkeys(line.device for line in lines if line.device is not None)
        sections = [*(f"{device}.\n" for device in devices), *step.sections(rows, notes)]
        sections += [with_log(log)]
        record(f"gpu-{step.name}", step.title, step.module, sections, output)
        if left_s < LEAST_S:
            break
    new.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    print((output / f"gpu-{step.name}.md").read_text())
    return 0 if measured and not failures else 1


def merge(path: Path, cell: str, new: Path) -> int:
    """Replace the lines of a cell by new ones, if these have rows. Returns the number of new rows."""
    found = _lines(new)
    rows = sum(msgspec.json.decode(line, type=_Line).row is not None for line in found)
    if rows:
        kept = [line for line in _lines(path) if msgspec.json.decode(line, type=_Line).cell != cell]
        whole = path.with_suffix(".whole")
        whole.write_bytes(b"".join(line + b"\n" for line in [*kept, *found]))
        whole.replace(path)
    return rows


def with_log(log: Path) -> str:
    """The end of what was printed, as a section of a results file."""
    raw = log.read_bytes()[-MOST_LOG_BYTES:] if log.exists() else b""
    return f"## Log\n\n```text\n{raw.decode(errors='replace').strip()}\n```\n"


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def _in_process(step: Step[Any], cell: str, output: Path, log: Path, seconds: float) -> str | None:
    """Measure a cell in a process of its own; return what went wrong."""
    command = [sys.executable, "-X", "faulthandler", "-m", step.module]
    command += ["--here", "--output", str(output), "--cells", cell]
    with log.open("ab", buffering=0) as file:
        file.write(f"== {cell}\n".encode())
        begin = file.tell()
        try:
            status = subprocess.run(command, stdout=file, stderr=file, timeout=seconds, check=False).returncode
        except subprocess.TimeoutExpired:
            return f"ended after {seconds:.0f} s"
    if status == 0:
        return None
    said = log.read_bytes()[begin:].decode(errors="replace").split("\n")
    return f"ended with status {status}: {' / '.join([line for line in said if line.strip()][-_LAST_LINES:])}"
