"""Draws the device's memory as a table: each model's partition, resident share and predicted times."""

from collections import Counter
from collections.abc import Sequence

from cohabit.planner.errors import format_bytes
from cohabit.server.activations import workspace_words
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.model import Model, partitions_of

_BAR_CELLS = 16
_COLUMNS = ("model", "offset", "partition", "weights", "resident", "", "predicted", "bound", "resident run")
_TEXTS = ("model", "")
"""Left-aligned columns."""


def draw(layout: str, memory_bytes: int, memory: PartitionedMemory) -> str:
    """Return the memory map as text. `memory_bytes` is the limit for all models.

    Version numbers are shown for models with several loaded versions.
    """
    families = list(partitions_of(memory.models.values()).values())
    models = [family[0] for family in families]
    several = memory.partitions.lanes > 1
    columns = (*_COLUMNS, "lane") if several else _COLUMNS
    versions = Counter(model.key.name for model in memory.models.values())
    rows = [
        [
            _name(family, named_by_version=versions[family[0].key.name] > 1),
            *_cells(family[0], memory),
            *([str(family[0].lane)] if several else []),
        ]
        for family in families
    ]
    workspaces = [[*row, *[""] * (len(columns) - len(row))] for row in _workspaces(memory)]
    widths = [max(len(row[n]) for row in (columns, *rows, *workspaces)) for n in range(len(columns))]
    rule = "─" * (sum(widths) + 2 * len(widths))
    taken, whole, count = format_bytes(memory.taken_bytes), format_bytes(memory_bytes), len(memory.models)
    title = f"{layout} layout: {taken} of {whole} for {count} model{'s' * (count != 1)}"
    lines = [title, _line(columns, columns, widths), rule]
    lines += [_line(row, columns, widths) for row in rows]
    lines += [rule, *(_line(row, columns, widths) for row in workspaces)]
    if words := workspace_words(one for model in models for one in model.footprint.activations(model.key.name)):
        lines.append(f" of each workspace, {words}" if several else f" of the workspace, {words}")
    return "\n".join(lines)


def _name(family: Sequence[Model], *, named_by_version: bool) -> str:
    """Return the name of a partition's model, or of its first and the number of the others."""
    first, more = family[0].key, f" and {len(family) - 1} more" if len(family) > 1 else ""
    return f"{first.name} version {first.version}{more}" if named_by_version else f"{first.name}{more}"


def _line(cells: Sequence[str], columns: Sequence[str], widths: Sequence[int]) -> str:
    aligned = (
        cell.ljust(width) if column in _TEXTS else cell.rjust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    return f" {'  '.join(aligned)}".rstrip()


def _workspaces(memory: PartitionedMemory) -> Sequence[Sequence[str]]:
    """Return a row for each lane's workspace, from the arena's bottom up."""
    each, lanes = memory.partitions.workspace_bytes, range(memory.partitions.lanes)
    rows = [["workspace", format_bytes(lane * each), format_bytes(each)] for lane in lanes]
    return rows if len(lanes) == 1 else [[*row, *[""] * 6, str(lane)] for lane, row in enumerate(rows)]


def _cells(model: Model, memory: PartitionedMemory) -> list[str]:
    footprint, extent = model.footprint, memory.extent_of(model)
    share = footprint.resident_bytes / footprint.parameter_bytes if footprint.parameter_bytes else 1.0
    filled = round(share * _BAR_CELLS)
    plan = model.plans[min(model.plans)].provenance
    times = ["", "", ""] if plan is None else [_ms(plan.latency_s), _ms(plan.bound_s), _ms(plan.resident_s)]
    return [
        format_bytes(extent.offset),
        format_bytes(extent.nbytes),
        format_bytes(model.weight_bytes),
        "shared" if model.shares else f"{share:.0%}",
        "" if model.shares else "█" * filled + "░" * (_BAR_CELLS - filled),
        *times,
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
