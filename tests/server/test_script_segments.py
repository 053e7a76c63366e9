"""Whether models run in stretches: what is asked for, what is told, and what is prepared for it alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from runtime.cpu.backend import CpuBackend
from server.config.config import ServeConfig
from server.config.sizes import FixedSize
from server.models.prepared import is_prepared, open_backend, prepare_in_worker, warn_without_segments
from server.models.repository import find
from server.models.worker_process import WorkerProcesses
from tests.runtime import models
from tests.server.test_operate_settings import NEEDED, config, file

DEFAULT = ServeConfig(Path("models"), FixedSize(1 << 30))


def is_scripted(config: ServeConfig) -> bool:
    backend = open_backend(replace(config, threads=torch.get_num_threads()))
    assert isinstance(backend, CpuBackend)
    backend.close()
    return backend.scripted


@pytest.mark.parametrize("layout", ["partitioned", "resident", "time_shared", "pipelined", "lru", "on_demand"])
def test_every_layout_of_the_cpu_runs_in_stretches_unless_told_otherwise(layout: str, tmp_path: Path) -> None:
    assert is_scripted(config(*NEEDED, "--layout", layout))
    assert is_scripted(config(*NEEDED, "--layout", layout, "--scripted"))
    for asked in (
        config(*NEEDED, "--layout", layout, "--no-scripted"),
        config(*NEEDED, "--layout", layout, environment={"COHABIT_SCRIPTED": "false"}),
        config(*NEEDED, "--layout", layout, "--config", file(tmp_path, "scripted = false\n")),
    ):
        assert not is_scripted(asked)


def test_the_default_asks_nothing_of_a_gpu() -> None:
    assert not config(*NEEDED, "--device", "cuda").wants_segments


@pytest.mark.usefixtures("torch_without_segments")
def test_a_torch_without_segments_is_told_of_once_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    assert not is_scripted(DEFAULT)
    warn_without_segments(DEFAULT)
    (record,) = [r for r in caplog.records if r.name == "cohabit.models"]
    assert record.message == "models run op by op, because this torch cannot run stretches"
    assert "_create_function_from_graph" in record.fields["reason"]  # type: ignore[attr-defined]
    warn_without_segments(replace(DEFAULT, scripted=False))
    assert len([r for r in caplog.records if r.name == "cohabit.models"]) == 1, "nobody asked for them"


def test_what_is_prepared_for_one_way_is_not_for_the_other(tmp_path: Path) -> None:
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, tmp_path / "wide" / "1" / "model.pt2")
    source = find(tmp_path / "wide")
    one = replace(DEFAULT, cache=tmp_path / "cache", batch_sizes=(1,), threads=torch.get_num_threads())
    workers, backend = WorkerProcesses(), open_backend(one)
    prepare_in_worker(source, one, backend, workers).store.close()
    backend.close()
    workers.close()
    assert is_prepared(source, one)
    assert is_prepared(source, replace(one, scripted=True)), "which the default is"
    assert not is_prepared(source, replace(one, scripted=False))
