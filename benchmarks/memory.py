"""Peak memory of the server's processes: ResNet-152 in a quarter of its weights against ResNet-152 resident.

Each server is a process of its own, started twice: the first start lowers and measures the model, the second is
looked at after ten requests. The file store is used, since the store in RAM holds all weights by design.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import tritonclient.http
from rich.console import Console

from benchmarks.record import markdown_table, record
from benchmarks.scrape import by_model
from loadgen.inputs import random_inputs
from loadgen.repository import prepare_visibly, recipes
from loadgen.server_process import server_command

MODEL = "resnet152"
RUNS = (("resident", "120%"), ("partitioned", "25%"))
REQUESTS = 10


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes: front end's and engine's high-water marks, what of both is anonymous memory now, the model's residents."""

    high_water: int
    anonymous: int
    resident: int
    parameters: int


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    repository = options.folder / "memory"
    (prepared,) = prepare_visibly(repository, recipes(1, [MODEL]), force=False, console=console)
    peaks: dict[str, Peak] = {}
    for layout, memory in RUNS:
        for start in ("first", "second"):
            console.print(f"{layout}: {start} start")
            peaks[layout] = _serve_once(repository, layout, memory, options.folder / "memory-cache")
    saved = peaks["resident"].high_water - peaks["partitioned"].high_water
    missing = peaks["partitioned"].parameters - peaks["partitioned"].resident
    rows = [[layout, memory, *(f"{n / 2**20:.1f}" for n in _figures(peaks[layout]))] for layout, memory in RUNS]
    path = record(
        "memory",
        "Peak memory of the server's processes",
        "benchmarks.memory",
        [
            f"{MODEL}, {prepared.weight_bytes / 2**20:.1f} MiB of weights, file store, batch 1,"
            f" after {REQUESTS} requests.\n",
            markdown_table(
                ["layout", "memory", "peaks (VmHWM) MiB", "anonymous (RssAnon) MiB", "resident parameters MiB"],
                rows,
            ),
            f"The partitioned server's peaks are {saved / 2**20:.1f} MiB lower. {missing / 2**20:.1f} MiB of parameters"
            f" are not resident: saved / not resident = **{saved / missing:.2f}** (to hold: at least 0.6).\n",
        ],
    )
    print(path.read_text())
    return 0 if saved >= 0.6 * missing else 1


def _figures(peak: Peak) -> tuple[int, int, int]:
    return peak.high_water, peak.anonymous, peak.resident


def _serve_once(repository: Path, layout: str, memory: str, cache: Path) -> Peak:
    command = [*server_command("cohabit", repository, memory, layout), "--cache", str(cache)]
    command += ["--store", "file", "--batch-sizes", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        urls = [server.stdout.readline().split(": ", 1)[1].strip() for _ in range(2)]
        try:
            client = tritonclient.http.InferenceServerClient(urls[0].removeprefix("http://"), network_timeout=120.0)
            _wait_until_ready(client, server)
            inputs = random_inputs(client.get_model_metadata(MODEL), batch=1, rng=np.random.default_rng(0))
            for _ in range(REQUESTS):
                client.infer(MODEL, inputs)
            front_end = psutil.Process(server.pid)
            statuses = [_status(process.pid) for process in (front_end, *front_end.children())]
            resident, parameters = _gauges(urls[1])
            client.close()
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    high_water, anonymous = (sum(status[field] for status in statuses) for field in ("VmHWM", "RssAnon"))
    return Peak(high_water, anonymous, resident, parameters)


def _wait_until_ready(client: tritonclient.http.InferenceServerClient, server: subprocess.Popen[str]) -> None:
    while not client.is_server_ready():
        if server.poll() is not None:
            raise SystemExit(f"the server exited with status {server.returncode}")
        time.sleep(0.2)


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
