"""Prometheus metrics, under Triton's names where Triton has one.

Written by hand, because prometheus_client appends `_total` to counters, and dashboards know Triton's names.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from server.registry import Entry, Registry, State

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample = tuple[dict[str, str], float]


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Callable[[Entry], Iterable[Sample]]


def render(registry: Registry, pending: Callable[[str], int]) -> bytes:
    """Write every metric of every model that is ready."""
    entries = [entry for entry in registry if entry.state is State.READY]
    metrics = (*_METRICS, _pending(pending))
    return "".join(line for metric in metrics for line in _lines(metric, entries)).encode()


def _lines(metric: Metric, entries: Iterable[Entry]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.kind}\n"
    for entry in entries:
        identity = {"model": entry.name, "version": str(entry.version)}
        for labels, value in metric.samples(entry):
            shown = ",".join(f'{key}="{text}"' for key, text in (identity | labels).items())
            yield f"{metric.name}{{{shown}}} {value:.17g}\n"


def _counter(name: str, description: str, value: Callable[[Entry], float]) -> Metric:
    return Metric(name, "counter", description, lambda entry: [({}, value(entry))])


def _gauge(name: str, description: str, value: Callable[[Entry], float]) -> Metric:
    return Metric(name, "gauge", description, lambda entry: [({}, value(entry))])


def _pending(pending: Callable[[str], int]) -> Metric:
    return _gauge(
        "nv_inference_pending_request_count",
        "Number of requests that wait for execution",
        lambda entry: pending(entry.name),
    )


def _failures(entry: Entry) -> Iterable[Sample]:
    return [({"reason": reason}, count) for reason, count in entry.statistics.failures.items()]


def _predictions(entry: Entry) -> Iterable[Sample]:
    return [({"batch": str(b)}, seconds) for b, seconds in sorted(entry.footprint.predicted_s.items())]


_METRICS = (
    _counter(
        "nv_inference_request_success",
        "Number of successful inference requests",
        lambda e: e.statistics.success.count,
    ),
    Metric("nv_inference_request_failure", "counter", "Number of failed inference requests", _failures),
    _counter(
        "nv_inference_count",
        "Number of inferences, a batch counting as its size",
        lambda e: e.statistics.inference_count,
    ),
    _counter("nv_inference_exec_count", "Number of model executions", lambda e: e.statistics.execution_count),
    _counter(
        "nv_inference_request_duration_us",
        "Cumulative microseconds of successful requests",
        lambda e: e.statistics.success.ns // 1000,
    ),
    _counter(
        "nv_inference_queue_duration_us",
        "Cumulative microseconds that requests waited",
        lambda e: e.statistics.queue.ns // 1000,
    ),
    _counter(
        "nv_inference_compute_input_duration_us",
        "Cumulative microseconds between the queue and the model",
        lambda e: e.statistics.prepare.ns // 1000,
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "Cumulative microseconds that models computed",
        lambda e: e.statistics.compute.ns // 1000,
    ),
    _counter(
        "cohabit_swapped_bytes", "Bytes copied in and out for inferences", lambda e: e.statistics.swapped_bytes
    ),
    _counter(
        "cohabit_stall_seconds", "Seconds that computing waited for parameters", lambda e: e.statistics.stall_s
    ),
    _gauge("cohabit_partition_bytes", "Device memory of the model's own", lambda e: e.footprint.partition_bytes),
    _gauge("cohabit_parameter_bytes", "Size of the model's parameters", lambda e: e.footprint.parameter_bytes),
    _gauge(
        "cohabit_resident_bytes",
        "Parameters that stay in device memory between requests",
        lambda e: e.footprint.resident_bytes,
    ),
    Metric("cohabit_predicted_seconds", "gauge", "Predicted seconds of one inference", _predictions),
)
