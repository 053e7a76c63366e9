"""The metrics, under Triton's names where Triton has one, and the text of `/metrics`."""

import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from cohabit.planner.shapes import Bucket
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.model import ModelFootprint, ModelKey
from cohabit.server.ipc.statistics import (
    REQUEST_SECONDS,
    EngineReport,
    Histogram,
    ModelCounters,
    ModelStatistics,
)
from cohabit.server.observe.machine import Machine
from cohabit.server.observe.prometheus import Family, Kind, Sample, single, written
from cohabit.server.protocol.descriptions import product_version


def _seconds() -> Histogram:
    return Histogram.of(REQUEST_SECONDS)


@dataclass(frozen=True, slots=True)
class FrontendTimes:
    """Seconds of one model's requests, measured by the front end."""

    answer: Histogram = field(default_factory=_seconds)
    """From the arrival of an answered request to its answer."""
    first_token: Histogram = field(default_factory=_seconds)
    """From a prompt to the first token of its text."""
    later_token: Histogram = field(default_factory=_seconds)
    """From one token to the next."""


@dataclass(frozen=True, slots=True)
class MetricSource:
    """The data for the metrics of one READY model."""

    entry: ModelEntry
    report: ModelCounters
    times: FrontendTimes


Metric = Callable[[Sequence[MetricSource]], Family]
"""Reads a metric of every model."""


def metrics_page(
    entries: Sequence[ModelEntry],
    report: EngineReport,
    times: Mapping[ModelKey, FrontendTimes],
    machine: Machine | None,
    restarts: int,
    request_bytes: int,
) -> bytes:
    """Write the metrics of the models, the device and the machine in Prometheus' text format. Any thread."""
    views = [
        MetricSource(
            entry,
            report.models.get(entry.key) or ModelCounters(ModelStatistics()),
            times.get(entry.key) or FrontendTimes(),
        )
        for entry in entries
        if entry.is_ready
    ]
    readiness = [(_identity(entry), float(entry.is_ready)) for entry in entries if entry.wanted]
    families = [
        Family(
            "cohabit_build_info", "gauge", "Version of the server, as labels; the value is 1", [(_build(), 1.0)]
        ),
        Family("cohabit_model_ready", "gauge", "1 if a requested model can serve, else 0", readiness),
        *(metric(views) for metric in _METRICS),
        single(
            "cohabit_engine_restarts_total",
            "counter",
            "Restarts of the engine process",
            restarts,
        ),
        single(
            "cohabit_request_memory_bytes",
            "gauge",
            "Shared memory held by unanswered requests",
            request_bytes,
        ),
    ]
    return written([*families, *(() if machine is None else machine.families(report.device))])


def _build() -> dict[str, str]:
    """Return the versions of the front end's software."""
    libraries = {"aiohttp": version("aiohttp"), "grpc": version("grpcio")}
    return {
        "version": product_version(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        **libraries,
    }


def _metric(name: str, kind: Kind, text: str, read: Callable[[MetricSource], Iterable[Sample]]) -> Metric:
    def samples(views: Sequence[MetricSource]) -> Iterator[Sample]:
        for view in views:
            identity = _identity(view.entry)
            for labels, value in read(view):
                yield {**identity, **labels}, value

    return lambda views: Family(name, kind, text, samples(views))


def _identity(entry: ModelEntry) -> dict[str, str]:
    return {"model": entry.name, "version": "" if entry.version is None else str(entry.version)}


def _counter(name: str, text: str, value: Callable[[ModelStatistics], float]) -> Metric:
    return _metric(name, "counter", text, lambda view: [({}, value(view.report.statistics))])


def _microseconds(name: str, text: str, seconds: Callable[[ModelStatistics], float]) -> Metric:
    return _counter(name, text, lambda s: round(seconds(s) * 1e9) // 1000)


def _by_reason(name: str, text: str, counts: Callable[[ModelStatistics], Mapping[Any, int]]) -> Metric:
    def read(view: MetricSource) -> Iterable[Sample]:
        return [({"reason": reason}, count) for reason, count in counts(view.report.statistics).items()]

    return _metric(name, "counter", text, read)


def _histogram(name: str, text: str, value: Callable[[MetricSource], Histogram]) -> Metric:
    """A histogram of the first model, and of each other one from its first value on.

    A thousand idle models would have megabytes of zeros. The first one shows queries and dashboards the name and the
    bounds.
    """
    every = _metric(name, "histogram", text, lambda view: [({}, value(view))])
    return lambda views: every([view for n, view in enumerate(views) if n == 0 or any(value(view).counts)])


def _of_texts(name: str, text: str, read: Callable[[MetricSource], Histogram]) -> Metric:
    """A metric of models that generate texts."""
    return _metric(name, "histogram", text, lambda view: [({}, read(view))] if any(read(view).counts) else [])


def _footprint(name: str, text: str, value: Callable[[ModelFootprint], float]) -> Metric:
    return _metric(name, "gauge", text, lambda view: [({}, value(view.entry.footprint))])


def _by_bucket(name: str, text: str, values: Callable[[ModelFootprint], Mapping[Bucket, float]]) -> Metric:
    def read(view: MetricSource) -> Iterable[Sample]:
        return [(_labels(bucket), value) for bucket, value in sorted(values(view.entry.footprint).items())]

    return _metric(name, "gauge", text, read)


def _labels(bucket: Bucket) -> dict[str, str]:
    """Return the batch size, and the maximum sizes of other dynamic dimensions, if any."""
    sizes = {"sizes": "x".join(map(str, bucket.sizes))} if bucket.sizes else {}
    return {"batch": str(bucket.batch), **sizes}


def _resident_share(footprint: ModelFootprint) -> float:
    return footprint.resident_bytes / footprint.parameter_bytes if footprint.parameter_bytes else 1.0


def _gaps(footprint: ModelFootprint) -> Mapping[Bucket, float]:
    bounds = footprint.bound_s
    return {bucket: footprint.predicted_s[bucket] / bound - 1 for bucket, bound in bounds.items() if bound > 0}


def _graph_bytes(view: MetricSource) -> Iterable[Sample]:
    captures = view.report.captures.values()
    return [({}, float(sum(capture.graph_bytes for capture in captures)))] if captures else []


_METRICS = (
    _counter("nv_inference_request_success", "Number of successful inference requests", lambda s: s.answered.count),
    _by_reason("nv_inference_request_failure", "Number of failed inference requests", lambda s: s.failures),
    _counter(
        "nv_inference_count", "Number of inferences, a batch counting as its size", lambda s: s.inference_count
    ),
    _counter("nv_inference_exec_count", "Number of model executions", lambda s: s.execution_count),
    _microseconds(
        "nv_inference_request_duration_us",
        "Cumulative duration of successful requests, in microseconds",
        lambda s: s.success_s,
    ),
    _microseconds(
        "nv_inference_queue_duration_us",
        "Cumulative queueing time of requests, in microseconds",
        lambda s: s.queue_s,
    ),
    _microseconds(
        "nv_inference_compute_input_duration_us",
        "Cumulative time to prepare inputs, in microseconds",
        lambda s: s.answered.prepare_s,
    ),
    _microseconds(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute time, in microseconds",
        lambda s: s.answered.compute_s,
    ),
    _microseconds(
        "nv_inference_compute_output_duration_us",
        "Cumulative time to deliver outputs, in microseconds",
        lambda s: s.answered.output_s,
    ),
    _metric(
        "nv_inference_pending_request_count",
        "gauge",
        "Requests waiting for execution",
        lambda view: [({}, view.report.pending)],
    ),
    _histogram(
        "nv_inference_first_response_histogram_ms",
        "Milliseconds from a request's arrival to its response",
        lambda view: view.report.statistics.response_ms,
    ),
    _histogram(
        "cohabit_request_seconds",
        "Seconds from a request's arrival to its answer, measured in the front end",
        lambda view: view.times.answer,
    ),
    _of_texts(
        "cohabit_first_token_seconds",
        "Seconds from a prompt to the first generated token",
        lambda view: view.times.first_token,
    ),
    _of_texts(
        "cohabit_later_token_seconds",
        "Seconds between generated tokens",
        lambda view: view.times.later_token,
    ),
    _histogram(
        "cohabit_queue_seconds",
        "Queueing time of answered requests, in seconds",
        lambda view: view.report.statistics.queued,
    ),
    _histogram(
        "cohabit_compute_seconds",
        "Compute time of executions, including stalls, in seconds",
        lambda view: view.report.statistics.computed,
    ),
    _counter("cohabit_swapped_bytes_total", "Bytes swapped in and out by inferences", lambda s: s.swapped_bytes),
    _counter("cohabit_stall_seconds_total", "Seconds that compute stalled on parameters", lambda s: s.stall_s),
    _by_reason("cohabit_rejected_requests_total", "Requests refused before execution", lambda s: s.rejections),
    _footprint(
        "cohabit_partition_bytes",
        "Bytes of the model's partition, which models with nearly the same weights have in common",
        lambda f: f.partition_bytes,
    ),
    _footprint("cohabit_parameter_bytes", "Size of the model's parameters", lambda f: f.parameter_bytes),
    _footprint(
        "cohabit_resident_bytes",
        "Bytes of parameters kept in device memory between requests",
        lambda f: f.resident_bytes,
    ),
    _footprint("cohabit_compute_lane", "Index of the model's compute lane", lambda f: f.lane),
    _footprint("cohabit_resident_share", "Fraction of the parameters kept in device memory", _resident_share),
    _by_bucket("cohabit_activation_bytes", "Bytes of activations in the workspace", lambda f: f.activation_bytes),
    _by_bucket(
        "cohabit_predicted_seconds", "Predicted latency of one inference, in seconds", lambda f: f.predicted_s
    ),
    _by_bucket(
        "cohabit_bound_seconds",
        "Lower bound on the latency of one inference in this memory, in seconds",
        lambda f: f.bound_s,
    ),
    _by_bucket("cohabit_plan_gap", "Predicted latency divided by the lower bound, minus 1", _gaps),
    _metric(
        "cohabit_plan_evaluations",
        "gauge",
        "Candidates that the search tried for the plan in use",
        lambda view: [
            ({**_labels(bucket), "search": search}, evaluations)
            for bucket, (search, evaluations) in sorted(view.entry.footprint.searches.items())
        ],
    ),
    _metric(
        "cohabit_profile_noise",
        "gauge",
        "Fraction by which other work disturbed the measurement of the plans' times",
        lambda view: [] if view.entry.footprint.noise is None else [({}, view.entry.footprint.noise)],
    ),
    _metric(
        "cohabit_sequences",
        "gauge",
        "Sequences with kept state",
        lambda view: [({}, view.report.sequences)],
    ),
    _metric(
        "cohabit_state_bytes",
        "gauge",
        "Bytes of sequence state",
        lambda view: [({}, view.report.state_bytes)],
    ),
    _metric(
        "cohabit_captured",
        "gauge",
        "1 if executions replay one CUDA graph, else 0",
        lambda view: [(_labels(b), float(c.refused is None)) for b, c in sorted(view.report.captures.items())],
    ),
    _metric("cohabit_graph_bytes", "gauge", "Bytes of captured graphs outside the arena", _graph_bytes),
    _metric(
        "cohabit_measured_over_predicted",
        "gauge",
        "Measured divided by predicted time of recent executions",
        lambda view: [({}, view.report.correction)] if view.entry.footprint.predicted_s else [],
    ),
)
