"""What the end-to-end tests share: models exported and lowered once, and a process left as it was."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from planner.profile import Link, Profile
from runtime.cpu import backend as cpu
from runtime.lowering.lower import Lowered
from tests.e2e.archives import Archives
from tests.e2e.stacks import Stacks


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archives]:
    root = tmp_path_factory.mktemp("e2e")
    yield Archives(root)
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Stacks:
    return Stacks(tmp_path_factory.mktemp("stacks"))


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of the servers that serve stacks."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def _fixed_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fixed")


@pytest.fixture
def fixed_plans(monkeypatch: pytest.MonkeyPatch, _fixed_cache: Path) -> Path:
    """The cache of servers whose plans are always the same: computing a layer takes as long as copying half a MiB."""
    measured = cpu.measure

    def as_if(lowered: Lowered, *others: Any, **options: Any) -> dict[int, Profile]:
        return {
            batch: structs.replace(
                profile,
                op_seconds=(100e-6,) * len(profile.op_seconds),
                swap_in=Link(5e-6, 5e9),
                compute_slowdown=1.0,
                swap_slowdown=1.0,
            )
            for batch, profile in measured(lowered, *others, **options).items()
        }

    monkeypatch.setattr(cpu, "measure", as_if)
    return _fixed_cache


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_was() -> Iterator[None]:
    """A server in this process sets torch's threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
