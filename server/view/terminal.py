"""Draws a plan in the terminal: its results, its lanes, and its memory over time."""

from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from cohabit.planner.errors import format_bytes
from cohabit.server.format import gap, milliseconds, nice_ticks, percent, round_time, shortened
from cohabit.server.view.analysis import LANES, PlanAnalysis, bytes_in_use

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_STYLES = {"compute": "cyan", "swap_in": "yellow", "swap_out": "magenta"}
_LABEL_CELLS = 11
_NOTE_CELLS = 18
_MOST_CELLS = 120
_MEMORY_ROWS = 4
_NAME_CELLS = 54


def draw(analysis: PlanAnalysis, console: Console) -> None:
    cells = max(20, min(console.width, _MOST_CELLS) - _LABEL_CELLS - _NOTE_CELLS)
    console.print(_header(analysis), end="\n\n")
    if analysis.end_s > 0:
        console.print(_chart(analysis, cells), end="\n\n")
    if analysis.stalls:
        console.print(_longest_stall(analysis))


def _header(analysis: PlanAnalysis) -> Text:
    graph, plan, timeline, about = analysis.graph, analysis.plan, analysis.timeline, analysis.plan.provenance
    text = Text()
    text.append(f"{graph.name}, batch {graph.bucket}, in {format_bytes(analysis.memory_bytes)}", "bold")
    if plan.memory.partition_bytes:
        partition, workspace = plan.memory.partition_bytes, plan.memory.workspace_bytes
        text.append(f" ({format_bytes(partition)} partition + {format_bytes(workspace)} workspace)")
    text.append("\n")
    if about is not None:
        text.append(f"{about.searcher}, seed {about.seed}, {about.evaluations} evaluations")
        text.append(f" · {analysis.profile.device}\n", "dim")
    resident_s = analysis.profile.compute_s
    text.append(f"latency {milliseconds(timeline.latency_s)}", "bold")
    if about is not None:
        text.append(f" · bound {milliseconds(about.bound_s)} (gap {gap(timeline.latency_s, about.bound_s)})")
    text.append(f" · resident {milliseconds(resident_s)} (+{gap(timeline.latency_s, resident_s)})")
    if timeline.period_s is not None:
        text.append(f" · period {milliseconds(timeline.period_s)}")
    return text.append(
        f"\nstalled {milliseconds(analysis.stall_s)}, slowed by copies {milliseconds(analysis.slowed_s)}"
        f"\n{len(graph.ops)} ops, {len(plan.steps)} steps · {format_bytes(analysis.resident_bytes)} of"
        f" {format_bytes(graph.weight_bytes)} of parameters resident · {format_bytes(timeline.link_bytes)} over the"
        " link"
    )


def _chart(analysis: PlanAnalysis, cells: int) -> Text:
    """Draw lanes, stalls and memory over one time axis."""
    text = _axis(analysis, cells)
    total_s = analysis.end_s
    for lane, label in LANES:
        spans = [(s.start_s, s.end_s) for s in analysis.spans_of(lane)]
        busy_s = sum(end - start for start, end in spans)
        note = f"{percent(busy_s / total_s)} busy" if spans else "not used"
        text.append_text(_row(label, _covered(spans, total_s, cells), _STYLES[lane], note))
        if lane == "compute":
            stalls = [(s.start_s, s.end_s) for s in analysis.stalls]
            note = milliseconds(analysis.stall_s) if stalls else "never"
            text.append_text(_row("  stalled", _covered(stalls, total_s, cells), "red", note))
    return text.append("\n").append_text(_memory(analysis, cells))


def _axis(analysis: PlanAnalysis, cells: int) -> Text:
    """Draw round times, and a mark where the outputs are complete if steps end after that."""
    line, marks = [" "] * (cells + _NOTE_CELLS), ["─"] * cells
    for tick in nice_ticks(analysis.end_s, max(2, cells // 14)):
        at = min(cells - 1, int(tick / analysis.end_s * cells))
        label = round_time(tick)
        marks[at] = "┬"
        line[at : at + len(label)] = label
    note = ""
    if analysis.has_epilogue:
        marks[min(cells - 1, int(analysis.timeline.latency_s / analysis.end_s * cells))] = "┴"
        note = " ┴ answer"
    indent = " " * _LABEL_CELLS
    return Text(f"{indent}{''.join(line).rstrip()}\n{indent}{''.join(marks)}{note}\n", "dim")


def _row(label: str, shares: Sequence[float], style: str, note: str) -> Text:
    text = Text(f"{label:<{_LABEL_CELLS}}")
    text.append("".join(_bar(share) for share in shares), style)
    return text.append(f" {note}\n", "dim")


def _memory(analysis: PlanAnalysis, cells: int) -> Text:
    """Draw the maximum bytes in use during each cell; the full height is the budget."""
    most = [0] * cells
    uses = [(time_s, sum(now.values())) for time_s, now in bytes_in_use(analysis.occupancies)]
    for (start_s, nbytes), (end_s, _) in pairwise(uses):
        first = min(cells - 1, int(start_s / analysis.end_s * cells))
        last = min(cells - 1, max(first, int(end_s / analysis.end_s * cells - 1e-9)))
        for cell in range(first, last + 1):
            most[cell] = max(most[cell], nbytes)
    memory = max(analysis.memory_bytes, 1)
    notes = [f"of {format_bytes(analysis.memory_bytes)}", f"peak {percent(analysis.peak_bytes / memory)}"]
    text = Text()
    for row in range(_MEMORY_ROWS):
        below = _MEMORY_ROWS - 1 - row
        shares = [min(1.0, max(0.0, nbytes / memory * _MEMORY_ROWS - below)) for nbytes in most]
        text.append_text(_row("" if row else "memory", shares, "green", notes[row] if row < len(notes) else ""))
    text.right_crop(1)
    return text


def _bar(share: float) -> str:
    """Return a block as high as the share; every share above 0 is visible."""
    if share <= 1e-9:
        return " "
    return _EIGHTHS[max(1, min(8, round(share * 8)))]


def _covered(intervals: Sequence[tuple[float, float]], total_s: float, cells: int) -> list[float]:
    """Return the fraction of each cell's time covered by the disjoint intervals."""
    covered = [0.0] * cells
    for start_s, end_s in intervals:
        start, end = start_s / total_s * cells, end_s / total_s * cells
        for cell in range(int(start), min(cells, int(end) + 1)):
            covered[cell] += max(0.0, min(end, cell + 1) - max(start, cell))
    return covered


def _longest_stall(analysis: PlanAnalysis) -> Text:
    stall = analysis.longest_stalls[0]
    text = Text(f"longest stall: {milliseconds(stall.seconds)} at {milliseconds(stall.start_s)}, ")
    text.append(shortened(analysis.name_of(stall.step), _NAME_CELLS))
    if stall.waits_for is not None:
        verb, separator, name = analysis.name_of(stall.waits_for).rpartition(" ")
        text.append(f" waits for the {verb}{separator}{shortened(name, _NAME_CELLS)}")
    return text
