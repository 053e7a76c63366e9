"""How long a start takes, cold and warm: until ready, to the first answers, and until every plan is the best one.

Cold means an empty `--cache`; archives and the planner's compiled code are there. Each server is asked once per model
as soon as it is ready, and ended when it has measured and planned every model. The warm start that follows finds all
of that.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, record
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.server_process import server_command
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

CASES: tuple[tuple[str, int, tuple[str, ...], str], ...] = (
    # title, number of models, what they are built from, memory
    ("ResNet-50", 1, ("resnet50",), "75%"),
    ("MiniLM", 1, ("minilm",), "50%"),
    ("the demo's 16 models", 16, (), "25%"),
)
GOALS_S = {"ResNet-50": 10.0, "the demo's 16 models": 30.0}
"""For the first answer of a cold start, on two cores."""
PLANNED = "every model has been measured and planned"
QUICK = "quick plans are in use"
PATIENCE_S = 900.0
_POLL_S = 0.02


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
        rows += [[title, memory, kind, *_medians(found)] for kind, found in starts.items()]
        cold_s = statistics.median(start.first_answer_s for start in starts["cold"])
        met &= cold_s <= GOALS_S.get(title, float("inf"))
    table = markdown_table(
        ["models", "memory", "start", "ready", "first answer", "all answered", "best plans", "CPU until ready"],
        rows,
    )
    console.print(table, markup=False)
    if options.record:
        goals = ", ".join(f"{title} {goal_s:g} s" for title, goal_s in GOALS_S.items())
        record(
            "first-start",
            "Seconds from the command to the first answers",
            "benchmarks.first_start",
            [
                f"Medians of {options.rounds} starts of each kind, in seconds. *Cold*: an empty cache; archives and the"
                " planner's compiled code are there. *Best plans*: every model has been measured and planned, which a"
                " cold start does while it serves. *CPU*: of all the server's processes.\n",
                table,
                f"To hold, first answer of a cold start: {goals}.\n",
            ],
        )
    return 0 if met else 1


def _medians(starts: Sequence[Start]) -> list[str]:
    return [f"{statistics.median(getattr(s, field.name) for s in starts):.1f}" for field in fields(Start)]


def _start(repository: Path, memory: str, cache: Path) -> Start:
    """Start a server, ask each model once, and wait until its plans are the best ones."""
    command = [*server_command("cohabit", repository, memory, None), "--cache", str(cache), "--quick-start"]
    log = cache / "log"
    began_s = time.monotonic()
    with (
        log.open("w") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            url = server.stdout.readline().partition(": ")[2].strip()
            with tritonclient.http.InferenceServerClient(address_of(url), network_timeout=PATIENCE_S) as client:
                _until(client.is_server_ready, server, log)
                ready_s, ready_cpu_s = time.monotonic() - began_s, _cpu_s(server.pid)
                models = [entry["name"] for entry in client.get_model_repository_index()]
                answered_s = []
                for model in models:
                    inputs = random_inputs(client.get_model_metadata(model), batch=1, rng=np.random.default_rng(0))
                    client.infer(model, inputs)
                    answered_s.append(time.monotonic() - began_s)
                _until(lambda: _is_planned(log), server, log)
                planned_s = time.monotonic() - began_s
        finally:
            server.terminate()
            server.wait(60)
    return Start(ready_s, answered_s[0], answered_s[-1], planned_s, ready_cpu_s)


def _is_planned(log: Path) -> bool:
    """Whether the server has no quick plans, or no more."""
    text = log.read_text()
    return QUICK not in text or PLANNED in text


def _until(condition: Callable[[], bool], server: subprocess.Popen[str], log: Path) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        if server.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"the server is not ready, status {server.poll()}:\n{log.read_text()}")
        time.sleep(_POLL_S)


def _cpu_s(pid: int) -> float:
    """Seconds of the processors that a process and its descendants have used, those that have ended included."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.first_start", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
