"""What the end-to-end tests share: models exported once, one cache, and a process left as it was."""

import shutil
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.e2e.archives import Archives


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Archives]:
    root = tmp_path_factory.mktemp("e2e")
    yield Archives(root)
    shutil.rmtree(root)


@pytest.fixture(autouse=True)
def _the_process_stays_as_it_was() -> Iterator[None]:
    """A server in this process sets torch's threads and the interpreter's patience."""
    threads, patience = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(patience)
