"""The live view of `cohabit top`: figures of a server and its models between two readings of its metrics."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from cohabit.planner.errors import format_bytes
from cohabit.server.commands.remote.samples import Samples
from cohabit.server.commands.remote.tables import NOTHING, bytes_cell, share_cell
from cohabit.server.format import make_table

Snapshot = dict[str, Any]
"""Figures by name; those of each model in a list `models`. None is a figure that the server does not report."""


def snapshot(before: Samples, now: Samples, seconds: float) -> Snapshot:
    """Compare two readings that are `seconds` apart."""
    grown = now.since(before)
    ready = {
        (dict(labels)["model"], dict(labels)["version"]): value == 1
        for (name, labels), value in now.values.items()
        if name == "cohabit_model_ready"
    }
    busy_s = grown.labelled("cohabit_lane_busy_seconds_total", "lane")
    return {
        "seconds": seconds,
        "answered_per_s": grown.total("nv_inference_request_success") / seconds,
        "pending": now.total("nv_inference_pending_request_count"),
        "memory_bytes": now.labelled("cohabit_memory_bytes", "use"),
        "lane_busy_share": {lane: value / seconds for lane, value in busy_s.items()},
        "cpu_utilization": now.get("nv_cpu_utilization"),
        "swapped_bytes_per_s": grown.total("cohabit_swapped_bytes_total") / seconds,
        "models": [
            {
                "name": name,
                "version": version or None,
                "ready": is_ready,
                **_figures(now.of_model(name, version), grown.of_model(name, version), seconds),
            }
            for (name, version), is_ready in sorted(ready.items(), key=_by_number)
        ],
    }


def _figures(now: Samples, grown: Samples, seconds: float) -> dict[str, float | None]:
    gaps = [
        (_bucket(dict(labels)), gap) for (name, labels), gap in now.values.items() if name == "cohabit_plan_gap"
    ]
    return {
        "answered_per_s": (grown.get("nv_inference_request_success") or 0.0) / seconds,
        "failed_per_s": grown.total("nv_inference_request_failure", "reason") / seconds,
        "rejected_per_s": grown.total("cohabit_rejected_requests_total", "reason") / seconds,
        "rows_per_execution": _over(grown.get("nv_inference_count"), grown.get("nv_inference_exec_count")),
        "pending": now.get("nv_inference_pending_request_count"),
        "queue_p50_s": grown.quantile("cohabit_queue_seconds", 0.5),
        "queue_p99_s": grown.quantile("cohabit_queue_seconds", 0.99),
        "compute_p50_s": grown.quantile("cohabit_compute_seconds", 0.5),
        "compute_p99_s": grown.quantile("cohabit_compute_seconds", 0.99),
        "stall_share": _over(grown.get("cohabit_stall_seconds_total"), grown.get("cohabit_compute_seconds_sum")),
        "partition_bytes": now.get("cohabit_partition_bytes"),
        "resident_share": now.get("cohabit_resident_share"),
        "plan_gap": min(gaps)[1] if gaps else None,  # of the smallest bucket
        "measured_over_predicted": now.get("cohabit_measured_over_predicted"),
    }


def _by_number(row: tuple[tuple[str, str], bool]) -> tuple[str, int]:
    (name, version), _ = row
    return name, int(version or 0)


def _bucket(labels: Mapping[str, str]) -> list[int]:
    """Return a batch size, then the sizes of other dynamic dimensions."""
    sizes = labels["sizes"].split("x") if "sizes" in labels else []
    return [int(labels["batch"]), *map(int, sizes)]


def _over(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def view(shown: Snapshot, title: str) -> RenderableType:
    """Return the server's figures in two lines, and a table with a row per model, or per version of one."""
    memory = "  ".join(f"{use} {format_bytes(round(n))}" for use, n in shown["memory_bytes"].items())
    lanes = "  ".join(f"{lane} {share:.0%}" for lane, share in sorted(shown["lane_busy_share"].items()))
    cpu = "" if shown["cpu_utilization"] is None else f"  cpu {shown['cpu_utilization']:.0%}"
    head = Text(
        f"{title}   {shown['answered_per_s']:.1f} answers/s   {shown['pending']:.0f} waiting"
        f"   swapping {format_bytes(round(shown['swapped_bytes_per_s']))}/s\n"
        f"memory: {memory}   busy: {lanes}{cpu}"
    )
    table = make_table("model", *_COLUMNS, left=("model",), padding=0)
    versions = Counter(row["name"] for row in shown["models"])
    for row in shown["models"]:
        label = row["name"] if versions[row["name"]] == 1 else f"{row['name']} version {row['version']}"
        name = Text(label if row["ready"] else f"{label} (not ready)")
        table.add_row(name, *(cell(row) for cell in _COLUMNS.values()), style=None if row["ready"] else "dim")
    return Group(head, table)


def _number(key: str, form: str) -> Callable[[Snapshot], RenderableType]:
    return lambda row: NOTHING if row[key] is None else format(row[key], form)


def _alarm(key: str) -> Callable[[Snapshot], RenderableType]:
    return lambda row: Text(f"{row[key]:.1f}", style="bold red" if row[key] else "")


def _quantiles(stage: str) -> Callable[[Snapshot], RenderableType]:
    def cell(row: Snapshot) -> str:
        low_s, high_s = row[f"{stage}_p50_s"], row[f"{stage}_p99_s"]
        return NOTHING if low_s is None or high_s is None else f"{low_s * 1e3:.3g} / {high_s * 1e3:.3g}"

    return cell


_COLUMNS: dict[str, Callable[[Snapshot], RenderableType]] = {
    "answers\nper s": _number("answered_per_s", ".1f"),
    "errors\nper s": _alarm("failed_per_s"),
    "refused\nper s": _alarm("rejected_per_s"),
    "rows per\nrun": _number("rows_per_execution", ".2f"),
    "waiting": _number("pending", ".0f"),
    "queue ms\np50 / p99": _quantiles("queue"),
    "compute ms\np50 / p99": _quantiles("compute"),
    "stalled": lambda row: share_cell(row["stall_share"]),
    "partition": lambda row: bytes_cell(row["partition_bytes"]),
    "resident": lambda row: share_cell(row["resident_share"]),
    "plan\ngap": lambda row: share_cell(row["plan_gap"]),
    "meas.\n/ pred.": _number("measured_over_predicted", ".2f"),
}
