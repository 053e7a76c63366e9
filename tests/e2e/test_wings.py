"""The server starts and serves without the folders of any wing: its core imports none of them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient

from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server
from cohabit.planner import parts
from tests.support.runtime import models

ROOT = Path(__file__).parents[2]
START_S = 120.0
FOLDERS = {wing: (wing,) for wing in parts.WINGS} | {"runtime.tiling": ("runtime.tiling", "planner.tiling")}
COMMANDS = {name for wing in parts.wings() for name in wing.get("cohabit.commands", {})}


def without(wings: Sequence[str], folder: Path) -> dict[str, str]:
    """Copy the package without some wings' folders. Returns environment variables with which it is imported."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "cohabit", folder / "cohabit", symlinks=False, ignore=ignored)
    for wing in wings:
        for name in FOLDERS[wing]:
            shutil.rmtree(folder / "cohabit" / name.replace(".", "/"))
    return {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1"}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository whose cache the first server fills."""
    folder = tmp_path_factory.mktemp("wings")
    archive = folder / "repository" / "wide" / "1" / "model.pt2"
    archive.parent.mkdir(parents=True)
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, archive)
    return folder / "repository"


@pytest.mark.parametrize(
    "wings",
    [parts.WINGS, *(pytest.param((wing,), marks=pytest.mark.slow) for wing in parts.WINGS)],
    ids=["all", *parts.WINGS],
)
async def test_the_server_serves_without(
    wings: Sequence[str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new folder of compiled code: first plans are interpreted, where a new copy would compile for half a minute.
    for name, value in (*without(wings, tmp_path).items(), ("NUMBA_CACHE_DIR", str(tmp_path / "compiled"))):
        monkeypatch.setenv(name, value)
    serve = [sys.executable, "-m", "cohabit.server.cli", "serve", str(repository), "--memory", "50%"]
    serve += ["--cache", str(repository.parent / "cache")]
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    async with running_server([*serve, *ports], START_S) as url, InferenceServerClient(address_of(url)) as client:
        x = InferInput("x", [1, 384], "FP32")
        x.set_data_from_numpy(np.ones((1, 384), np.float32))
        result = await client.infer("wide", [x])
        assert np.isfinite(result.as_numpy("output")).all()


def test_a_command_goes_with_its_wing(tmp_path: Path) -> None:
    environment = without(parts.WINGS, tmp_path)
    script = "from cohabit.server.cli import COMMANDS, __file__ as f; print(f, *COMMANDS.own)"
    shown = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    path, *names = shown.stdout.split()
    assert Path(path).is_relative_to(tmp_path), "the copy was imported"
    assert "serve" in names
    assert COMMANDS.isdisjoint(names)
