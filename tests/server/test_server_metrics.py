"""Prometheus metrics under the names that dashboards know, read by Prometheus' own parser."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from server.engine.histogram import SECONDS, Histogram
from server_fakes import FakeServable, Gate, Running, identity, running, serving
from server_http import ask, infer, x

from runtime.recording import Follow
from server.observe.access import OPEN
from server.observe.gpus import Gpu
from server.observe.machine import Machine
from server.observe.prometheus import Family, written
from server.protocol.model import DeviceUse, Execution, Inputs

TRITONS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
    *(f"nv_inference_first_response_histogram_ms_{part}" for part in ("bucket", "sum", "count")),
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
}
OURS = {
    "cohabit_model_ready",
    "cohabit_captured",
    "cohabit_graph_bytes",
    "cohabit_partition_bytes",
    "cohabit_parameter_bytes",
    "cohabit_resident_bytes",
    "cohabit_compute_lane",
    "cohabit_resident_share",
    "cohabit_predicted_seconds",
    "cohabit_bound_seconds",
    "cohabit_plan_gap",
    "cohabit_measured_over_predicted",
    "cohabit_swapped_bytes",
    "cohabit_stall_seconds",
    "cohabit_prefetch_hits",
    "cohabit_rejected_requests",
    "cohabit_memory_bytes",
    "cohabit_lane_busy_seconds",
    "cohabit_refused_calls",
    *(f"cohabit_{what}_seconds_{part}" for what in ("queue", "compute") for part in ("bucket", "sum", "count")),
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass(frozen=True)
class MetricsAddress:
    """What the request helpers need of a server."""

    port: int


def metrics_address(server: Running) -> MetricsAddress:
    return MetricsAddress(int(server.server.metrics_url.removesuffix("/metrics").rpartition(":")[2]))


def parsed(text: str) -> Samples:
    """Samples by name and labels. The parser appends `_total` to the names of counters, which have none here."""
    return {
        (
            s.name.removesuffix("_total") if family.type == "counter" else s.name,
            tuple(sorted(s.labels.items())),
        ): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def scrape(server: Running) -> Samples:
    answer = ask(metrics_address(server), "GET", "/metrics")  # type: ignore[arg-type]
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parsed(answer.body.decode())


def value(server: Running, name: str, **labels: str) -> float:
    return scrape(server)[name, tuple(sorted({"model": "adder", "version": "3", **labels}.items()))]


def test_every_metric_is_there(server: Running) -> None:
    found = {name for name, _ in scrape(server)}
    assert found - {name for name in found if name.startswith(("nv_gpu", "nv_energy"))} == TRITONS | OURS


def test_every_metric_says_what_it_is_before_its_samples(server: Running) -> None:
    text = ask(metrics_address(server), "GET", "/metrics").body.decode()  # type: ignore[arg-type]
    known: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            known.add(line.split()[2])
        elif not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            stem = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in known or stem in known, line


def test_counters_follow_inferences(server: Running) -> None:
    def counters() -> list[float]:
        names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
        more = ("cohabit_swapped_bytes", "cohabit_stall_seconds", "cohabit_compute_seconds_count")
        return [value(server, name) for name in (*names, *more)]

    before = counters()
    pair = [x([0] * 8, name=name, shape=[2, 4]) for name in "ab"]
    assert infer(server, "adder", {"inputs": pair}).status == 200
    assert [after - b for after, b in zip(counters(), before, strict=True)] == [1, 2, 1, 1000, 0.25, 1]


def test_histograms_and_sums_agree(server: Running) -> None:
    pair = [x([0] * 4, name=name) for name in "ab"]
    assert infer(server, "adder", {"inputs": pair}).status == 200
    samples = scrape(server)
    identity_labels = {"model": "adder", "version": "3"}

    def of(name: str, **labels: str) -> float:
        return samples[name, tuple(sorted((identity_labels | labels).items()))]

    answered = of("nv_inference_request_success")
    assert of("cohabit_queue_seconds_bucket", le="+Inf") == of("cohabit_queue_seconds_count") == answered
    assert of("nv_inference_first_response_histogram_ms_count") == answered
    assert math.isclose(
        of("cohabit_queue_seconds_sum") * 1e6, of("nv_inference_queue_duration_us"), abs_tol=answered
    )
    latency_us = of("nv_inference_first_response_histogram_ms_sum") * 1e3
    assert math.isclose(latency_us, of("nv_inference_request_duration_us"), abs_tol=answered)


def test_failures_are_counted_by_reason(server: Running) -> None:
    broken = {"model": "broken", "version": "1"}
    before = value(server, "nv_inference_request_failure", reason="BACKEND", **broken)
    assert infer(server, "broken", {"inputs": [x()]}).status == 500
    assert value(server, "nv_inference_request_failure", reason="BACKEND", **broken) == before + 1
    for reason in ("REJECTED", "CANCELED", "OTHER"):
        assert value(server, "nv_inference_request_failure", reason=reason) == 0


def test_refusals_are_counted_by_reason() -> None:
    gate = Gate()
    slow = identity("slow", "FP32")
    slow.function = gate
    with running(serving(slow), queue_limit=1) as own, ThreadPoolExecutor() as clients:
        running_one = clients.submit(infer, own, "slow", {"inputs": [x()]})
        assert gate.entered.wait(20)
        hopeless = infer(own, "slow", {"inputs": [x()], "parameters": {"timeout": 1}})
        waiting = clients.submit(infer, own, "slow", {"inputs": [x()]})
        labels = {"model": "slow", "version": "1"}
        while value(own, "nv_inference_pending_request_count", **labels) < 1:
            time.sleep(0.01)
        surplus = infer(own, "slow", {"inputs": [x()]})
        gate.open.set()
        statuses = [running_one.result().status, waiting.result().status, hopeless.status, surplus.status]
        assert statuses == [200, 200, 503, 503]
        reasons = ("deadline", "queue_full", "rate_limited", "draining", "device_lost")
        counts = [value(own, "cohabit_rejected_requests", reason=reason, **labels) for reason in reasons]
        assert counts == [1, 1, 0, 0, 0]


def test_footprints_are_gauges(server: Running) -> None:
    assert value(server, "cohabit_partition_bytes") == 100
    assert value(server, "cohabit_parameter_bytes") == 400
    assert value(server, "cohabit_resident_bytes") == 80
    assert value(server, "cohabit_resident_share") == 0.2
    assert value(server, "cohabit_predicted_seconds", batch="2") == 0.75
    assert value(server, "cohabit_bound_seconds", batch="2") == 0.6
    assert value(server, "cohabit_plan_gap", batch="2") == pytest.approx(0.25)
    assert value(server, "nv_inference_pending_request_count") == 0


def test_device_memory_and_lanes(server: Running) -> None:
    samples = scrape(server)
    uses = {"workspace": 100, "partitions": 700, "free": 224}
    for use, nbytes in uses.items():
        assert samples["cohabit_memory_bytes", (("use", use),)] == nbytes
    assert samples["cohabit_lane_busy_seconds", (("lane", "swap_in"),)] == 1.5
    assert samples["cohabit_lane_busy_seconds", (("lane", "compute"),)] >= 0


def test_a_model_that_failed_to_load_is_seen_not_to_be_ready(server: Running) -> None:
    samples = scrape(server)
    assert samples["cohabit_model_ready", (("model", "adder"),)] == 1
    assert samples["cohabit_model_ready", (("model", "damaged"),)] == 0


def test_the_machine_is_measured(server: Running) -> None:
    samples = scrape(server)
    assert 0 <= samples["nv_cpu_utilization", ()] <= 1
    assert 0 < samples["nv_cpu_memory_used_bytes", ()] < samples["nv_cpu_memory_total_bytes", ()]


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
    return parsed(written(Machine(lambda: use, OPEN, lambda: gpus).families()).decode())


def test_gpus_tell_what_they_can_in_tritons_units() -> None:
    nvml: Any = FakeNvml()
    samples = machine_samples(DeviceUse(), (Gpu("GPU-1", nvml, object()),))
    gpu = {name: value for (name, labels), value in samples.items() if dict(labels).get("gpu_uuid") == "GPU-1"}
    assert gpu == {
        "nv_gpu_utilization": 0.35,
        "nv_gpu_memory_total_bytes": 80 << 30,
        "nv_gpu_memory_used_bytes": 8 << 30,
        "nv_gpu_power_usage": 250.5,
        "nv_energy_consumption": 12,
    }


def test_pinned_memory_is_told_where_there_is_some() -> None:
    assert ("nv_pinned_memory_pool_used_bytes", ()) not in machine_samples(DeviceUse())
    samples = machine_samples(DeviceUse(pinned_total_bytes=100, pinned_used_bytes=40))
    assert samples["nv_pinned_memory_pool_total_bytes", ()] == 100
    assert samples["nv_pinned_memory_pool_used_bytes", ()] == 40


@pytest.fixture
def durations() -> list[float]:
    generator = np.random.default_rng(7)
    return list(10 ** generator.uniform(-5, 1.5, 500)) + list(SECONDS)


def test_histograms_count_as_numpy_does(durations: list[float]) -> None:
    histogram = Histogram()
    for seconds in durations:
        histogram.add(seconds)
    counted = dict(histogram.cumulative())
    for bound in SECONDS:
        assert counted[f"{bound:g}"] == np.count_nonzero(np.array(durations) <= bound)
    assert counted["+Inf"] == len(durations)
    assert histogram.sum == pytest.approx(sum(durations))


def test_labels_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    text = written([Family("m", "gauge", "help", [({"label": odd}, 1.0)])]).decode()
    assert parsed(text) == {("m", (("label", odd),)): 1.0}


class HandingOut(FakeServable):
    """Takes a while to hand its outputs out."""

    def execute(self, requests: Sequence[Inputs], rows: int, follow: Follow | None = None) -> Execution:
        execution = super().execute(requests, rows, follow)
        time.sleep(0.05)
        return structs.replace(execution, output_s=0.05)


def test_parts_of_executions_are_measured_by_batch_size() -> None:
    with running(serving(HandingOut(identity("one", "FP32").info, lambda x: {"y": x}))) as server:
        for rows in (1, 2, 2):
            assert infer(server, "one", {"inputs": [x([0] * 4 * rows, shape=[rows, 4])]}).status == 200
        stats = ask(server, "GET", "/v2/models/one/stats").json["model_stats"][0]
    by_size = {batch["batch_size"]: batch for batch in stats["batch_stats"]}
    parts = ("compute_input", "compute_infer", "compute_output")
    assert {size: [batch[part]["count"] for part in parts] for size, batch in by_size.items()} == {
        1: [1, 1, 1],
        2: [2, 2, 2],
    }
    assert by_size[2]["compute_output"]["ns"] >= 2 * 50_000_000
    for part in parts:  # one request each time, so that both count the same
        assert sum(batch[part]["ns"] for batch in by_size.values()) == stats["inference_stats"][part]["ns"]


def test_parts_of_a_request_are_measured_and_add_up() -> None:
    with running(serving(HandingOut(identity("one", "FP32").info, lambda x: {"y": x}))) as server:
        for _ in range(2):
            assert infer(server, "one", {"inputs": [x()]}).status == 200
        stats = ask(server, "GET", "/v2/models/one/stats").json["model_stats"][0]["inference_stats"]
        assert stats["compute_output"]["count"] == 2
        assert stats["compute_output"]["ns"] >= 2 * 50_000_000
        assert stats["compute_input"]["ns"] < 50_000_000, "outputs are no part of it"
        parts = ("queue", "compute_input", "compute_infer", "compute_output")
        assert sum(stats[part]["ns"] for part in parts) == pytest.approx(stats["success"]["ns"], abs=16)
        us = scrape(server)["nv_inference_compute_output_duration_us", (("model", "one"), ("version", "1"))]
        assert us == stats["compute_output"]["ns"] // 1000
