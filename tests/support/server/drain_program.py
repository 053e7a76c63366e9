"""`cohabit serve` with a fake loader, as a process. A file named `go` lets its one model, or its loading, end.

Arguments: the repository, a folder for the files `executing` and `go`, what waits for `go` (`model` or `loading`), and
token files.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from cohabit.server import serve
from cohabit.server.commands.serve import serve_until_stopped
from cohabit.server.config.config import ServeConfig
from cohabit.server.deploy import lifecycle
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.frontend.access import TokenFiles
from cohabit.server.ipc.model import Array
from cohabit.server.repository.sources import ModelSource
from tests.support.server.server_fakes import FakeServable, config, identity, serving

REPOSITORY, FOLDER, WAITS, *TOKEN_FILES = sys.argv[1:]


def is_let_go() -> bool:
    return (Path(FOLDER) / "go").exists()


def gated(x: Array) -> dict[str, Array]:
    (Path(FOLDER) / "executing").touch()
    while not is_let_go():
        time.sleep(0.01)
    return {"y": x}


def load(sources: Sequence[ModelSource], config: ServeConfig, lanes: Sequence[ComputeLane]) -> Any:
    while WAITS == "loading" and not is_let_go():
        time.sleep(0.01)
    return serving(FakeServable(identity("gated", "FP32").info, gated)).opened


if __name__ == "__main__":
    lifecycle.open_placement = load
    serve._ANSWERS_WRITTEN_S = 60.0  # a busy machine may take longer than two seconds to write an answer
    TokenFiles.watch.__defaults__ = (3600.0,)  # only SIGHUP has the token files read again
    settings = config(
        repository=Path(REPOSITORY),
        engine="in-process",
        token_files=tuple(map(Path, TOKEN_FILES)),
        exit_timeout_s=60.0,
    )
    sys.exit(asyncio.run(serve_until_stopped(settings, Console(stderr=True))))
