"""Weights in fewer bytes, served: the same bits at every budget, from both stores, and after the engine was killed."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.e2e.serving import infer, process
from tests.support.runtime import models

X = np.random.default_rng(0).standard_normal((1, 384)).astype(np.float32)


def born_in_16_bits() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.Wide().eval().to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    models.export(born_in_16_bits(), {"x": torch.zeros(3, 384)}, folder / "models" / "wide" / "1" / "model.pt2")
    return folder / "models"


def answers(repository: Path, cache: Path, memory: str, *flags: str, killed: bool = False) -> list[bytes]:
    """What one request is answered, again after the engine's process was killed."""
    with process(repository, memory, cache, "--batch-sizes", "1", *flags) as server:
        server.until_ready()
        found = [infer(server.address, "wide", {"x": X})["output"].tobytes()]
        if killed:
            server.engine().kill()
            found.append(infer(server.address, "wide", {"x": X})["output"].tobytes())
        assert "weights take fewer bytes" in server.log_text()
    return found


def test_a_model_born_in_16_bits_keeps_its_answers_bits(repository: Path, tmp_path: Path) -> None:
    (resident,) = answers(repository, tmp_path, "100%")
    found = answers(repository, tmp_path, "40%", "--store", "file", killed=True)
    assert found == [resident, resident]
    with torch.no_grad():
        expected = born_in_16_bits()(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(np.frombuffer(resident, np.float32), expected[0], atol=1e-5)


def test_eight_bits_have_the_same_answer_at_every_budget(repository: Path, tmp_path: Path) -> None:
    (resident,) = answers(repository, tmp_path, "100%", "--weights", "int8")
    assert answers(repository, tmp_path, "40%", "--weights", "int8", killed=True) == [resident, resident]
