"""The tests marked `gpu`, a file at a time, the most wanted first."""

import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.gpu import steps
from benchmarks.record import markdown_table

FIRST = ("tests/runtime/test_budget_gpu.py", "tests/runtime/test_cuda_gpu.py")
_MARKED = re.compile(r"\bmark\.gpu\b|\bBACKENDS\b")
"""In files with such tests, of their own or on every backend."""
PLUGINS: list[object] = []
"""Of pytest. `make gpu-dry-run` has one."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    file: str
    passed: int
    failed: int
    seconds: float


class _Counted:
    """Counts tests by outcome. What fails while it is collected or set up counts, too."""

    passed = failed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.failed += report.failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.failed += report.failed


def cells() -> list[str]:
    found = [
        str(path) for path in sorted(Path("tests/runtime").glob("test_*.py")) if _MARKED.search(path.read_text())
    ]
    return list(dict.fromkeys((*FIRST, *found)))


def measure(cell: str) -> Iterator[Outcomes | str]:
    # A machine that was lent may lack plugins that the project's settings name, and its libraries may warn.
    options = ["-m", "gpu", "-q", "--durations=5", "-o", "addopts=-ra", "-W", "default", "-p", "no:cacheprovider"]
    counted, start_s = _Counted(), time.perf_counter()
    status = pytest.main([*options, cell], [counted, *PLUGINS])
    yield Outcomes(cell, counted.passed, counted.failed, time.perf_counter() - start_s)
    if status != pytest.ExitCode.OK:
        raise RuntimeError(f"{cell}: pytest ended with {status!r}")


def _sections(rows: Sequence[Outcomes], notes: Sequence[str]) -> list[str]:
    table = [[row.file, str(row.passed), str(row.failed), f"{row.seconds:.0f}"] for row in rows]
    return [markdown_table(("file", "passed", "failed", "s"), table), *(f"{note}\n" for note in notes)]


STEP = steps.Step("benchmarks.gpu.tests", "Tests on a GPU", Outcomes, cells, measure, _sections, cell_s=240.0)

if __name__ == "__main__":
    sys.exit(steps.main(STEP))
