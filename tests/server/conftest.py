"""One server with the standard fakes for all tests that do not change it."""

from collections.abc import Iterator

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from tests.support.server.server_fakes import FakeLoaded, Running, running, serving, standard_models


@pytest.fixture(scope="session")
def loaded() -> FakeLoaded:
    loaded = serving(*standard_models())
    loaded.failures = {ModelKey("damaged", 1): "model.pt2 is truncated"}
    predicted_s, bound_s = {Bucket(1): 0.5, Bucket(2): 0.75}, {Bucket(1): 0.5, Bucket(2): 0.6}
    loaded.footprints = {
        ModelKey("adder", 3): ModelFootprint(
            100, 400, 80, predicted_s, bound_s, activation_bytes={Bucket(1): 64, Bucket(2): 128}
        )
    }
    return loaded


@pytest.fixture(scope="session")
def server(loaded: FakeLoaded) -> Iterator[Running]:
    with running(loaded, max_body_bytes=1 << 20, strict_readiness=False) as handle:
        yield handle
