"""Weights in fewer bytes, served: the same bits at every budget, from both stores."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.e2e.serving import Running, infer, serving
from tests.support.runtime import models

BORN, STORED = "born_in_16_bits", "stored_in_8_bits"
X = np.random.default_rng(0).standard_normal((1, 384)).astype(np.float32)


def born_in_16_bits() -> torch.nn.Module:
    torch.manual_seed(0)
    return models.Wide().eval().to(torch.bfloat16).float()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights") / "models"
    for name, model in ((BORN, born_in_16_bits()), (STORED, models.Wide())):
        models.export(model, {"x": torch.zeros(3, 384)}, root / name / "1" / "model.pt2")
    (root / STORED / "config.pbtxt").write_text("parameters { key: 'weights' value { string_value: 'int8' } }")
    return root


def answers(server: Running) -> dict[str, bytes]:
    return {name: infer(server.address, name, {"x": X})["output"].tobytes() for name in (BORN, STORED)}


def test_weights_in_fewer_bytes_have_the_same_answers_at_every_budget(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cohabit")
    with serving(repository, "100%", tmp_path, batch_sizes=(1,)) as server:
        resident = answers(server)
    with torch.no_grad():
        expected = born_in_16_bits()(torch.from_numpy(X)).numpy()
    np.testing.assert_allclose(np.frombuffer(resident[BORN], np.float32), expected[0], atol=1e-5)
    with serving(repository, "40%", tmp_path, batch_sizes=(1,), store="file") as server:
        assert answers(server) == resident
    assert caplog.messages.count("weights take fewer bytes") >= 2
