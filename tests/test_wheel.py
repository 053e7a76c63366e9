"""The wheel holds one top-level name, and serves from a folder whose files have the names of ours and of libraries."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from tritonclient.http import InferInput
from tritonclient.http.aio import InferenceServerClient

from cohabit.loadgen.client import address_of
from cohabit.loadgen.server_process import running_server
from tests.support.runtime import models

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
CLASHING = ("cohabit", "server", "planner", "runtime", "loadgen", "tests", "numpy", "torch", "logging", "models")
START_S = 120.0
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
"""The environment without what may lead to a checkout."""
NOTHING_COMPILED = "NUMBA_CACHE_DIR=compiled"
"""A new folder: the server's first plans are interpreted, and a new installation compiles half a minute."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing of an earlier build is in it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("cohabit", "server", "planner", "runtime", "loadgen"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    build = [
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        "-w",
        source / "dist",
        source,
    ]
    subprocess.run([sys.executable, "-m", "pip", *map(str, build)], check=True, capture_output=True)
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that holds the wheel, and sees installed libraries by a path only."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = ["--python", python, "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel]
    subprocess.run([sys.executable, "-m", "pip", *map(str, install)], check=True, capture_output=True, env=OUTSIDE)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib"))
    return python.parent


@pytest.fixture
def clashing(tmp_path: Path) -> Path:
    """A folder in which every import of a clashing name ends the process that does it."""
    for name in CLASHING:
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was imported')")
    return tmp_path


def test_the_wheel_has_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {"cohabit", "cohabit-0.1.0.dist-info"}
    for package in ("server", "planner", "runtime", "loadgen"):
        modules = {f"cohabit/{path.relative_to(ROOT)}" for path in (ROOT / package).rglob("*.py")}
        assert modules <= set(names)
    assert "cohabit/page/page.html" in names
    assert "cohabit/server/http/openapi.json" in names


async def test_a_model_is_prepared_and_served_beside_clashing_names(commands: Path, clashing: Path) -> None:
    archive = clashing / "repository" / "wide" / "1" / "model.pt2"
    archive.parent.mkdir(parents=True)
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, archive)
    outside = ["env", "--unset=PYTHONPATH", f"--chdir={clashing}", NOTHING_COMPILED]
    serve = [f"{commands}/cohabit", "serve", "repository", "--memory", "64MiB", "--cache", "cache"]
    ports = [part for name in ("http", "grpc", "metrics") for part in (f"--{name}-port", "0")]
    async with (
        running_server([*outside, *serve, *ports], START_S) as url,
        InferenceServerClient(address_of(url)) as client,
    ):
        x = InferInput("x", [1, 384], "FP32")
        x.set_data_from_numpy(np.ones((1, 384), np.float32))
        result = await client.infer("wide", [x])
        assert np.isfinite(result.as_numpy("output")).all()


def test_loadgen_is_found_beside_clashing_names(commands: Path, clashing: Path) -> None:
    done = subprocess.run(
        [commands / "loadgen", "--help"], cwd=clashing, env=OUTSIDE, capture_output=True, text=True, check=True
    )
    assert "--rate" in done.stdout
