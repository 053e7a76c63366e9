"""Draws a deployment as a table: each model's bytes, its resident share, and its predicted times."""

from collections import Counter
from collections.abc import Sequence

from cohabit.planner.errors import format_bytes
from cohabit.planner.sizing.deployment import ONE_REGION, Deployment, DeploymentEntry
from cohabit.server.placement.device_memory import PlacedModel

_BAR_CELLS = 16
_COLUMNS = ("model", "offset", "partition", "weights", "resident", "", "predicted", "bound", "resident run")
_TEXTS = ("model", "")
"""Columns that are aligned to the left."""


def draw(deployment: Deployment, placed: Sequence[PlacedModel]) -> str:
    """Return the memory map as text; `placed` is in the order of the entries. Several versions have their numbers."""
    several = deployment.lanes > 1
    columns = (*_COLUMNS, "lane") if several else _COLUMNS
    versions = Counter(model.key.name for model in placed)
    rows = [
        [
            model.key.name if versions[model.key.name] == 1 else f"{model.key.name} version {model.key.version}",
            *_cells(entry, model.prepared.weight_bytes, shared=deployment.layout in ONE_REGION),
            *([str(model.lane)] if several else []),
        ]
        for entry, model in zip(deployment.entries, placed, strict=True)
    ]
    workspaces = [[*row, *[""] * (len(columns) - len(row))] for row in _workspaces(deployment)]
    widths = [max(len(row[n]) for row in (columns, *rows, *workspaces)) for n in range(len(columns))]
    rule = "─" * (sum(widths) + 2 * len(widths))
    lines = [_title(deployment), _line(columns, columns, widths), rule]
    lines += [_line(row, columns, widths) for row in rows]
    lines += [rule, *(_line(row, columns, widths) for row in workspaces)]
    return "\n".join(lines)


def _line(cells: Sequence[str], columns: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.ljust(width) if column in _TEXTS else cell.rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    return f" {'  '.join(aligned)}".rstrip()


def _workspaces(deployment: Deployment) -> Sequence[Sequence[str]]:
    """Return a row for each lane's workspace, from the arena's bottom up."""
    each, lanes = deployment.workspace_bytes, range(deployment.lanes)
    rows = [["workspace", format_bytes(lane * each), format_bytes(each)] for lane in lanes]
    return rows if len(lanes) == 1 else [[*row, *[""] * 6, str(lane)] for lane, row in enumerate(rows)]


def _title(deployment: Deployment) -> str:
    taken, memory = format_bytes(deployment.taken_bytes), format_bytes(deployment.memory_bytes)
    count = len(deployment.entries)
    return f"{deployment.layout} layout: {taken} of {memory} for {count} model{'s' * (count != 1)}"


def _cells(entry: DeploymentEntry, weight_bytes: int, shared: bool) -> list[str]:
    share = entry.resident_bytes / entry.parameter_bytes if entry.parameter_bytes else 1.0
    filled = round(share * _BAR_CELLS)
    plan = entry.plans[min(entry.plans)].provenance
    times = ["", "", ""] if plan is None else [_ms(plan.latency_s), _ms(plan.bound_s), _ms(plan.resident_s)]
    return [
        format_bytes(entry.partition_offset),
        format_bytes(entry.partition_bytes),
        format_bytes(weight_bytes),
        "shared" if shared else f"{share:.0%}",
        "" if shared else "█" * filled + "░" * (_BAR_CELLS - filled),
        *times,
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
