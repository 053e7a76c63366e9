"""The metrics page: Triton's names where Triton has one, and what the numbers mean."""

import math
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from msgspec import structs
from tritonclient.grpc import service_pb2 as pb

from cohabit.runtime.recording import OnRecording
from cohabit.server.ipc.model import DeviceUse, Inputs
from cohabit.server.ipc.request import Answer
from cohabit.server.ipc.statistics import REQUEST_SECONDS, SECONDS, Histogram
from cohabit.server.observe.gpus import Gpu
from cohabit.server.observe.prometheus import Family, written
from tests.support.server.metrics_client import FakeNvml, MetricsPort, Samples, machine_samples, parsed, scrape
from tests.support.server.server_fakes import FakeServable, Gate, Running, eventually, identity, running, serving
from tests.support.server.server_http import ask, infer, x

pytestmark = pytest.mark.process

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
PARTS = ("bucket", "sum", "count")
OURS = {
    "cohabit_build_info",
    "cohabit_model_ready",
    "cohabit_captured",
    "cohabit_graph_bytes",
    "cohabit_partition_bytes",
    "cohabit_parameter_bytes",
    "cohabit_resident_bytes",
    "cohabit_compute_lane",
    "cohabit_resident_share",
    "cohabit_activation_bytes",
    "cohabit_predicted_seconds",
    "cohabit_bound_seconds",
    "cohabit_plan_gap",
    "cohabit_plan_evaluations",
    "cohabit_profile_noise",
    "cohabit_measured_over_predicted",
    "cohabit_swapped_bytes_total",
    "cohabit_stall_seconds_total",
    "cohabit_sequences",
    "cohabit_state_bytes",
    "cohabit_rejected_requests_total",
    "cohabit_memory_bytes",
    "cohabit_lane_busy_seconds_total",
    "cohabit_refused_calls_total",
    "cohabit_engine_restarts_total",
    "cohabit_request_memory_bytes",
    *(
        f"cohabit_{what}_seconds_{part}"
        for what in ("request", "queue", "compute")
        for part in ("bucket", "sum", "count")
    ),
}


def of(samples: Samples, name: str, **labels: str) -> float:
    """The value of one of a model's metrics; of the model `adder`, unless another one is named."""
    return samples[name, tuple(sorted({"model": "adder", "version": "3", **labels}.items()))]


def test_every_metric_is_there(server: Running) -> None:
    found = {name for name, _ in scrape(server)}
    assert found - {name for name in found if name.startswith(("nv_gpu", "nv_energy"))} == TRITONS | OURS


def test_histograms_of_a_model_begin_with_its_first_request_except_the_first_model_s() -> None:
    models = [identity(name, "FP32") for name in ("a", "b")]

    def with_histograms() -> set[str]:
        return {dict(labels)["model"] for name, labels in scrape(own) if name == "cohabit_compute_seconds_bucket"}

    with running(serving(*models)) as own:
        assert with_histograms() == {"a"}
        assert of(scrape(own), "nv_inference_count", model="b", version="1") == 0
        infer(own, "b", {"inputs": [x()]})
        assert with_histograms() == {"a", "b"}


def test_every_metric_says_what_it_is_before_its_samples(server: Running) -> None:
    text = ask(MetricsPort(server), "GET", "/metrics").body.decode()
    known: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            known.add(line.split()[2])
        elif not line.startswith("#"):
            name = line.partition("{")[0].partition(" ")[0]
            stem = name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
            assert name in known or stem in known, line


def test_counters_histograms_and_sums_agree(server: Running) -> None:
    names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
    names += ("cohabit_swapped_bytes_total", "cohabit_stall_seconds_total", "cohabit_compute_seconds_count")
    before = scrape(server)
    pair = [x([0] * 8, name=name, shape=[2, 4]) for name in "ab"]
    assert infer(server, "adder", {"inputs": pair}).status == 200
    samples = scrape(server)
    assert [of(samples, name) - of(before, name) for name in names] == [1, 2, 1, 1000, 0.25, 1]
    answered = of(samples, "nv_inference_request_success")
    assert of(samples, "cohabit_queue_seconds_bucket", le="+Inf") == answered
    assert of(samples, "cohabit_queue_seconds_count") == answered
    assert of(samples, "nv_inference_first_response_histogram_ms_count") == answered
    queued_us = of(samples, "nv_inference_queue_duration_us")
    assert math.isclose(of(samples, "cohabit_queue_seconds_sum") * 1e6, queued_us, abs_tol=answered)
    latency_us = of(samples, "nv_inference_first_response_histogram_ms_sum") * 1e3
    assert math.isclose(latency_us, of(samples, "nv_inference_request_duration_us"), abs_tol=answered)


def test_failures_are_counted_by_reason(server: Running) -> None:
    def failures() -> dict[str, float]:
        samples, reasons = scrape(server), ("BACKEND", "REJECTED", "CANCELED", "OTHER")
        name, labels = "nv_inference_request_failure", {"model": "broken", "version": "1"}
        return {reason: of(samples, name, reason=reason, **labels) for reason in reasons}

    before = failures()
    assert infer(server, "broken", {"inputs": [x()]}).status == 500
    assert failures() == before | {"BACKEND": before["BACKEND"] + 1}


def test_refusals_are_counted_by_reason() -> None:
    gate = Gate()
    slow = FakeServable(identity("slow", "FP32").info, gate)
    with running(serving(slow), queue_limit=1) as own, ThreadPoolExecutor() as clients:
        first = clients.submit(infer, own, "slow", {"inputs": [x()]})
        assert gate.entered.wait(20)
        hopeless = infer(own, "slow", {"inputs": [x()], "parameters": {"timeout": 1}})
        waiting = clients.submit(infer, own, "slow", {"inputs": [x()]})
        labels = {"model": "slow", "version": "1"}
        eventually(lambda: of(scrape(own), "nv_inference_pending_request_count", **labels) == 1)
        surplus = infer(own, "slow", {"inputs": [x()]})
        gate.open.set()
        statuses = [first.result().status, waiting.result().status, hopeless.status, surplus.status]
        assert statuses == [200, 200, 503, 503]
        reasons = ("deadline", "queue_full", "rate_limited", "draining", "device_lost", "invalid")
        samples = scrape(own)
        counts = [of(samples, "cohabit_rejected_requests_total", reason=reason, **labels) for reason in reasons]
        assert counts == [1, 1, 0, 0, 0, 0]


def request_message(shape: list[int]) -> bytes:
    message = pb.ModelInferRequest(model_name="adder", raw_input_contents=[bytes(16), bytes(16)])
    for name in "ab":
        message.inputs.add(name=name, datatype="FP32", shape=shape)
    return bytes(message.SerializeToString())


def test_requests_that_do_not_fit_their_model_are_counted(server: Running) -> None:
    def invalid() -> float:
        return of(scrape(server), "cohabit_rejected_requests_total", reason="invalid")

    before = invalid()
    for wrong in (x(name="a", shape=[1, 5]), x(name="a", datatype="INT8"), x(name="nope")):
        assert infer(server, "adder", {"inputs": [wrong, x(name="b")]}).status == 400
    assert infer(server, "adder", b"{").status == 400
    assert ask(server, "POST", "/v2/models/adder/generate", b'{"a": "text"}').status == 400
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(request_message([1, 5]), timeout=20)
    assert invalid() == before + 6


def test_latency_is_from_arrival_to_answer_as_the_front_end_sees_it(server: Running) -> None:
    """Every reading of the server's clock is two seconds after the one before."""

    def latencies() -> list[float]:
        samples, name = scrape(server), "cohabit_request_seconds"
        buckets = [of(samples, f"{name}_bucket", le=f"{bound:g}") for bound in REQUEST_SECONDS]
        return [*buckets, of(samples, f"{name}_count"), of(samples, f"{name}_sum")]

    before = latencies()
    assert infer(server, "adder", {"inputs": [x(name="a"), x(name="b")]}).status == 200
    assert ask(server, "POST", "/v2/models/adder/generate", b'{"a": [0, 0, 0, 0], "b": [1, 1, 1, 1]}').status == 200
    with grpc.insecure_channel(server.grpc) as channel:
        assert channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            request_message([1, 4]), timeout=20
        )
    assert infer(server, "adder", {"inputs": []}).status == 400  # has no latency
    grown = [now - then for now, then in zip(latencies(), before, strict=True)]
    assert grown == [3 * (bound >= 2) for bound in REQUEST_SECONDS] + [3, 6]


def test_the_build_is_described(server: Running) -> None:
    ((labels, value),) = (
        (dict(labels), value) for (name, labels), value in scrape(server).items() if name == "cohabit_build_info"
    )
    assert value == 1
    assert labels["python"] == platform.python_version()
    assert labels["version"] == ask(server, "GET", "/v2").json["version"]


def test_footprints_are_gauges(server: Running) -> None:
    samples = scrape(server)
    assert of(samples, "cohabit_partition_bytes") == 100
    assert of(samples, "cohabit_parameter_bytes") == 400
    assert of(samples, "cohabit_resident_bytes") == 80
    assert of(samples, "cohabit_resident_share") == 0.2
    assert of(samples, "cohabit_predicted_seconds", batch="2") == 0.75
    assert of(samples, "cohabit_activation_bytes", batch="2") == 128
    assert of(samples, "cohabit_bound_seconds", batch="2") == 0.6
    assert of(samples, "cohabit_plan_gap", batch="2") == pytest.approx(0.25)
    assert of(samples, "cohabit_plan_evaluations", batch="2", search="best (genetic)") == 142
    assert of(samples, "cohabit_profile_noise") == 0.5
    assert of(samples, "nv_inference_pending_request_count") == 0


def test_the_device_the_models_and_the_machine_are_described(server: Running) -> None:
    samples = scrape(server)
    for use, nbytes in {"workspace": 100, "partitions": 700, "free": 224}.items():
        assert samples["cohabit_memory_bytes", (("use", use),)] == nbytes
    assert samples["cohabit_lane_busy_seconds_total", (("lane", "swap_in"),)] == 1.5
    computed_s = samples["cohabit_lane_busy_seconds_total", (("lane", "compute"),)]
    assert computed_s == server.engine.report().device.lane_busy_s["compute"]
    assert samples["cohabit_engine_restarts_total", ()] == 0
    assert samples["cohabit_model_ready", (("model", "adder"), ("version", "3"))] == 1
    assert samples["cohabit_model_ready", (("model", "damaged"), ("version", "1"))] == 0
    assert 0 <= samples["nv_cpu_utilization", ()] <= 1
    assert 0 < samples["nv_cpu_memory_used_bytes", ()] < samples["nv_cpu_memory_total_bytes", ()]


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


def test_memory_outside_of_the_arena_is_told_where_there_is_some() -> None:
    assert ("cohabit_outside_arena_bytes", ()) not in machine_samples(DeviceUse())
    assert machine_samples(DeviceUse(outside_bytes=500))["cohabit_outside_arena_bytes", ()] == 500


def test_histograms_count_as_numpy_does() -> None:
    durations = list(10 ** np.random.default_rng(7).uniform(-5, 1.5, 500)) + list(SECONDS)
    histogram = Histogram.of(SECONDS)
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
    """Takes a while to convert its outputs."""

    def execute(self, requests: Sequence[Inputs], rows: int, on_recording: OnRecording | None = None) -> Answer:
        answer = super().execute(requests, rows, on_recording)
        time.sleep(0.01)
        return structs.replace(answer, timing=structs.replace(answer.timing, output_s=0.01))


def test_stages_are_measured_and_add_up_over_requests_and_batch_sizes() -> None:
    with running(serving(HandingOut(identity("one", "FP32").info, lambda x: {"y": x}))) as server:
        for rows in (1, 2, 2):
            assert infer(server, "one", {"inputs": [x([0] * 4 * rows, shape=[rows, 4])]}).status == 200
        (model,) = ask(server, "GET", "/v2/models/one/stats").json["model_stats"]
        us = scrape(server)["nv_inference_compute_output_duration_us", (("model", "one"), ("version", "1"))]
    stats, by_size = model["inference_stats"], {batch["batch_size"]: batch for batch in model["batch_stats"]}
    stages = ("compute_input", "compute_infer", "compute_output")
    assert {size: [batch[stage]["count"] for stage in stages] for size, batch in by_size.items()} == {
        1: [1, 1, 1],
        2: [2, 2, 2],
    }
    for stage in stages:  # one request per execution, so that both count the same
        assert sum(batch[stage]["ns"] for batch in by_size.values()) == pytest.approx(stats[stage]["ns"], abs=16)
    assert by_size[2]["compute_output"]["ns"] >= 2 * 10_000_000
    assert sum(stats[stage]["ns"] for stage in ("queue", *stages)) == pytest.approx(stats["success"]["ns"], abs=16)
    assert us == stats["compute_output"]["ns"] // 1000
