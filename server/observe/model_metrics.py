"""The metrics of every model, under Triton's names where Triton has one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.shapes import Bucket
from server.ipc.catalog import ModelEntry
from server.ipc.statistics import ModelCounters, ModelStatistics
from server.observe.prometheus import Family, Kind, Sample, Value

Read = Callable[["ReadyModel"], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that is ready, and its counters."""

    entry: ModelEntry
    report: ModelCounters


@dataclass(frozen=True, slots=True)
class _Metric:
    name: str
    kind: Kind
    help: str
    read: Read


def families_of(views: Sequence[ReadyModel], requested: Sequence[ModelEntry]) -> Iterator[Family]:
    """Read every metric of these models, and the readiness of each requested one."""
    yield Family(
        "cohabit_model_ready",
        "gauge",
        "Whether a model that was asked for can be served",
        [(_identity(entry), float(entry.is_ready)) for entry in requested],
    )
    for metric in _METRICS:
        yield Family(metric.name, metric.kind, metric.help, _samples(metric, views))


def _samples(metric: _Metric, views: Iterable[ReadyModel]) -> Iterator[Sample]:
    for view in views:
        identity = _identity(view.entry)
        for labels, value in metric.read(view):
            yield {**identity, **labels}, value


def _identity(entry: ModelEntry) -> dict[str, str]:
    return {"model": entry.name, "version": "" if entry.version is None else str(entry.version)}


def _one(name: str, kind: Kind, text: str, value: Callable[[ReadyModel], Value]) -> _Metric:
    return _Metric(name, kind, text, lambda view: [({}, value(view))])


def _counted(name: str, text: str, value: Callable[[ModelStatistics], float]) -> _Metric:
    return _one(name, "counter", text, lambda view: value(view.report.statistics))


def _histogram(name: str, text: str, value: Callable[[ModelStatistics], Value]) -> _Metric:
    return _one(name, "histogram", text, lambda view: value(view.report.statistics))


def _gauge(name: str, text: str, value: Callable[[ReadyModel], float]) -> _Metric:
    return _one(name, "gauge", text, value)


def _by_reason(counts: Callable[[ModelStatistics], Mapping[Any, int]]) -> Read:
    return lambda view: [({"reason": reason}, n) for reason, n in counts(view.report.statistics).items()]


def _by_bucket(seconds: Callable[[ModelEntry], Mapping[Bucket, float]]) -> Read:
    return lambda view: [(_labels(bucket), value) for bucket, value in sorted(seconds(view.entry).items())]


def _labels(bucket: Bucket) -> dict[str, str]:
    """Return the batch size, and the largest sizes of other dynamic dimensions if there are any."""
    sizes = {"sizes": "x".join(map(str, bucket.sizes))} if bucket.sizes else {}
    return {"batch": str(bucket.batch), **sizes}


def _resident_share(entry: ModelEntry) -> float:
    footprint = entry.footprint
    return footprint.resident_bytes / footprint.parameter_bytes if footprint.parameter_bytes else 1.0


def _gaps(entry: ModelEntry) -> Mapping[Bucket, float]:
    predicted, bounds = entry.footprint.predicted_s, entry.footprint.bound_s
    return {bucket: predicted[bucket] / bound - 1 for bucket, bound in bounds.items() if bound > 0}


_METRICS = (
    _counted("nv_inference_request_success", "Number of successful inference requests", lambda s: s.success.count),
    _Metric(
        "nv_inference_request_failure",
        "counter",
        "Number of failed inference requests",
        _by_reason(lambda s: s.failures),
    ),
    _counted(
        "nv_inference_count", "Number of inferences, a batch counting as its size", lambda s: s.inference_count
    ),
    _counted("nv_inference_exec_count", "Number of model executions", lambda s: s.execution_count),
    _counted(
        "nv_inference_request_duration_us",
        "Cumulative microseconds of successful requests",
        lambda s: s.success.ns // 1000,
    ),
    _counted(
        "nv_inference_queue_duration_us",
        "Cumulative microseconds that requests waited",
        lambda s: s.queue.ns // 1000,
    ),
    _counted(
        "nv_inference_compute_input_duration_us",
        "Cumulative microseconds that executions took besides computing",
        lambda s: s.answered.prepare.ns // 1000,
    ),
    _counted(
        "nv_inference_compute_infer_duration_us",
        "Cumulative microseconds that models computed",
        lambda s: s.answered.compute.ns // 1000,
    ),
    _counted(
        "nv_inference_compute_output_duration_us",
        "Cumulative microseconds that executions took to hand out their outputs",
        lambda s: s.answered.output.ns // 1000,
    ),
    _gauge(
        "nv_inference_pending_request_count",
        "Number of requests that wait for execution",
        lambda view: view.report.pending,
    ),
    _histogram(
        "nv_inference_first_response_histogram_ms",
        "Milliseconds from a request's arrival to its response",
        lambda s: s.response_ms,
    ),
    _histogram("cohabit_queue_seconds", "Seconds that answered requests waited in the queue", lambda s: s.queued),
    _histogram(
        "cohabit_compute_seconds",
        "Seconds that executions computed, their stalls included",
        lambda s: s.computed,
    ),
    _counted("cohabit_swapped_bytes", "Bytes copied in and out for inferences", lambda s: s.swapped_bytes),
    _counted("cohabit_stall_seconds", "Seconds that computing waited for parameters", lambda s: s.stall_s),
    _counted(
        "cohabit_prefetch_hits",
        "Executions whose leading copies had begun during the previous execution",
        lambda s: s.prefetch_hits,
    ),
    _Metric(
        "cohabit_rejected_requests",
        "counter",
        "Requests that were refused before they ran",
        _by_reason(lambda s: s.rejections),
    ),
    _gauge(
        "cohabit_partition_bytes",
        "Device memory of the model's own",
        lambda view: view.entry.footprint.partition_bytes,
    ),
    _gauge(
        "cohabit_parameter_bytes",
        "Size of the model's parameters",
        lambda view: view.entry.footprint.parameter_bytes,
    ),
    _gauge(
        "cohabit_resident_bytes",
        "Parameters that stay in device memory between requests",
        lambda view: view.entry.footprint.resident_bytes,
    ),
    _gauge("cohabit_compute_lane", "Which compute lane executes the model", lambda view: view.entry.footprint.lane),
    _gauge(
        "cohabit_resident_share",
        "Part of the parameters that stays in device memory",
        lambda view: _resident_share(view.entry),
    ),
    _Metric(
        "cohabit_predicted_seconds",
        "gauge",
        "Predicted seconds of one inference",
        _by_bucket(lambda entry: entry.footprint.predicted_s),
    ),
    _Metric(
        "cohabit_bound_seconds",
        "gauge",
        "Lower bound of one inference's seconds in this memory",
        _by_bucket(lambda entry: entry.footprint.bound_s),
    ),
    _Metric("cohabit_plan_gap", "gauge", "Predicted seconds over the lower bound, less 1", _by_bucket(_gaps)),
    _Metric(
        "cohabit_captured",
        "gauge",
        "Whether an execution is launched as one graph, where the device has graphs",
        lambda view: [(_labels(b), float(c.refused is None)) for b, c in sorted(view.report.captures.items())],
    ),
    _Metric(
        "cohabit_graph_bytes",
        "gauge",
        "Device memory that captured graphs take outside of the arena",
        lambda view: (
            [({}, float(sum(c.graph_bytes for c in found.values())))] if (found := view.report.captures) else []
        ),
    ),
    _Metric(
        "cohabit_measured_over_predicted",
        "gauge",
        "Measured over predicted seconds of recent executions",
        lambda view: [({}, view.report.correction)] if view.entry.footprint.predicted_s else [],
    ),
)
