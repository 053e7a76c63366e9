"""What all tests share: none hears of what a server was told to log before."""

import pytest

from server import log
from server.settings import LogSettings


@pytest.fixture(autouse=True)
def _usual_log() -> None:
    """Filters stay on the handlers that tests listen with."""
    log.apply(LogSettings())
