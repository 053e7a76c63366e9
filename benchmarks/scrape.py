"""A server for a measurement, and what it says of itself: samples of its metrics."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from cohabit.loadgen.server_process import running_server


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


@asynccontextmanager
async def serving(command: Sequence[str], *, show_log: bool = False) -> AsyncIterator[Running]:
    """Serve by a command, with metrics, until the context ends."""
    port = free_port()
    async with running_server([*command, "--metrics-port", str(port)], patience_s=900, show_log=show_log) as url:
        yield Running(url, f"http://127.0.0.1:{port}/metrics")


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
