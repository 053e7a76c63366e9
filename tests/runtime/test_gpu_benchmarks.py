"""The GPU benchmarks run from end to end on the fake device, so that a lent GPU's minutes go into measuring."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from benchmarks.gpu import cold, common, copies, figure8, memory, resnet, run, steps, table2, training
from benchmarks.gpu.steps import Step
from benchmarks.training_nets import Net, WideResNet
from cohabit.planner.sizing.problem import LayoutName
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link, measure
from cohabit.runtime.options import DEFAULTS
from tests.support.runtime.cuda_fake import FakeDriver, pinned_array

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small network, a fake device, few repetitions, results in a folder of the test's."""
    monkeypatch.setattr(resnet, "BLOCKS", (1, 1, 1, 1))
    monkeypatch.setattr(resnet, "WIDTH", 32)
    monkeypatch.setattr(resnet, "INPUT", (3, 32, 32))
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(common, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(common, "PLAN_S", 0.1)
    monkeypatch.setattr(common, "RUNS", 2)
    monkeypatch.setattr(common, "WARM_UP", 1)
    monkeypatch.setattr(cold, "RUNS", 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a fake")
    monkeypatch.setattr(table2, "eager_s", lambda *_: 0.5)
    for module in (common, copies):
        monkeypatch.setattr(module, "pinned_by_torch", pinned_by_fake)
    for module in (table2, copies, memory, figure8, cold):
        monkeypatch.setattr(module, "open_gpu", lambda: CudaBackend(FakeDriver(total_bytes=8 << 30)))


def pinned_by_fake(backend: CudaBackend, nbytes: int) -> torch.Tensor:
    assert isinstance(backend.driver, FakeDriver)
    return torch.from_numpy(pinned_array(backend.driver, nbytes))


def measured(step: Step[Any], cell: str, output: Path) -> str:
    """Measure a cell in this process, and return the Markdown of all rows so far."""
    assert steps.main(step, ["--here", "--output", str(output), "--cells", cell]) == 0
    lines = [json.loads(line) for line in steps.rows_path(step, output).read_bytes().splitlines()]
    rows = [msgspec.convert(line["row"], step.row) for line in lines if "row" in line]
    assert lines[0]["device"].startswith("a fake, CUDA")
    return "\n".join(step.sections(rows, [line["note"] for line in lines if "note" in line]))


@slow
def test_table_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table2, "BUDGETS_MB", {1: (0, 8, 9)})
    monkeypatch.setattr(table2, "SETTINGS", (("exact", DEFAULTS, (1,)),))
    (cell,) = table2.cells()
    written = measured(table2.STEP, cell, tmp_path)
    assert "exact, batch 1, 8 MB |" in written
    assert "exact, batch 1, 9 MB |" in written
    assert "exact, batch 1, 0 MB: resnet152" in written, "a budget that is too small is a note"
    assert "- *exact*: float32 without TF32, NCHW, convolutions not fused" in written
    assert re.search(r"8 MB \| 500\.00 \| 500\.00 \| .* \| 0\.\d\dx \|", written), "beside eager PyTorch"


@slow
def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "INFERENCES", 3)
    monkeypatch.setattr(memory, "SHARES", (0.9,))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 8 << 30))
    assert "| 90% |" in measured(memory.STEP, "90%", tmp_path)


@slow
def test_figure_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure8, "MODELS", 2)
    monkeypatch.setattr(figure8, "SHARES", (0.9,))
    monkeypatch.setattr(figure8, "LOADS", (0.2,))
    monkeypatch.setattr(figure8, "POINT_S", 0.1)
    monkeypatch.setattr(figure8, "WARM_UP_ROUNDS", 1)
    for cell in figure8.cells():
        written = measured(figure8.STEP, cell, tmp_path)
    shown = (f"{layout}, {'100' if layout == 'resident' else '90'}%" for layout in get_args(LayoutName))
    for layout in shown:
        assert f"| {layout}, 20% |" in written
        assert f"| {layout}, saturation |" in written


@slow
def test_a_cold_model_beside_its_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for peer in ("_eager", "_graphed", "_two_buffers"):
        monkeypatch.setattr(cold, peer, lambda: 0.25)

    def absent() -> float:
        raise ImportError

    monkeypatch.setattr(cold, "_accelerate", absent)
    for cell in cold.cells():
        written = measured(cold.STEP, cell, tmp_path)
    assert "| cold: streamed while it runs |" in written
    assert "| eager PyTorch, resident | 250.00 |" in written
    assert "accelerate cpu_offload: the package is not installed here." in written


def test_training_in_little_memory_beside_torch_s_own_ways(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = Net(lambda: WideResNet(1, 1), lambda n: (torch.randn(n, 3, 16, 16), torch.randint(0, 10, (n,))), 4)
    monkeypatch.setattr(training, "NETS_OF_A_GPU", {"tiny": tiny})
    monkeypatch.setattr(training, "DEVICE", "cpu")
    monkeypatch.setattr(training, "STEPS", 1)
    monkeypatch.setattr(training, "WARM_UP", 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10 * MIB)
    for cell in training.cells():
        written = measured(training.STEP, cell, tmp_path)
    assert "| tiny, eager | " in written
    assert "| tiny, checkpoint per block | " in written
    losses = re.findall(r"^\| tiny, .* \| ([\d., ]+) \|$", written, re.MULTILINE)
    assert len(losses) == 3
    assert losses[0] == losses[2], "the budget has eager's bits"


def test_copies_by_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(copies, "WHOLE_BYTES", MIB)
    monkeypatch.setattr(copies, "SIZES", (256 << 10, MIB))
    for cell in copies.cells():
        written = measured(copies.STEP, cell, tmp_path)
    assert "| to the device, 256 KiB | 4 |" in written
    assert "| to the host, 1024 KiB | 1 |" in written
    assert "| to the device, pin_memory=True, 1024 KiB | 1 |" in written


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
    assert '{"row":{"cell":"works"}}' in written, "and so are the rows"
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"gpu-fake_step.md", "data"}


def test_cells_that_hang_or_come_too_late_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(command: Sequence[str], *, timeout: float | None = None, **_: object) -> None:
        if timeout is None:
            raise FileNotFoundError("this machine has no git")
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(steps.subprocess, "run", hang)
    assert steps.main(cold.STEP, ["--output", str(tmp_path), "--cells", "ours"]) == 1
    written = (tmp_path / "gpu-cold.md").read_text()
    assert "commit unknown" in written
    assert "ours: ended after 110 s" in written
    assert steps.main(cold.STEP, ["--output", str(tmp_path), "--cells", "ours", "--seconds", "0"]) == 1
    assert "The time ran out: not measured are ours." in (tmp_path / "gpu-cold.md").read_text()


def test_the_files_with_gpu_tests_are_named(tmp_path: Path) -> None:
    """All of them, and none imports a package that only the server needs."""
    for package in ("tritonclient", "aiohttp", "grpc"):
        (tmp_path / f"{package}.py").write_text("raise ImportError('not on this machine')")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=", "-W", "default", "--continue-on-collection-errors", "tests/runtime"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}

    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert set(re.findall(r"^(tests/\S+): \d+$", done.stdout, re.MULTILINE)) == set(run.GPU_TESTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["table2"]) == run.NO_GPU
    assert "no GPU" in capsys.readouterr().err
