"""What the server's tests share: one server with the standard fakes, and runs of `cohabit import`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.cli import main
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from tests.support.server.clients import PROTOCOLS, Client, connect
from tests.support.server.server_fakes import FakeLoaded, Running, running, serving, standard_models


@pytest.fixture(scope="session")
def loaded() -> FakeLoaded:
    loaded = serving(*standard_models())
    loaded.failures = {ModelKey("damaged", 1): "model.pt2 is truncated"}
    predicted_s, bound_s = {Bucket(1): 0.5, Bucket(2): 0.75}, {Bucket(1): 0.5, Bucket(2): 0.6}
    loaded.footprints = {
        ModelKey("adder", 3): ModelFootprint(
            100,
            400,
            80,
            predicted_s,
            bound_s,
            activation_bytes={Bucket(1): 64, Bucket(2): 128},
            searches={Bucket(1): ("best (genetic)", 238), Bucket(2): ("best (genetic)", 142)},
            noise=0.5,
        )
    }
    return loaded


@pytest.fixture(scope="session")
def server(loaded: FakeLoaded) -> Iterator[Running]:
    with running(loaded, max_body_bytes=1 << 20, strict_readiness=False) as handle:
        yield handle


@pytest.fixture(params=PROTOCOLS)
def client(own: Running, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of the test file's own server, over each protocol."""
    client = connect(own, request.param)
    with client.raw:
        yield client


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs `cohabit import`, which must fail; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 1) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) == status
        assert list(Path("models").rglob("*")) == []
        said = capsys.readouterr().err.splitlines()[-1]
        assert len(said) < 700
        return said.removeprefix("cohabit: ")

    return run


@pytest.fixture
def refused_here(capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that runs `cohabit import`, which must fail, in the folder of another; returns what it says."""

    def run(*arguments: str) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) in (1, 2)
        return capsys.readouterr().err.splitlines()[-1]

    return run


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs an import in a folder of its own, which must succeed; returns what it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main(["import", *arguments, "--cache", "cache", "--max-batch", "2"]) == 0
        return capsys.readouterr().out

    return run
