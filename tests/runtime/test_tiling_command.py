"""`cohabit tile`: shows the tiling of a program, and runs it."""

import re
from pathlib import Path

import pytest

from cohabit.planner.tiling import LazyArray, newarray
from cohabit.server.cli import main

pytestmark = pytest.mark.process

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "tiling_regression.py"


def test_the_example_is_tiled_and_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tile", f"{EXAMPLE}:program", "--workers", "2", "--run"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\bx +20000 x 32 +▤ +row", out)
    counted = next(line for line in out.splitlines() if line.startswith("run: "))
    assert "(640 bytes counted, 640 predicted)" in counted


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("missing.py:program", "there is no file 'missing.py'"),
        ("missing.py:x", "missing.py:x: there is no file"),  # :x: is no emoji
        (f"{EXAMPLE}:other", "defines no function 'other'"),
        (f"{__file__}:nothing", "must return arrays made from `newarray`, and returned 1"),
    ],
)
def test_a_program_that_cannot_be_tiled_is_refused(
    program: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tile", program]) == 2
    assert message in capsys.readouterr().err


def test_a_program_without_data_is_planned_and_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    program = f"{__file__}:planned_only"
    assert main(["tile", program, "--workers", "2"]) == 0
    assert main(["tile", program, "--workers", "2", "--run"]) == 2
    assert "array ratings has a shape and no data" in capsys.readouterr().err


def planned_only() -> LazyArray:
    return newarray((64, 8), name="ratings") * 2


def nothing() -> int:
    return 1
