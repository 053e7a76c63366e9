"""Short measurements for tests that prepare models, whatever their profiles."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cohabit.runtime.measure import stopwatch
from tests.support.started import sitecustomize

ROOT = Path(__file__).parents[2]


@contextmanager
def short_measurements() -> Iterator[None]:
    """Measure each figure in one run, in this process and in those that it starts.

    Otherwise a model takes 0.3 s per batch size, and three times that while other tests run.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, value in sitecustomize.SHORT.items():
            patch.setattr(stopwatch, name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(sitecustomize.__file__).parent), str(ROOT)]))
        yield
