"""Memory of the server's processes: ResNet-152 in a quarter of its weights against resident, and of its starts.

Each server is a process of its own. The file store is used, since the store in RAM holds all weights by design. A first
start is one with an empty cache: it lowers the model, serves it on quick plans, and measures it while it serves. Where
this process may make memory cgroups, starts are also tried in those of several sizes.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import PLANNED, StartingServer, by_model, serve_command, starting
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODEL = "resnet152"
RUNS = (("resident", "120%"), ("partitioned", "25%"))
REQUESTS = 10
DEVICE_MEMORY = "64MiB"
WARM_GOAL_BYTES = 304 << 20
"""The least cgroup of a warm start, and what a first start may take beyond 1.5 times the weights."""
WARM_LIMITS_BYTES = range(240 << 20, 417 << 20, 16 << 20)
PATIENCE_S = 180.0
_CGROUPS = Path("/sys/fs/cgroup")


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
    most_bytes = prepared.weight_bytes * 3 // 2 + WARM_GOAL_BYTES
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        cache = Path(folder) / "cache"
        console.print("first start")
        first = _first_start(repository, cache)
        fits = _serves_within(most_bytes, repository, Path(folder) / "limited")
        console.print(f"{first}; serves in {_mib(most_bytes)} MiB: {_said(fits)}")
        warm_bytes = _least_warm(repository, cache)
        console.print(f"warm start: serves in {_mib(warm_bytes)} MiB")
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
        [f"first in a cgroup of {_mib(most_bytes)} MiB", f"serves: {_said(fits)}", "yes"],
        ["warm, least cgroup that serves", _mib(warm_bytes), _mib(WARM_GOAL_BYTES)],
    ]
    sections = [
        f"{MODEL}, {_mib(prepared.weight_bytes)} MiB of weights, file store, batch 1, after {REQUESTS} requests.\n",
        markdown_table(
            ["layout", "memory", "peaks (VmHWM) MiB", "anonymous (RssAnon) MiB", "resident parameters MiB"], layouts
        ),
        f"The partitioned server's peaks are {_mib(saved)} MiB lower. {_mib(missing)} MiB of parameters"
        f" are not resident: saved / not resident = **{saved / missing:.2f}** (to hold: at least 0.6).\n",
        f"Starts with `--memory {DEVICE_MEMORY}`, which is part of the figures: the most anonymous memory of all"
        " processes at once, and memory cgroups (in steps of 16 MiB) in which the server answers. In a small one the"
        " kernel may end the process that measures in the background; the server then keeps its quick plans.\n",
        markdown_table(["start", "MiB", "to hold, MiB"], starts),
        f"To hold: a warm start in {_mib(WARM_GOAL_BYTES)} MiB, a first start in 1.5 times the weights more.\n",
    ]
    publish(options, "Memory of the server's processes", sections)
    in_time = fits is not False and (warm_bytes is None or warm_bytes <= WARM_GOAL_BYTES)
    return 0 if saved >= 0.6 * missing and first.until_ready <= most_bytes and in_time else 1


def _mib(nbytes: int | None) -> str:
    return "not measured" if nbytes is None else f"{nbytes / 2**20:.1f}"


def _said(answer: bool | None) -> str:
    return "not measured" if answer is None else "yes" if answer else "no"


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


def _least_warm(repository: Path, cache: Path) -> int | None:
    """Return the smallest of the limits within which a server with a full cache answers; None without cgroups.

    The largest, which is beyond the goal, is not tried.
    """
    low, high = 0, len(WARM_LIMITS_BYTES) - 1
    while low < high:
        middle = (low + high) // 2
        serves = _serves_within(WARM_LIMITS_BYTES[middle], repository, cache)
        if serves is None:
            return None
        low, high = (low, middle) if serves else (middle + 1, high)
    return WARM_LIMITS_BYTES[low]


def _serves_within(most_bytes: int, repository: Path, cache: Path) -> bool | None:
    """Whether a server in a cgroup of this size gets ready and answers a request; None without cgroups."""
    try:
        with _cgroup(most_bytes) as joining:
            cache.mkdir(exist_ok=True)
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(joining)]
            command += _server_command(repository, None, DEVICE_MEMORY, cache, "--quick-start")
            with starting(command, cache / "log") as server:
                return _answers(server)
    except OSError:
        return None


def _answers(server: StartingServer) -> bool:
    client = tritonclient.http.InferenceServerClient(address_of(server.url), network_timeout=120.0)
    end_s = time.monotonic() + PATIENCE_S
    while server.process.poll() is None and time.monotonic() < end_s:
        with suppress(OSError, tritonclient.utils.InferenceServerException):
            if client.is_server_ready():
                inputs = random_inputs(client.get_model_metadata(MODEL), batch=1, rng=np.random.default_rng(0))
                client.infer(MODEL, inputs)
                return True
        time.sleep(0.2)
    return False


@contextmanager
def _cgroup(most_bytes: int) -> Iterator[Path]:
    """Make a memory cgroup; yields the file through which a process joins it. Raises OSError without the right to."""
    first, limit = _CGROUPS / "memory", "memory.limit_in_bytes"
    if not first.is_dir():
        first, limit = _CGROUPS, "memory.max"
    group = first / f"cohabit-{os.getpid()}"
    group.mkdir()
    try:
        (group / limit).write_text(str(most_bytes))
        yield group / "cgroup.procs"
    finally:
        while pids := (group / "cgroup.procs").read_text().split():  # a killed server's workers end after it
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        group.rmdir()


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
