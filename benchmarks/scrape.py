"""A server for a measurement: its command, its processes, and samples of its metrics."""

import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import psutil
from prometheus_client.parser import text_string_to_metric_families

from cohabit.loadgen.server_process import running_server, server_command

PATIENCE_S = 900.0
PLANNED = "every model has been measured and planned"
"""What a server logs at the end of its first start."""
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Running:
    """A server, and what it says of itself."""

    url: str
    metrics_url: str

    def sum(self, metric: str) -> float:
        """Of all models."""
        return sum(by_model(self.metrics_url, metric).values())

    def total(self, metric: str) -> float:
        """Of all samples, whatever their labels."""
        stem = metric.removesuffix("_total")
        families = text_string_to_metric_families(get(self.metrics_url).decode())
        return sum(s.value for family in families for s in family.samples if s.name.removesuffix("_total") == stem)

    @property
    def resident_share(self) -> float:
        """Of the parameters that are copied to the device at all."""
        return self.sum("cohabit_resident_bytes") / self.sum("cohabit_parameter_bytes")

    def require_swaps(self) -> None:
        """Raise ValueError if nothing is copied for any inference: what is measured then is not what it says."""
        if self.resident_share == 1:
            raise ValueError(f"every parameter of {self.url}'s models stays in device memory: give it less")


def serve_command(repository: Path, memory: str, layout: str | None, cache: Path, *flags: str) -> list[str]:
    """Return a command that serves a repository after full planning, with a cache that is kept between runs."""
    return [*server_command("cohabit", repository, memory, layout), "--cache", str(cache), *flags]


@asynccontextmanager
async def serving(command: Sequence[str], *, show_log: bool = False) -> AsyncIterator[Running]:
    """Serve by a command, with metrics, until the context ends."""
    port = free_port()
    async with running_server(
        [*command, "--metrics-port", str(port)], patience_s=PATIENCE_S, show_log=show_log
    ) as url:
        yield Running(url, f"http://127.0.0.1:{port}/metrics")


@dataclass(frozen=True, slots=True)
class StartingServer:
    """A server that need not be ready yet."""

    process: subprocess.Popen[str]
    url: str
    metrics_url: str
    log: Path

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises SystemExit if the server ends before, or after PATIENCE_S."""
        end_s = time.monotonic() + PATIENCE_S
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(f"the server is not ready, status {self.process.poll()}:\n{self.log.read_text()}")
            time.sleep(_POLL_S)


@contextmanager
def starting(command: Sequence[str], log: Path) -> Iterator[StartingServer]:
    """Start a server, yield it once it has printed its addresses, and stop it in the end. `log` is overwritten."""
    with (
        log.open("w") as written,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=written, text=True) as process,
    ):
        assert process.stdout is not None
        try:
            url, metrics_url = (process.stdout.readline().partition(": ")[2].strip() for _ in range(2))
            yield StartingServer(process, url, metrics_url, log)
        finally:
            process.terminate()
            process.wait(60)


def front_end() -> psutil.Process:
    """Return the process of the one server that this process serves with."""
    (found,) = (process for process in psutil.Process().children() if "serve" in process.cmdline())
    return found


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of processes and their descendants, those that have ended included."""
    families = [member for process in processes for member in (process, *process.children(recursive=True))]
    times = [member.cpu_times() for member in families]
    return sum(t.user + t.system + t.children_user + t.children_system for t in times)


def by_model(metrics_url: str, name: str) -> dict[str, float]:
    """Samples of one metric, by model; for batch 1 where there are several."""
    samples: dict[str, float] = {}
    stem = name.removesuffix("_total")
    for family in text_string_to_metric_families(get(metrics_url).decode()):
        for sample in family.samples:
            if sample.name.removesuffix("_total") == stem and sample.labels.get("batch", "1") == "1":
                samples[sample.labels["model"]] = sample.value
    return samples


def get(url: str) -> bytes:
    with urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
