"""What tests of the runtime share: small models, lowered once, and one thread for fake devices."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cohabit.runtime.lowering import fusion
from cohabit.runtime.lowering.encoding import int8_layers
from cohabit.runtime.lowering.lower import Lowered
from tests.support.runtime import models


@pytest.fixture(scope="session")
def constructs(run_folder: Path) -> models.Constructs:
    return models.Constructs(run_folder / "constructs")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tests that run small ops: torch's threads would only be in one another's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _packed_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have linear layers take the form that does not depend on how fast this machine is."""
    monkeypatch.setattr(fusion, "fastest", lambda shape: "packed" if shape.packs else "plain")
    monkeypatch.setattr(int8_layers, "computes_in_int8", lambda shape: False)


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    """Five layers, at batches 1 and 2. A width of 264 is the least whose weights are segments of their own."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("narrow")
    return models.lowered(models.Wide(5, 264), {"x": torch.zeros(3, 264)}, folder, "wide", [1, 2])
