"""`cohabit profile` as a user meets it."""

from pathlib import Path

import pytest
import torch

from cohabit.server.cli import main
from tests.support.runtime import models

pytestmark = pytest.mark.process


def test_profile_shows_a_model_s_times_and_the_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "wide" / "1" / "model.pt2"
    models.export(models.Wide(2, 264), {"x": torch.zeros(3, 264)}, path)
    assert (
        main(["profile", str(path), "--batch-sizes", "1,2", "--threads", "1", "--cache", str(tmp_path / "cache")])
        == 0
    )
    shown = capsys.readouterr().out
    assert "GB/s after" in shown
    assert "slowest ops at batch 1" in shown
    assert "linear" in shown


def test_a_device_that_is_not_there_is_an_error_that_says_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wide" / "1" / "model.pt2"
    models.export(models.Wide(1, 8), {"x": torch.zeros(3, 8)}, path)
    for device, reason in (("tpu", "devices are cpu, cuda, and cuda:N"), ("cuda:99", "there is no CUDA device 99")):
        assert main(["profile", str(path), "--device", device, "--cache", str(tmp_path / "cache")]) == 1
        assert reason in capsys.readouterr().err
