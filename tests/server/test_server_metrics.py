"""Prometheus metrics under the names that dashboards know."""

import http.client
import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from server_fakes import Running
from server_http import infer, x

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="(.*?)"')


@dataclass(frozen=True)
class MetricsAddress:
    """What the request helpers need of a server."""

    port: int


def metrics_address(server: Running) -> MetricsAddress:
    return MetricsAddress(int(server.server.metrics_url.removesuffix("/metrics").rpartition(":")[2]))


def scrape(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    host, _, port = server.server.metrics_url.removeprefix("http://").removesuffix("/metrics").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    text = response.read().decode()
    connection.close()
    assert list(text_string_to_metric_families(text))  # which would show counters as NAME_total
    samples = (_SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return {(s[1], tuple(sorted(_LABEL.findall(s[2])))): float(s[3]) for s in samples if s}


def value(server: Running, name: str, **labels: str) -> float:
    return scrape(server)[name, tuple(sorted({"model": "adder", "version": "3", **labels}.items()))]


def test_every_metric_is_there(server: Running) -> None:
    names = {name for name, _ in scrape(server)}
    assert names == {
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_pending_request_count",
        "cohabit_partition_bytes",
        "cohabit_parameter_bytes",
        "cohabit_resident_bytes",
        "cohabit_predicted_seconds",
        "cohabit_swapped_bytes",
        "cohabit_stall_seconds",
    }


def test_counters_follow_inferences(server: Running) -> None:
    def counters() -> list[float]:
        names = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
        return [value(server, name) for name in (*names, "cohabit_swapped_bytes", "cohabit_stall_seconds")]

    before = counters()
    pair = [x([0] * 8, name=name, shape=[2, 4]) for name in "ab"]
    assert infer(server, "adder", {"inputs": pair}).status == 200
    assert [after - b for after, b in zip(counters(), before, strict=True)] == [1, 2, 1, 1000, 0.25]


def test_failures_are_counted_by_reason(server: Running) -> None:
    broken = {"model": "broken", "version": "1"}
    before = value(server, "nv_inference_request_failure", reason="BACKEND", **broken)
    assert infer(server, "broken", {"inputs": [x()]}).status == 500
    assert value(server, "nv_inference_request_failure", reason="BACKEND", **broken) == before + 1
    for reason in ("REJECTED", "CANCELED", "OTHER"):
        assert value(server, "nv_inference_request_failure", reason=reason) == 0


def test_footprints_are_gauges(server: Running) -> None:
    assert value(server, "cohabit_partition_bytes") == 100
    assert value(server, "cohabit_parameter_bytes") == 400
    assert value(server, "cohabit_resident_bytes") == 80
    assert value(server, "cohabit_predicted_seconds", batch="2") == 0.75
    assert value(server, "nv_inference_pending_request_count") == 0
