"""What tests of the runtime share: small models, lowered once, and one thread for fake devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cohabit.runtime.lowering.lower import Lowered, lower
from tests.runtime import models


class Constructs(dict[str, Lowered]):
    """The models of `models.CASES` at batches 2 and 4, each lowered when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __missing__(self, name: str) -> Lowered:
        archive = self._folder / name / "model.pt2"
        models.export(models.made(name), models.CASES[name][1], archive)
        self[name] = lower(archive, name, [2, 4], self._folder / "cache")
        return self[name]


@pytest.fixture(scope="session")
def constructs(tmp_path_factory: pytest.TempPathFactory) -> Constructs:
    return Constructs(tmp_path_factory.mktemp("constructs"))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Where a fake device executes: torch's threads would only be in one another's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
