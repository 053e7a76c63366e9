"""Memory of the server's processes: ResNet-152 in a quarter of its weights against resident, and of its starts.

Each server is a process of its own. The file store is used, since the store in RAM holds all weights by design. A first
start is one with an empty cache: it lowers the model, serves it on quick plans, and measures it while it serves.
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import PLANNED, by_model, serve_command, starting
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODEL = "resnet152"
RUNS = (("resident", "120%"), ("partitioned", "25%"))
REQUESTS = 10
DEVICE_MEMORY = "64MiB"
MOST_BEYOND_BYTES = 304 << 20
"""What a first start may take beyond 1.5 times the weights."""


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes: front end's and engine's high-water marks, what of both is anonymous memory now, the model's residents."""

    high_water: int
    anonymous: int
    resident: int
    parameters: int


@dataclass(frozen=True, slots=True)
class FirstStart:
    """Most bytes of anonymous memory of all processes at once: until ready, and until measured and planned."""

    until_ready: int
    until_planned: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.memory", __doc__)
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    repository = options.folder / "memory"
    (prepared,) = prepare_visibly(repository, recipes(1, [MODEL]), force=False, console=console)
    most_bytes = prepared.weight_bytes * 3 // 2 + MOST_BEYOND_BYTES
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cache = Path(folder) / "cache"
        console.print("first start")
        first = _first_start(repository, cache)
        peaks: dict[str, Peak] = {}
        for layout, memory in RUNS:
            for start in ("first", "second"):
                console.print(f"{layout}: {start} start with these plans")
                peaks[layout] = _serve_once(repository, layout, memory, cache)
    saved = peaks["resident"].high_water - peaks["partitioned"].high_water
    missing = peaks["partitioned"].parameters - peaks["partitioned"].resident
    layouts = [[layout, memory, *(_mib(n) for n in _figures(peaks[layout]))] for layout, memory in RUNS]
    starts = [
        ["first, until ready", _mib(first.until_ready), _mib(most_bytes)],
        ["first, until measured and planned", _mib(first.until_planned), ""],
    ]
    sections = [
        f"{MODEL}, {_mib(prepared.weight_bytes)} MiB of weights, file store, batch 1, after {REQUESTS} requests.\n",
        markdown_table(
            ["layout", "memory", "peaks (VmHWM) MiB", "anonymous (RssAnon) MiB", "resident parameters MiB"], layouts
        ),
        f"The partitioned server's peaks are {_mib(saved)} MiB lower. {_mib(missing)} MiB of parameters"
        f" are not resident: saved / not resident = **{saved / missing:.2f}** (to hold: at least 0.6).\n",
        f"First start with `--memory {DEVICE_MEMORY}`, which is part of the figures: the most anonymous memory of all"
        " processes at once.\n",
        markdown_table(["start", "MiB", "to hold, MiB"], starts),
    ]
    publish(options, "Memory of the server's processes", sections)
    return 0 if saved >= 0.6 * missing and first.until_ready <= most_bytes else 1


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f}"


def _figures(peak: Peak) -> tuple[int, int, int]:
    return peak.high_water, peak.anonymous, peak.resident


def _first_start(repository: Path, cache: Path) -> FirstStart:
    """Start with an empty cache, and watch the server's processes until the model has been measured and planned."""
    until_ready = most = 0
    cache.mkdir(exist_ok=True)
    command = _server_command(repository, None, DEVICE_MEMORY, cache, "--quick-start")
    with (
        starting(command, cache / "log") as server,
        tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=120.0) as client,
    ):

        def planned() -> bool:
            nonlocal until_ready, most
            most = max(most, sum(status.get("RssAnon", 0) for status in _statuses(server.process.pid)))
            if not until_ready and client.is_server_ready():
                until_ready = most
            return PLANNED in server.log.read_text()

        server.until(planned)
    return FirstStart(until_ready, most)


def _server_command(repository: Path, layout: str | None, memory: str, cache: Path, *flags: str) -> list[str]:
    return serve_command(repository, memory, layout, cache, "--store", "file", "--batch-sizes", "1", *flags)


def _serve_once(repository: Path, layout: str, memory: str, cache: Path) -> Peak:
    with starting(_server_command(repository, layout, memory, cache), cache / "log") as server:
        with tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=120.0) as client:
            server.until(client.is_server_ready)
            inputs = random_inputs(client.get_model_metadata(MODEL), batch=1, rng=np.random.default_rng(0))
            for _ in range(REQUESTS):
                client.infer(MODEL, inputs)
        statuses = _statuses(server.process.pid)
        resident, parameters = _gauges(server.metrics_url)
    high_water, anonymous = (sum(status.get(field, 0) for status in statuses) for field in ("VmHWM", "RssAnon"))
    return Peak(high_water, anonymous, resident, parameters)


def _statuses(pid: int) -> list[dict[str, int]]:
    """What the system says of a process and all its descendants, without those that are ending."""
    found = []
    with suppress(psutil.NoSuchProcess):
        front_end = psutil.Process(pid)
        for process in (front_end, *front_end.children(recursive=True)):
            with suppress(OSError):
                found.append(_status(process.pid))
    return found


def _status(pid: int) -> dict[str, int]:
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {line[0].removesuffix(":"): int(line[1]) << 10 for line in lines if line[-1] == "kB"}


def _gauges(metrics_url: str) -> tuple[int, int]:
    """Resident and all parameter bytes of the one model."""
    resident, parameters = (
        by_model(metrics_url, f"cohabit_{kind}_bytes")[MODEL] for kind in ("resident", "parameter")
    )
    return int(resident), int(parameters)


if __name__ == "__main__":
    sys.exit(main())
