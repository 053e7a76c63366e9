"""Reads the metrics of a server with Prometheus' own parser."""

from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cohabit.server.ipc.model import DeviceUse
from cohabit.server.observe.gpus import Gpu
from cohabit.server.observe.machine import Machine
from cohabit.server.observe.prometheus import written
from tests.support.server.server_fakes import Running
from tests.support.server.server_http import ask

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class MetricsPort:
    """What the request helpers need of a server: its metrics port."""

    def __init__(self, server: Running) -> None:
        self.port = server.metrics_port
        self.address = f"127.0.0.1:{self.port}"


def parsed(text: str) -> Samples:
    """Samples by name and labels. The parser appends `_total` to the names of Triton's counters, which have none."""
    return {
        (
            s.name.removesuffix("_total") if s.name.startswith("nv_") else s.name,
            tuple(sorted(s.labels.items())),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def scrape(server: Running) -> Samples:
    answer = ask(MetricsPort(server), "GET", "/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.body.decode())


class FakeNvml(SimpleNamespace):
    """One GPU that does not tell its power limit."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=35)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(total=80 << 30, used=8 << 30)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:  # noqa: N802
        return 250_500

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:  # noqa: N802
        raise self.NVMLError("not supported")

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:  # noqa: N802
        return 12_000


def machine_samples(use: DeviceUse, gpus: tuple[Gpu, ...] = ()) -> Samples:
    return parsed(written(Machine({"unauthenticated": 0}, lambda: gpus).families(use)).decode())
