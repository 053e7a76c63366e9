"""`make gpu-check`: the tests marked `gpu` and every GPU benchmark, piece by piece, the most wanted first.

A piece is a test file, or cells of a benchmark. Each takes two minutes at most and writes its results as they come, so
that a machine that is lent for minutes is used up to the last: `GPU_MINUTES=12` says how many there are. A later call
measures what is named again, and keeps the other rows. Exit status: 0 when everything ran and held, 1 when something
did not, 77 where torch sees no CUDA device.

Beside torch, the steps need numpy, scipy, numba and msgspec; the tests also pytest, hypothesis, psutil and rich, and
`loads` and `texts` all that a server needs, and transformers.
Packages that are missing can lie in `.wheels`, which `make gpu-check` adds to the path. Where numba refuses its
numpy, `COHABIT_INTERPRET=1` plans without it, slowly.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.gpu import figure8, table2, tests
from benchmarks.gpu.steps import LEAST_S, Step
from benchmarks.record import RESULTS

NO_GPU = 77
PIECE_S = 120.0
MINUTES = 60.0
STEPS: dict[str, Step] = {module.STEP.name: module.STEP for module in (tests, table2, figure8)}  # type: ignore[type-arg]
with suppress(ImportError):  # the machine lacks a server's packages
    from benchmarks.gpu import loads, texts

    STEPS |= {loads.STEP.name: loads.STEP, texts.STEP.name: texts.STEP}
FIRST: tuple[tuple[str, str], ...] = (
    *((tests.STEP.name, path) for path in tests.FIRST),
    ("loads", "50 %"),
    *((figure8.STEP.name, cell) for cell in ("resident, memory 100%", "partitioned in int8, memory 25%")),
    *((figure8.STEP.name, f"partitioned{stored}, memory 50%") for stored in (" in int8", "")),
    (figure8.STEP.name, "partitioned, memory 25%"),
    ("texts", "150MiB"),
    (table2.STEP.name, table2.cells()[0]),
)
"""Steps and cells that come before all others."""


def pieces(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield steps and cells, the most wanted first."""
    rest = ((name, cell) for name, step in STEPS.items() for cell in step.cells())
    yield from dict.fromkeys(piece for piece in (*FIRST, *rest) if piece[0] in names)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)} (default: all)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of results (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="time for all (default: %(default)s)")
    options = parser.parse_args(argv)
    if unknown := set(options.steps) - set(STEPS):
        parser.error(f"no steps: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        print(
            f"no GPU: torch {torch.__version__} sees no CUDA device; nothing was tested or measured",
            file=sys.stderr,
        )
        return NO_GPU
    end_s, failed = time.monotonic() + 60 * options.minutes, list[str]()
    for name, cell in pieces(options.steps or list(STEPS)):
        seconds = min(PIECE_S, end_s - time.monotonic())
        if seconds < LEAST_S or _run(name, cell, options.output, seconds) != 0:
            failed.append(f"{name}: {cell}")
    print(f"did not hold: {'; '.join(failed)}" if failed else "everything held", file=sys.stderr)
    return 1 if failed else 0


def _run(name: str, cell: str, output: Path, seconds: float) -> int:
    """Measure a cell in a process of its own, and return its exit status. Whatever happens to it, the next ones run."""
    print(f"== {name}: {cell}", flush=True)
    command = ["-m", STEPS[name].module, "--output", str(output), "--seconds", str(seconds), "--cells", cell]
    return subprocess.run([sys.executable, *command], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
