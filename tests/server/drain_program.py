"""`cohabit serve` with a fake loader, as a process: one model that sleeps; loading takes as long as told."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from server_fakes import FakeLoaded, FakeServable, config, identity, serving

from server.cli import serve_until_stopped
from server.config.config import ServeConfig
from server.models.repository import ModelSource
from server.protocol.model import Array


def sleepy(x: Array) -> dict[str, Array]:
    time.sleep(float(x[0, 0]))
    return {"y": x}


def load(
    sources: Sequence[ModelSource], config: ServeConfig, on_progress: Callable[[str, str], None]
) -> FakeLoaded:
    for _ in range(int(sys.argv[2])):
        time.sleep(0.05)
        on_progress("sleepy", "dozing")
    return serving(FakeServable(identity("sleepy", "FP32").info, sleepy))


if __name__ == "__main__":
    console = Console(stderr=True)
    repository = Path(sys.argv[1])
    settings = config(repository=repository, token_files=tuple(map(Path, sys.argv[3:])))
    sys.exit(asyncio.run(serve_until_stopped(settings, load, console)))
