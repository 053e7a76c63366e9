"""The steps of `make gpu-check`: a cell that fails costs itself only, and what was not measured is named."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import run, steps, table2

ROOT = Path(__file__).parents[2]
FAKE_STEP = """
import ctypes, sys
from benchmarks.gpu import steps
import torch
torch.cuda.get_device_name = lambda: "a fake"

class Row(steps.msgspec.Struct):
    cell: str

def measure(cell):
    yield Row(cell)
    if cell == "crashes":
        ctypes.string_at(0)
    yield f"{cell} is through"

def sections(rows, notes):
    return ["rows: " + ", ".join(r.cell for r in rows), *notes]

STEP = steps.Step(__spec__.name, "A step", Row, lambda: ["crashes", "works"], measure, sections, cell_s=500.0)
if __name__ == "__main__":
    sys.exit(steps.main(STEP))
"""


@pytest.mark.long
def test_a_cell_that_crashes_costs_itself_only(tmp_path: Path) -> None:
    (tmp_path / "fake_step.py").write_text(FAKE_STEP)
    command = [sys.executable, "-m", "fake_step", "--output", str(tmp_path / "results")]
    given = os.environ.get("PYTHONPATH", "")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{given}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    written = (tmp_path / "results" / "gpu-fake_step.md").read_text()
    assert "a fake, CUDA" in written
    assert "rows: crashes, works" in written
    assert "works is through" in written
    assert "crashes: ended with status -11: " in written
    assert "Segmentation fault" in written, "the log is packed in"
    rows = tmp_path / "results" / "data" / "gpu-fake_step.jsonl"
    assert '{"cell":"works","row":{"cell":"works"}}' in rows.read_text()
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"gpu-fake_step.md", "data"}


def test_cells_that_hang_or_come_too_late_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(command: Sequence[str], *, timeout: float | None = None, **_: object) -> None:
        if timeout is None:
            raise FileNotFoundError("this machine has no git")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(steps.subprocess, "run", hang)
    cell = table2.cells()[0]
    assert steps.main(table2.STEP, ["--output", str(tmp_path), "--cells", cell]) == 1
    written = (tmp_path / "gpu-table2.md").read_text()
    assert "commit unknown" in written
    assert f"{cell}: ended after 150 s" in written
    assert steps.main(table2.STEP, ["--output", str(tmp_path), "--cells", cell, "--seconds", "0"]) == 1
    assert f"The time ran out: not measured are {cell}." in (tmp_path / "gpu-table2.md").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["table2"]) == run.NO_GPU
    assert "no GPU" in capsys.readouterr().err


def test_rows_of_what_is_measured_again_are_replaced_and_others_are_kept(tmp_path: Path) -> None:
    path, new = tmp_path / "rows", tmp_path / "new"
    for cell, figures in (("a", "12"), ("b", "3"), ("a", "4"), ("b", "")):
        lines = [f'{{"cell":"{cell}","device":"a GPU"}}\n']
        lines += [f'{{"cell":"{cell}","row":{{"figure":{figure}}}}}\n' for figure in figures]
        new.write_text("".join(lines))
        assert steps.merge(path, cell, new) == len(figures)
    assert [line for line in path.read_text().splitlines() if "row" in line] == [
        '{"cell":"b","row":{"figure":3}}',
        '{"cell":"a","row":{"figure":4}}',
    ]


def test_pieces_come_most_wanted_first_and_once() -> None:
    found = list(run.pieces(list(run.STEPS)))
    assert tuple(found[: len(run.FIRST)]) == run.FIRST
    assert len(found) == len(set(found)) == sum(len(step.cells()) for step in run.STEPS.values())
    assert {name for name, _ in run.pieces(["table2"])} == {"table2"}
    assert all(cell in run.STEPS[name].cells() for name, cell in found)
