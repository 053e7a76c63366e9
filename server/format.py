"""Numbers, names and tables as every command writes them."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from cohabit.server.ipc.model import ModelInfo

PLAN_WORDS = (
    "resident: with every parameter in memory; bound: less is impossible in this memory; gap: latency over the bound;"
    " over link: bytes copied per inference; period: time from one inference to the next, residents brought back"
)
"""Explanation of the terms in tables of plans."""


def milliseconds(seconds: float) -> str:
    """Write a duration with three or four digits: 0.123 ms, 12.3 ms, 1234 ms."""
    value = seconds * 1e3
    return f"{value:.{3 if value < 1 else 2 if value < 100 else 1 if value < 1000 else 0}f} ms"


def round_time(seconds: float) -> str:
    """Write the time of an axis: 0, 0.2 ms, 50 ms, 1500 ms."""
    return f"{seconds * 1e3:.10g} ms" if seconds else "0"


def percent(share: float) -> str:
    return f"{share * 100:.1f} %" if share < 10 else f"{share * 100:.0f} %"


def disturbed(noise: float) -> str:
    """Say that a profile with this much noise is provisional."""
    return (
        f"the times are provisional: other work disturbed the measurement by {percent(noise)}; cohabit plan MODEL"
        " measures it again once the machine is quiet"
    )


def gap(latency_s: float, floor_s: float) -> str:
    """Write the excess of a time over another, in percent."""
    return percent(latency_s / floor_s - 1) if floor_s > 0 else "-"


def shortened(name: str, cells: int) -> str:
    """Shorten a long name to its end, where names of parameters differ."""
    return name if len(name) <= cells else f"…{name[1 - cells :]}"


def nice_ticks(end: float, most: int) -> list[float]:
    """Return round positions from 0 to `end` with at most `most` intervals."""
    if end <= 0 or most < 1:
        return [0.0]
    magnitude = 10.0 ** math.floor(math.log10(end / most))
    step = next(magnitude * m for m in (1, 2, 5, 10, 20) if magnitude * m * most >= end)
    return [i * step for i in range(int(end / step + 1e-9) + 1)]


def make_table(*columns: str, left: Collection[str] = ()) -> Table:
    """Return a table of numbers. The columns named in `left` are text and may wrap, except for names of models."""
    table = Table(box=SIMPLE_HEAD)
    for name in columns:
        is_text = name in left
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=not is_text or name == "model",
            overflow="fold" if is_text else "ellipsis",
        )
    return table


def print_table(out: Console, table: Table, *, title: str = "", total: str = "") -> None:
    """Print a table with separate lines around it: as a Rich title and caption, they would wrap at its width."""
    if title:
        out.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    out.print(table)
    if total:
        out.print(total, markup=False, highlight=False, soft_wrap=True)


def tensor_table(info: "ModelInfo") -> Table:
    """List a model's inputs and outputs, in the shapes that clients send and receive."""
    table = make_table("", "tensor", "datatype", "shape", left=("", "tensor", "datatype", "shape"))
    for kind, tensors in (("input", info.inputs), ("output", info.outputs)):
        for tensor in tensors:
            table.add_row(kind, tensor.name, tensor.datatype, str(list(info.wire_shape(tensor))))
    return table
