"""The GPU benchmarks run from end to end on the fake device, so that a lent GPU's minutes go into measuring."""

import inspect
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
from torch import nn

from benchmarks.gpu import cold, common, copies, figure8, memory, resnet, run, steps, table2, texts, training
from benchmarks.gpu.steps import Step
from benchmarks.training_nets import Net, WideResNet
from cohabit.planner.sizing.problem import LayoutName
from cohabit.runtime.cuda.backend import CudaBackend
from cohabit.runtime.cuda.profiling import link, measure
from cohabit.runtime.lowering import lower as lower_module
from cohabit.runtime.options import CUDA_DEFAULTS, DEFAULTS, Options
from tests.support.runtime import gpu_dry_run
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


def test_what_users_run_comes_first_and_every_setting_is_told() -> None:
    (name, options, _), *_ = table2.SETTINGS
    assert table2.cells()[0] == f"{name}, batch 1"
    assert options == CUDA_DEFAULTS == inspect.signature(common.resnet).parameters["options"].default
    told = [common.described(options) for _, options, _ in table2.SETTINGS]
    assert told == [
        "float32 TF32 in cuDNN alone, channels last, convolutions fused",
        "float32 without TF32, NCHW, convolutions not fused",
        "float32 TF32, channels last, convolutions fused",
        f"{told[0]}, weights stored and copied in int8",
        "float16, channels last, convolutions fused",
    ]
    for step in (figure8.STEP, memory.STEP, cold.STEP):
        assert told[0] in step.sections([], [])[0]


def test_eager_pytorch_computes_with_the_setting_it_stands_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, to = FakeDriver(), nn.Module.to
    models: list[nn.Module] = []
    monkeypatch.setattr(
        nn.Module, "to", lambda m, *args, **kwargs: to(m, *(a for a in args if a != "cuda"), **kwargs)
    )
    monkeypatch.setattr(common, "resnet152", lambda layout: models.append(resnet.resnet152(layout)) or models[-1])

    def run(run: Any, batch: int) -> float:
        assert run(torch.zeros(batch, *resnet.INPUT)).dtype is torch.float32
        assert (batch, driver.tf32_allowed) == (2, ["cudnn"])
        return 0.25

    monkeypatch.setattr(common, "seconds_of", run)
    given = CudaBackend(driver), 2, Options("float16", tf32="cudnn"), torch.channels_last
    assert common.eager_s(*given) == 0.25
    weights = [p for p in models[0].parameters() if p.dim() == 4]
    assert all(w.dtype is torch.float16 and w.is_contiguous(memory_format=torch.channels_last) for w in weights)


@slow
def test_a_setting_is_lowered_once_and_its_rows_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To lower ResNet-152, and to run it on a CPU at the largest batch, would take the device's minutes."""

    def compare(*_: object) -> None:
        raise AssertionError("rows are compared")

    monkeypatch.setattr(lower_module, "find_interaction", compare)
    monkeypatch.setattr(table2, "BUDGETS_MB", {1: (9,), 2: (9,)})
    monkeypatch.setattr(table2, "SETTINGS", (("exact", DEFAULTS, (1, 2)),))
    for cell in table2.cells():
        written = measured(table2.STEP, cell, tmp_path)
    assert "exact, batch 1, 9 MB |" in written
    assert "exact, batch 2, 9 MB |" in written
    assert len(list((tmp_path / "gpu" / "lowered").rglob("program-*.json"))) == 1


@slow
def test_table_2_has_rows_of_programs_that_could_not_be_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def uncapturable() -> CudaBackend:
        driver = FakeDriver(total_bytes=8 << 30)
        driver.uncapturable = "the test says so"
        return CudaBackend(driver)

    monkeypatch.setattr(table2, "open_gpu", uncapturable)
    monkeypatch.setattr(table2, "BUDGETS_MB", {1: (9,)})
    monkeypatch.setattr(table2, "SETTINGS", (("exact", DEFAULTS, (1,)),))
    (cell,) = table2.cells()
    assert "exact, batch 1, 9 MB |" in measured(table2.STEP, cell, tmp_path)


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


def test_the_plain_copy_is_that_of_the_faster_kind_of_pinned_memory() -> None:
    rows = [
        copies.Row("to the device", 4 * MIB, 64, 0.01),
        copies.Row("to the device", copies.WHOLE_BYTES, 1, 0.009),
        copies.Row(copies.BY_TORCH, copies.WHOLE_BYTES, 1, 0.008),
    ]
    written = "\n".join(copies.STEP.sections(rows, []))
    assert "| 80.0% |" in written
    assert "| 88.9% |" in written


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
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["gpu-fake_step.md"]


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


def test_a_file_that_cannot_be_imported_does_not_keep_the_other_tests_from_running(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine may lack a package that the server needs and the device does not."""
    folder = tmp_path / "tests" / "runtime"
    folder.mkdir(parents=True)
    (folder / "test_absent.py").write_text("import a_package_that_is_not_here")
    (folder / "test_device.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "GPU_TESTS", ("tests/runtime/test_absent.py", "tests/runtime/test_device.py"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.main(["tests", "--output", str(tmp_path)]) == 1
    assert "1 passed" in (tmp_path / "gpu-tests.md").read_text()
    assert not (tmp_path / "gpu-tests.log").exists()


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_not_a_success_of_make() -> None:
    command = ["make", "-C", str(ROOT), "gpu-check", "GPU_STEPS=copies", f"GPU_PYTHON={sys.executable}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode != 0
    assert "nothing was tested or measured" in done.stderr


@pytest.mark.parametrize("variables", [["OUT=/elsewhere"], ["OUT=/given", "GPU_OUTPUT=/elsewhere"]])
def test_results_go_to_the_folder_that_a_lent_machine_names(variables: list[str]) -> None:
    command = ["make", "-n", "-C", str(ROOT), "gpu-check", *variables]
    assert '--output "/elsewhere"' in subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_tests_that_take_longer_than_their_time_are_ended_and_leave_their_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang(command: Sequence[str], *, timeout: float | None = None, **options: Any) -> None:
        if timeout is None:
            raise FileNotFoundError("this machine has no git")
        options["stdout"].write(b"test_it PASSED")
        options["stdout"].flush()
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.subprocess, "run", hang)
    assert run.main(["tests", "--output", str(tmp_path), "--seconds", "20"]) == 1
    written = (tmp_path / "gpu-tests.md").read_text()
    assert "The tests took longer than 20 s." in written
    assert "test_it PASSED" in written


def test_the_dry_run_has_a_cell_of_every_step_and_leaves_out_tests_that_exist() -> None:
    needing_a_server = {texts.STEP.name}
    assert {step.name for step in gpu_dry_run.CELLS} == set(run.STEPS) - {run.TESTS} - needing_a_server
    written = (ROOT / "tests" / "runtime" / "test_cuda_gpu.py").read_text()
    assert all(f"def {name}(" in written for name in gpu_dry_run.NEED_A_DEVICE)


def test_an_unknown_step_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["tabel2"])
    assert (
        "no steps: tabel2; there are tests, table2, copies, figure8, memory, cold, texts, training"
        in capsys.readouterr().err
    )
