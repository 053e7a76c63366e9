"""An engine whose models are numpy functions, as a process of its own.

Started by `python -m tests.support.server.fake_engine SOCKETS`.

Tests talk to it through files in the folder that `FAKE_ENGINE` names, because it lives in another process.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cohabit.planner.shapes import Bucket
from cohabit.server.config.config import ServeConfig
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array
from cohabit.server.process.engine import Engine
from cohabit.server.process.engine_process import main
from cohabit.server.repository.sources import ModelSource
from tests.support.server.server_fakes import adder, identity, serving

REFUSED, FAILS, HELD = 7.0, 8.0, 9.0
"""Values of `x` that `double` cannot take, on which its kernel fails, and with which it waits for the gate."""


def folder() -> Path:
    return Path(os.environ["FAKE_ENGINE"])


def entered() -> int:
    """How many executions have come to the gate so far."""
    return len(list(folder().glob("entered-*")))


def open_gate() -> None:
    (folder() / "open").touch()


def close_gate() -> None:
    """Forget which executions have come to the gate, and close it behind them."""
    for path in (folder() / "open", *folder().glob("entered-*")):
        path.unlink(missing_ok=True)


def break_starts() -> None:
    """Let every engine that is started from now on end at once."""
    (folder() / "broken").touch()


def mend_starts() -> None:
    (folder() / "broken").unlink()


def break_one_start() -> None:
    """Let the next engine that is started end while it loads."""
    (folder() / "broken-once").touch()


def requested() -> list[str]:
    """The models that the last engine was to load."""
    return (folder() / "requested").read_text().split()


def double(x: Array) -> dict[str, Array]:
    if x[0, 0] == REFUSED:
        raise InvalidRequest("7 is outside of the table")
    if x[0, 0] == FAILS:
        raise RuntimeError("the kernel has failed")
    if x[0, 0] == HELD:
        (folder() / f"entered-{os.getpid()}-{time.monotonic_ns()}").touch()
        while not (folder() / "open").exists():
            time.sleep(0.002)
    return {"y": np.asarray(x * 2)}


def load(sources: Sequence[ModelSource], config: ServeConfig, lanes: Sequence[ComputeLane]) -> Any:
    (folder() / "requested").write_text(" ".join(sorted(source.name for source in sources)))
    if (folder() / "broken").exists() or (folder() / "broken-once").exists():
        (folder() / "broken-once").unlink(missing_ok=True)
        sys.stderr.flush()
        os._exit(3)
    doubler, slow = identity("double", "FP32"), identity("slow", "FP32")
    doubler.function = double
    slow.predicted_s = {Bucket(1): 1e3}
    negative = adder(version=2)
    negative.function = lambda a, b: {"diff": b - a, "sum": -a - b}
    return serving(doubler, slow, identity("empty", "FP32", (0,)), negative, adder()).opened


def make(config: ServeConfig, **options: Any) -> Engine:
    return Engine(config, open_placement=load, **options)


if __name__ == "__main__":
    main(make)
