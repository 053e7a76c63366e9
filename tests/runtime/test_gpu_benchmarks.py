"""The GPU benchmarks run from end to end on the fake device, so that a lent GPU's minutes go into measuring."""

from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks import record
from benchmarks.gpu import cold, common, figure8, memory, resnet, run, table2
from planner.sizing.deployment import LayoutName
from runtime.cuda.backend import CudaBackend
from runtime.cuda.profiling import link, measure
from runtime.options import DEFAULTS
from tests.runtime.cuda_fake import FakeDriver

MIB = 1 << 20
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small network, a fake device, few repetitions, results in a folder of the test's."""
    monkeypatch.setattr(resnet, "BLOCKS", (1, 1, 1, 1))
    monkeypatch.setattr(resnet, "WIDTH", 16)
    monkeypatch.setattr(resnet, "INPUT", (3, 32, 32))
    monkeypatch.setattr(measure, "_AMPLE_BYTES", 32 * MIB)
    monkeypatch.setattr(measure, "_ROUNDS", 1)
    monkeypatch.setattr(link, "_COPY_BYTES", 64 << 10)
    monkeypatch.setattr(common, "FOLDER", tmp_path / "gpu")
    monkeypatch.setattr(common, "PLAN_S", 0.1)
    monkeypatch.setattr(common, "RUNS", 2)
    monkeypatch.setattr(common, "WARM_UP", 1)
    monkeypatch.setattr(cold, "RUNS", 2)
    monkeypatch.setattr(record, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a fake")
    for module in (table2, memory, figure8, cold):
        monkeypatch.setattr(module, "open_gpu", lambda: CudaBackend(FakeDriver(total_bytes=8 << 30)))


def results(tmp_path: Path, name: str) -> str:
    return (tmp_path / "results" / f"{name}.md").read_text()


@slow
def test_table_2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(table2, "BUDGETS_MB", {1: (0, 3, 4)})
    monkeypatch.setattr(table2, "PRECISIONS", (("float32", DEFAULTS, (1,)),))
    assert table2.main([], seconds=900.0) == 0
    written = results(tmp_path, "gpu-table2")
    assert "float32, batch 1, 3 MB |" in written
    assert "float32, batch 1, 4 MB |" in written
    assert "float32, batch 1, 0 MB: resnet152" in written, "a budget that is too small is a note"


@slow
def test_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "INFERENCES", 3)
    monkeypatch.setattr(memory, "SHARES", (0.9,))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (8 << 30, 8 << 30))
    assert memory.main([], seconds=900.0) == 0
    assert "| 90% |" in results(tmp_path, "gpu-memory")


@slow
def test_figure_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figure8, "MODELS", 2)
    monkeypatch.setattr(figure8, "SHARES", (0.9,))
    monkeypatch.setattr(figure8, "RATES", (20,))
    monkeypatch.setattr(figure8, "POINT_S", 0.1)
    monkeypatch.setattr(figure8, "WARM_UP_ROUNDS", 1)
    assert figure8.main([], seconds=900.0) == 0
    written = results(tmp_path, "gpu-figure8")
    cells = (f"{layout}, {'100' if layout == 'resident' else '90'}%" for layout in get_args(LayoutName))
    for layout in cells:
        assert f"| {layout}, 20 |" in written
        assert f"| {layout}, saturation |" in written


@slow
def test_a_cold_model_beside_its_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for peer in ("_eager", "_graphed", "_two_buffers"):
        monkeypatch.setattr(cold, peer, lambda: 0.25)

    def absent() -> float:
        raise ImportError

    monkeypatch.setattr(cold, "_accelerate", absent)
    assert cold.main([], seconds=900.0) == 0
    written = results(tmp_path, "gpu-cold")
    assert "| cold: streamed while it runs |" in written
    assert "accelerate cpu_offload: the package is not installed here." in written


def test_what_was_measured_before_the_time_ran_out_is_recorded(tmp_path: Path) -> None:
    assert table2.main([], seconds=0.0) == 1
    assert "The time ran out" in results(tmp_path, "gpu-table2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main([]) == run.NO_GPU
    assert "no GPU" in capsys.readouterr().err
