"""A plan drawn for a terminal: header, lanes and memory over time, the longest stalls, the most copied tensors."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from planner.errors import format_bytes
from planner.plan import Lane
from server.tools.picture import Picture, held, nice_ticks, peak_bytes, shortened
from server.tools.progress import gap, milliseconds, percent, round_time

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LABEL_CELLS = 11
_NOTE_CELLS = 18
_MOST_CELLS = 120
_MEMORY_ROWS = 4
_MOST_TENSORS = 8
_MOST_STALLS = 5
_NAME_CELLS = 54

_LANES: tuple[tuple[Lane, str, str], ...] = (
    ("compute", "compute", "cyan"),
    ("swap_in", "swap in", "yellow"),
    ("swap_out", "swap out", "magenta"),
)


def draw(picture: Picture, console: Console) -> None:
    """Print a plan."""
    cells = max(20, min(console.width, _MOST_CELLS) - _LABEL_CELLS - _NOTE_CELLS)
    parts: list[RenderableType] = [header(picture), Text()]
    if picture.end_s > 0:
        parts += [chart(picture, cells), Text()]
    if picture.stalls:
        parts.append(_stall_table(picture))
    if picture.traffic:
        parts.append(_traffic_table(picture))
    console.print(Group(*parts))


def header(picture: Picture) -> Text:
    """What was planned, with what, and how good it is."""
    graph, plan, timeline, about = picture.graph, picture.plan, picture.timeline, picture.plan.provenance
    text = Text()
    text.append(f"{graph.name}, batch {graph.batch}, in {format_bytes(picture.memory_bytes)}", "bold")
    if plan.workspace_bytes:
        text.append(
            f" ({format_bytes(plan.partition_bytes)} partition + {format_bytes(plan.workspace_bytes)} workspace)"
        )
    text.append("\n")
    if about is not None:
        text.append(f"{about.searcher}, seed {about.seed}, {about.evaluations} evaluations")
        text.append(f" · {picture.profile.device}\n", "dim")
    resident_s = picture.profile.compute_s
    text.append(f"latency {milliseconds(timeline.latency_s)}", "bold")
    if about is not None:
        text.append(f" · bound {milliseconds(about.bound_s)} (gap {gap(timeline.latency_s, about.bound_s)})")
    text.append(f" · resident {milliseconds(resident_s)} (+{gap(timeline.latency_s, resident_s)})")
    if timeline.period_s is not None:
        text.append(f" · period {milliseconds(timeline.period_s)}")
    residents = sum(graph.tensors[p.tensor].nbytes for p in plan.residents)
    weights = sum(t.nbytes for t in graph.tensors if t.kind in ("parameter", "state"))
    text.append(
        f"\nstalled {milliseconds(picture.stall_s)}, slowed by copies {milliseconds(picture.slowed_s)}"
        f"\n{len(graph.ops)} ops, {len(plan.steps)} steps · {format_bytes(residents)} of {format_bytes(weights)} of"
        f" parameters resident · {format_bytes(timeline.link_bytes)} over the link"
    )
    return text


def chart(picture: Picture, cells: int) -> Text:
    """Lanes, stalls and memory over one time axis."""
    text = _axis(picture, cells)
    total_s = picture.end_s
    for lane, label, style in _LANES:
        spans = [(s.start_s, s.end_s) for s in picture.timeline.spans if s.lane == lane]
        busy_s = sum(end - start for start, end in spans)
        note = f"{percent(busy_s / total_s)} busy" if spans else "not used"
        text.append_text(_row(label, _covered(spans, total_s, cells), style, note))
        if lane == "compute":
            stalls = [(s.start_s, s.end_s) for s in picture.stalls]
            note = milliseconds(picture.stall_s) if stalls else "never"
            text.append_text(_row("  stalled", _covered(stalls, total_s, cells), "red", note))
    text.append("\n")
    text.append_text(_memory(picture, cells))
    return text


def _axis(picture: Picture, cells: int) -> Text:
    """Round times above the lanes; the answer's where steps go on behind it."""
    line, marks = [" "] * (cells + _NOTE_CELLS), ["─"] * cells
    for tick in nice_ticks(picture.end_s, max(2, cells // 14)):
        at = min(cells - 1, int(tick / picture.end_s * cells))
        label = round_time(tick)
        marks[at] = "┬"
        line[at : at + len(label)] = label
    if picture.end_s > picture.timeline.latency_s * (1 + 1e-9):
        marks[min(cells - 1, int(picture.timeline.latency_s / picture.end_s * cells))] = "┴"
    text = Text(" " * _LABEL_CELLS + "".join(line).rstrip() + "\n", "dim")
    text.append(" " * _LABEL_CELLS + "".join(marks), "dim")
    if "┴" in marks:
        text.append(" ┴ answer", "dim")
    return text.append("\n")


def _row(label: str, shares: Sequence[float], style: str, note: str) -> Text:
    text = Text(f"{label:<{_LABEL_CELLS}}")
    text.append("".join(_bar(share) for share in shares), style)
    return text.append(f" {note}\n", "dim")


def _memory(picture: Picture, cells: int) -> Text:
    """Bytes in use, a column per cell, the full height being the budget."""
    most = [0] * cells
    uses = [(time_s, sum(now.values())) for time_s, now in held(picture.stays)]
    for (start_s, nbytes), (end_s, _) in pairwise(uses):
        first = min(cells - 1, int(start_s / picture.end_s * cells))
        last = min(cells - 1, max(first, int(end_s / picture.end_s * cells - 1e-9)))
        for cell in range(first, last + 1):
            most[cell] = max(most[cell], nbytes)
    memory = max(picture.memory_bytes, 1)
    text = Text()
    for row in reversed(range(_MEMORY_ROWS)):
        label = "memory" if row == _MEMORY_ROWS - 1 else ""
        shares = [min(1.0, max(0.0, nbytes / memory * _MEMORY_ROWS - row)) for nbytes in most]
        note = {
            _MEMORY_ROWS - 1: f"of {format_bytes(picture.memory_bytes)}",
            _MEMORY_ROWS - 2: f"peak {percent(peak_bytes(picture.stays) / memory)}",
        }.get(row, "")
        text.append_text(_row(label, shares, "green", note))
    text.right_crop(1)
    return text


def _bar(share: float) -> str:
    """A block as high as the share; whatever is above nothing shows."""
    if share <= 1e-9:
        return " "
    return _EIGHTHS[max(1, min(8, round(share * 8)))]


def _covered(intervals: Iterable[tuple[float, float]], total_s: float, cells: int) -> list[float]:
    """The share of each cell's time that the intervals, which do not overlap, cover."""
    covered = [0.0] * cells
    for start_s, end_s in intervals:
        start, end = start_s / total_s * cells, end_s / total_s * cells
        for cell in range(int(start), min(cells, int(end) + 1)):
            covered[cell] += max(0.0, min(end, cell + 1) - max(start, cell))
    return covered


def _stall_table(picture: Picture) -> Table:
    table = Table(box=SIMPLE_HEAD, title=_counted("longest stalls", len(picture.stalls), _MOST_STALLS))
    _left_title(table)
    table.add_column("waits", justify="right", no_wrap=True)
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("op")
    table.add_column("for", overflow="fold")
    for stall in sorted(picture.stalls, key=lambda s: -s.seconds)[:_MOST_STALLS]:
        cause = "" if stall.waits_for is None else _phrase(picture, stall.waits_for)
        op = picture.name_of(stall.step).removeprefix("op ")
        table.add_row(
            milliseconds(stall.seconds),
            milliseconds(stall.start_s),
            shortened(op, _NAME_CELLS // 2),
            cause,
        )
    return table


def _phrase(picture: Picture, step: int) -> str:
    """`swap-in of weight`; of long names the end."""
    verb, separator, name = picture.name_of(step).rpartition(" ")
    return verb + separator + shortened(name, _NAME_CELLS)


def _traffic_table(picture: Picture) -> Table:
    title = _counted("most copied tensors", len(picture.traffic), _MOST_TENSORS)
    table = Table(box=SIMPLE_HEAD, title=title)
    _left_title(table)
    table.add_column("tensor", overflow="fold")
    table.add_column("kind")
    for name in ("size", "in", "out", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share")
    link_bytes = max(picture.timeline.link_bytes, 1)
    for row in picture.traffic[:_MOST_TENSORS]:
        tensor = picture.graph.tensors[row.tensor]
        share = row.nbytes / link_bytes
        table.add_row(
            shortened(tensor.name, _NAME_CELLS),
            tensor.kind,
            format_bytes(tensor.nbytes),
            f"{row.swapped_in}x" if row.swapped_in else "",
            f"{row.swapped_out}x" if row.swapped_out else "",
            format_bytes(row.nbytes),
            f"{'█' * round(share * 10):<10} {percent(share)}",
        )
    return table


def _counted(what: str, count: int, shown: int) -> str:
    return f"{what} ({shown} of {count})" if count > shown else what


def _left_title(table: Table) -> None:
    table.title_justify = "left"
    table.title_style = "bold"
