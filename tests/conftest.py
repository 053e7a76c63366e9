"""What all tests share: a small model, no terminal, and a log as it is at first."""

import gc
import logging
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.server import log
from cohabit.server.observe.settings import LogSettings
from tests.support.measuring import short_measurements
from tests.support.runtime import models

RUNTIME = Path(__file__).parent / "runtime"
FOLDERS_OF_PROCESSES = ("e2e", "hostile", "transport")
"""Folders whose tests start servers. In the others, files with such tests are marked `process`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-cases", action="store_true", help="run the first case of each test only")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("first_cases"):
        items[:] = {item.nodeid.partition("[")[0]: item for item in reversed(items)}.values()
        items.reverse()
    folders = [Path(__file__).parent / name for name in FOLDERS_OF_PROCESSES]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker(pytest.mark.process)


def pytest_collection_finish() -> None:
    """Let no later garbage collection visit what the imports of all tests have made: a second's work each time.

    Torch makes hundreds of thousands of objects while it exports and lowers, and most of them stay for a while.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(scope="module", autouse=True)
def _short_measurements(request: pytest.FixtureRequest) -> Iterator[None]:
    """How exact profiles are is the subject of the runtime's tests alone."""
    with nullcontext() if request.path.is_relative_to(RUNTIME) else short_measurements():
        yield


@pytest.fixture(autouse=True)
def _usual_log() -> Iterator[None]:
    """Filters stay on the handlers that tests listen with; a command that a test runs puts its own in their place."""
    log.apply(LogSettings())
    handlers = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = handlers


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed does not depend on the width of the terminal that runs the tests."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share, and that the next run does not see."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """A model at batch 2 whose layers' weights are segments of their own; each module's is its own."""
    folder = tmp_path_factory.mktemp("wide")
    models.export(models.Wide(), {"x": torch.zeros(3, 384)}, folder / "model.pt2")
    return lower(folder / "model.pt2", "wide", [2], folder / "cache")
