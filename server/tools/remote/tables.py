"""Tables for people: models, statistics, and the live view."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.errors import format_bytes
from server.tools.remote.rows import ModelRow, Snapshot
from server.tools.remote.samples import Samples

_NOTHING = "-"
_WIDE = 10
"""More columns than this are set close to each other."""
_STATES = {"READY": "green", "LOADING": "yellow", "UNLOADING": "yellow", "UNAVAILABLE": "red"}
_TOP_COLUMNS = (
    "model",
    "answers\nper s",
    "errors\nper s",
    "refused\nper s",
    "rows per\nrun",
    "waiting",
    "queue ms\np50 / p99",
    "compute ms\np50 / p99",
    "stalled",
    "partition",
    "resident",
    "plan\ngap",
    "meas.\n/ pred.",
)


def models(index: Iterable[Mapping[str, str]], metrics: Samples | None) -> Table:
    """The repository's models; what memory they hold where the metrics can be read."""
    table = _table(
        "model", "version", "state", "partition", "resident", "reason", left=("model", "state", "reason")
    )
    for entry in index:
        state = entry.get("state", "")
        own = metrics.of_model(entry["name"]) if metrics is not None else Samples({})
        table.add_row(
            Text(entry["name"]),
            entry.get("version", _NOTHING),
            Text(state or "not loaded", style=_STATES.get(state, "dim")),
            _bytes(own.get("cohabit_partition_bytes")),
            _share(own.get("cohabit_resident_share")),
            Text(entry.get("reason", "")),
        )
    return table


def statistics(models: Iterable[Mapping[str, Any]]) -> Table:
    """What every model has done since it was loaded; times are means."""
    table = _table(
        "model", "version", "answered", "failed", "executions", "rows/exec", "queue", "compute", "batches",
        left=("model", "batches"),
    )  # fmt: skip
    for model in models:
        stats = model["inference_stats"]
        executions = model["execution_count"]
        table.add_row(
            Text(model["name"]),
            model["version"],
            str(stats["success"]["count"]),
            str(stats["fail"]["count"]),
            str(executions),
            f"{model['inference_count'] / executions:.2f}" if executions else _NOTHING,
            _mean(stats["queue"]),
            _mean(stats["compute_infer"]),
            " ".join(f"{b['batch_size']}:{b['compute_infer']['count']}" for b in model["batch_stats"]),
        )
    return table


def top(snapshot: Snapshot, title: str) -> RenderableType:
    """The live view: the server in two lines, a row for each model."""
    memory = snapshot.memory_bytes
    lanes = "  ".join(f"{lane} {share:.0%}" for lane, share in sorted(snapshot.lane_busy_share.items()))
    cpu = "" if snapshot.cpu_utilization is None else f"  cpu {snapshot.cpu_utilization:.0%}"
    head = Text(
        f"{title}   {snapshot.answered_per_s:.1f} answers/s   {snapshot.pending:.0f} waiting"
        f"   swapping {format_bytes(round(snapshot.swapped_bytes_per_s))}/s\n"
        f"memory: {'  '.join(f'{use} {format_bytes(round(n))}' for use, n in memory.items())}   busy: {lanes}{cpu}"
    )
    table = _table(*_TOP_COLUMNS, left=("model",))
    for row in snapshot.models:
        table.add_row(*_cells(row), style=None if row.ready else "dim")
    return Group(head, table)


def _cells(row: ModelRow) -> list[RenderableType]:
    return [
        Text(row.name if row.ready else f"{row.name} (not ready)"),
        f"{row.answered_per_s:.1f}",
        _alarm(row.failed_per_s),
        _alarm(row.rejected_per_s),
        _number(row.rows_per_execution),
        _NOTHING if row.pending is None else f"{row.pending:.0f}",
        _pair(row.queue_p50_s, row.queue_p99_s),
        _pair(row.compute_p50_s, row.compute_p99_s),
        _share(row.stall_share),
        _bytes(row.partition_bytes),
        _share(row.resident_share),
        _share(row.plan_gap),
        _number(row.measured_over_predicted),
    ]


def _table(*columns: str, left: Iterable[str]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=0 if len(columns) > _WIDE else (0, 1))
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=column not in ("reason",))
    return table


def _bytes(nbytes: float | None) -> str:
    return _NOTHING if nbytes is None else format_bytes(round(nbytes))


def _share(share: float | None) -> str:
    return _NOTHING if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.2f}"


def _alarm(per_s: float) -> Text:
    return Text(f"{per_s:.1f}", style="bold red" if per_s else "")


def _time(seconds: float | None) -> str:
    return _NOTHING if seconds is None else f"{seconds * 1e3:.1f} ms"


def _pair(low_s: float | None, high_s: float | None) -> str:
    return _NOTHING if low_s is None or high_s is None else f"{low_s * 1e3:.3g} / {high_s * 1e3:.3g}"


def _mean(total: Mapping[str, int]) -> str:
    return _time(total["ns"] / total["count"] / 1e9 if total["count"] else None)
