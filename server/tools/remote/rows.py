"""What `top` shows, worked out from two readings of the metrics: plain data, for a table or for scripts."""

from dataclasses import dataclass

from server.tools.remote.samples import Samples


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model over the time between two readings. None stands for what nobody can tell."""

    name: str
    version: str | None
    ready: bool
    answered_per_s: float
    failed_per_s: float
    rejected_per_s: float
    rows_per_execution: float | None
    pending: float | None
    queue_p50_s: float | None
    queue_p99_s: float | None
    compute_p50_s: float | None
    compute_p99_s: float | None
    stall_share: float | None
    """Part of the computing time in which parameters were waited for."""
    partition_bytes: float | None
    resident_share: float | None
    plan_gap: float | None
    """Of the plan for the smallest batch."""
    measured_over_predicted: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server over `seconds`."""

    seconds: float
    answered_per_s: float
    pending: float
    memory_bytes: dict[str, float]
    lane_busy_share: dict[str, float]
    cpu_utilization: float | None
    swapped_bytes_per_s: float
    models: tuple[ModelRow, ...]


def snapshot(before: Samples, now: Samples, seconds: float) -> Snapshot:
    """Compare two readings that are `seconds` apart."""
    grown = now.since(before)
    versions = {
        dict(labels)["model"]: dict(labels)["version"]
        for (name, labels) in now.values
        if name == "nv_inference_request_success"
    }
    ready = now.labelled("cohabit_model_ready", "model")
    return Snapshot(
        seconds=seconds,
        answered_per_s=sum(grown.labelled("nv_inference_request_success", "model").values()) / seconds,
        pending=sum(now.labelled("nv_inference_pending_request_count", "model").values()),
        memory_bytes=now.labelled("cohabit_memory_bytes", "use"),
        lane_busy_share={
            lane: busy_s / seconds for lane, busy_s in grown.labelled("cohabit_lane_busy_seconds", "lane").items()
        },
        cpu_utilization=now.get("nv_cpu_utilization"),
        swapped_bytes_per_s=sum(grown.labelled("cohabit_swapped_bytes", "model").values()) / seconds,
        models=tuple(
            _row(name, versions.get(name), ready.get(name) == 1, now.of_model(name), grown.of_model(name), seconds)
            for name in sorted(ready.keys() | versions.keys())
        ),
    )


def _row(name: str, version: str | None, ready: bool, now: Samples, grown: Samples, seconds: float) -> ModelRow:
    gaps = now.labelled("cohabit_plan_gap", "batch")
    executions = grown.get("nv_inference_exec_count")
    computed_s = grown.get("cohabit_compute_seconds_sum")
    return ModelRow(
        name=name,
        version=version,
        ready=ready,
        answered_per_s=(grown.get("nv_inference_request_success") or 0.0) / seconds,
        failed_per_s=sum(grown.labelled("nv_inference_request_failure", "reason").values()) / seconds,
        rejected_per_s=sum(grown.labelled("cohabit_rejected_requests", "reason").values()) / seconds,
        rows_per_execution=_over(grown.get("nv_inference_count"), executions),
        pending=now.get("nv_inference_pending_request_count"),
        queue_p50_s=grown.quantile("cohabit_queue_seconds", 0.5),
        queue_p99_s=grown.quantile("cohabit_queue_seconds", 0.99),
        compute_p50_s=grown.quantile("cohabit_compute_seconds", 0.5),
        compute_p99_s=grown.quantile("cohabit_compute_seconds", 0.99),
        stall_share=_over(grown.get("cohabit_stall_seconds"), computed_s),
        partition_bytes=now.get("cohabit_partition_bytes"),
        resident_share=now.get("cohabit_resident_share"),
        plan_gap=gaps[min(gaps, key=int)] if gaps else None,
        measured_over_predicted=now.get("cohabit_measured_over_predicted"),
    )


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
