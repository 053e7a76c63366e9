"""How long a start takes, cold and warm: until ready, to the first answers, and until every plan is the best one.

Cold means an empty `--cache`; archives and the planner's compiled code are there. Each server is asked once per model
as soon as it is ready, and ended when it has measured and planned every model. The warm start that follows finds all
of that.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from rich.console import Console

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import PATIENCE_S, PLANNED, cpu_s, serve_command, starting
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

CASES: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    # title, number of models, what they are built from, memory
    ("ResNet-50", 1, ("resnet50",), "75%"),
    ("MiniLM", 1, ("minilm",), "50%"),
    ("the demo's 16 models", 16, (), "25%"),
)
GOALS_S = {"ResNet-50": 10.0, "the demo's 16 models": 30.0}
"""For the first answer of a cold start, on two cores."""
QUICK = "quick plans are in use"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds since the command was given, and seconds of the processors until the server was ready."""

    ready_s: float
    first_answer_s: float
    all_answered_s: float
    planned_s: float
    ready_cpu_s: float


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    rows, met = [], True
    for title, count, entries, memory in CASES:
        repository = options.folder / "first-start" / title.replace(" ", "-").replace("'", "")
        prepare_visibly(repository, recipes(count, entries), force=False, console=console)
        starts: dict[str, list[Start]] = {"cold": [], "warm": []}
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as cache:
                for kind, found in starts.items():
                    found.append(_start(repository, memory, Path(cache)))
                    console.print(f"{title}, {kind}: {found[-1]}")
        rows += [_row(title, memory, kind, found) for kind, found in starts.items()]
        cold_s = statistics.median(start.first_answer_s for start in starts["cold"])
        met &= cold_s <= GOALS_S.get(title, float("inf"))
    goals = ", ".join(f"{title} {goal_s:g} s" for title, goal_s in GOALS_S.items())
    sections = [
        f"Medians of {options.rounds} starts of each kind, in seconds. *Cold*: an empty cache; archives and the"
        " planner's compiled code are there. *Best plans*: every model has been measured and planned, which a"
        " cold start does while it serves. *CPU*: of all the server's processes.\n",
        table_of(rows),
        f"To hold, first answer of a cold start: {goals}.\n",
    ]
    publish(options, "Seconds from the command to the first answers", sections)
    return 0 if met else 1


def _row(title: str, memory: str, kind: str, starts: Sequence[Start]) -> dict[str, str]:
    return {
        "models": title,
        "memory": memory,
        "start": kind,
        "ready": f"{statistics.median(start.ready_s for start in starts):.1f}",
        "first answer": f"{statistics.median(start.first_answer_s for start in starts):.1f}",
        "all answered": f"{statistics.median(start.all_answered_s for start in starts):.1f}",
        "best plans": f"{statistics.median(start.planned_s for start in starts):.1f}",
        "CPU until ready": f"{statistics.median(start.ready_cpu_s for start in starts):.1f}",
    }


def _start(repository: Path, memory: str, cache: Path) -> Start:
    """Start a server, ask each model once, and wait until its plans are the best ones."""
    command = serve_command(repository, memory, None, cache, "--quick-start")
    began_s = time.monotonic()
    with starting(command, cache / "log") as server:
        with tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=PATIENCE_S) as client:
            server.until(client.is_server_ready)
            ready_s, ready_cpu_s = time.monotonic() - began_s, cpu_s([psutil.Process(server.process.pid)])
            models = [entry["name"] for entry in client.get_model_repository_index()]
            answered_s = []
            for model in models:
                inputs = random_inputs(client.get_model_metadata(model), batch=1, rng=np.random.default_rng(0))
                client.infer(model, inputs)
                answered_s.append(time.monotonic() - began_s)
        server.until(lambda: _is_planned(server.log))
        planned_s = time.monotonic() - began_s
    return Start(ready_s, answered_s[0], answered_s[-1], planned_s, ready_cpu_s)


def _is_planned(log: Path) -> bool:
    """Whether the server has no quick plans, or no more."""
    text = log.read_text()
    return QUICK not in text or PLANNED in text


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.first_start", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
