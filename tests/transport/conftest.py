"""One pair of ports with the standard models, for all tests that do not change it."""

from collections.abc import Iterator

import pytest

from tests.support.server.transport_fakes import Ports, running, standard_models


@pytest.fixture(scope="session")
def server() -> Iterator[Ports]:
    with running(*standard_models()) as ports:
        yield ports
