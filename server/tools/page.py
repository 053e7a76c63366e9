"""A plan as one self-contained HTML page: inline SVG, styles, and a script for zooming and details."""

import html
import json
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from planner.errors import format_bytes
from planner.plan import Compute, SwapIn, SwapOut
from planner.profile import Link
from server.tools.analysis import KINDS, LANES, Kind, Occupancy, PlanAnalysis, bytes_in_use
from server.tools.format import gap, milliseconds, nice_ticks, percent, round_time, shortened

TIME_UNITS = 100_000
"""Width of every chart, in its own coordinates."""
MEMORY_UNITS = 100_000
"""Height of the memory charts."""
_LANE_UNITS = 10
_MOST_ROWS = 25
_NAME_CELLS = 32

_KIND_NAMES: Mapping[Kind, str] = {"resident": "resident parameter", "parameter": "parameter, swapped in"}


def page(analysis: PlanAnalysis) -> str:
    """Return the whole page."""
    folder = files("server.tools")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    graph, memory = analysis.graph, format_bytes(analysis.memory_bytes)
    return template.substitute(
        title=html.escape(f"{graph.name}, batch {graph.batch}, in {memory}"),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        subtitle=_subtitle(analysis),
        tiles="".join(
            f"<div class=tile><dt>{name}</dt><dd>{html.escape(value)}</dd><span>{html.escape(note)}</span></div>"
            for name, value, note in _tiles(analysis)
        ),
        lanes=_lanes(analysis),
        lane_labels=_lane_labels(analysis),
        lane_legend=_lane_legend(analysis),
        time_axis=_time_axis(analysis),
        legend=_legend({k: _KIND_NAMES.get(k, k) for k in KINDS if _drawn(analysis)[k]}),
        use=_use(analysis),
        budget=memory,
        memory=_memory(analysis),
        memory_axis=_memory_axis(analysis),
        answer=_answer(analysis),
        stalls=_stalls(analysis),
        traffic=_traffic(analysis),
        provenance=_provenance(analysis),
        data=json.dumps(_data(analysis), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _subtitle(analysis: PlanAnalysis) -> str:
    plan = analysis.plan
    parts = [f"{len(analysis.graph.ops)} ops", f"{len(plan.steps)} steps"]
    if plan.workspace_bytes:
        parts.append(
            f"{format_bytes(plan.partition_bytes)} partition + {format_bytes(plan.workspace_bytes)} workspace"
        )
    return html.escape(" · ".join((*parts, analysis.profile.device)))


def _tiles(analysis: PlanAnalysis) -> Iterator[tuple[str, str, str]]:
    """Yield a name, a value and a note for each of the figures at the top."""
    timeline, about, resident_s = analysis.timeline, analysis.plan.provenance, analysis.profile.compute_s
    yield "latency", milliseconds(timeline.latency_s), f"{gap(timeline.latency_s, resident_s)} over resident"
    if about is not None:
        yield "gap to the bound", gap(timeline.latency_s, about.bound_s), f"bound {milliseconds(about.bound_s)}"
    if timeline.period_s is not None:
        yield "back to back", milliseconds(timeline.period_s), "per inference"
    share = analysis.stall_s / timeline.latency_s if timeline.latency_s else 0.0
    yield "stalled", milliseconds(analysis.stall_s), f"{percent(share)}, in {len(analysis.stalls)} stalls"
    yield "slowed by copies", milliseconds(analysis.slowed_s), "concurrent with ops"
    yield "over the link", format_bytes(timeline.link_bytes), f"{len(analysis.traffic)} tensors"
    yield "resident weights", format_bytes(analysis.resident_bytes), f"of {format_bytes(analysis.weight_bytes)}"
    yield "peak memory", format_bytes(analysis.peak_bytes), f"of {format_bytes(analysis.memory_bytes)}"


def _lanes(analysis: PlanAnalysis) -> str:
    """Draw a bar for each step, and for each stall below the compute lane's bars."""

    def bars(kind: str, row: int, spans: Sequence[Any]) -> str:
        y, height = row * _LANE_UNITS + 1, _LANE_UNITS - 2
        return _group(kind, (_rectangle(analysis, s.start_s, s.end_s, y, height) for s in spans))

    rows = (bars(lane, row, analysis.spans_of(lane)) for row, (lane, _) in enumerate(LANES))
    return bars("stall", 0, analysis.stalls) + "".join(rows)


def _lane_labels(analysis: PlanAnalysis) -> str:
    labels = []
    for lane, name in LANES:
        busy_s = sum(s.end_s - s.start_s for s in analysis.spans_of(lane))
        busy = f"{percent(busy_s / analysis.end_s)} busy" if busy_s else "not used"
        labels.append(f"<div><b>{name}</b><span>{busy}</span></div>")
    return "".join(labels)


def _lane_legend(analysis: PlanAnalysis) -> str:
    marks: dict[str, str] = {lane: name for lane, name in LANES if analysis.spans_of(lane)}
    if analysis.stalls:
        marks["stall"] = "the compute lane waits"
    if analysis.has_epilogue:
        marks["answer"] = "outputs complete"
    return _legend(marks)


def _legend(marks: Mapping[Any, str]) -> str:
    return "".join(f"<span><i class={kind}></i>{name}</span>" for kind, name in marks.items())


def _time_axis(analysis: PlanAnalysis) -> str:
    """Draw round times; the script redraws them when it zooms."""
    ticks = nice_ticks(analysis.end_s, 8) if analysis.end_s > 0 else []
    return "".join(f'<span style="left:{t / analysis.end_s:.4%}">{round_time(t)}</span>' for t in ticks)


def _answer(analysis: PlanAnalysis) -> str:
    """Draw a line where the outputs are complete, if steps end after that."""
    if not analysis.has_epilogue:
        return ""
    x = _x(analysis, analysis.timeline.latency_s)
    return f'<line class=answer x1="{x}" x2="{x}" y1="0" y2="100%"/>'


def _use(analysis: PlanAnalysis) -> str:
    """Draw bytes in use over time as an area per kind, stacked."""
    uses = bytes_in_use(analysis.occupancies)
    if not uses or not analysis.memory_bytes:
        return ""
    times = [time_s for time_s, _ in uses]
    parts = []
    below = [0] * len(uses)
    for kind in KINDS:
        above = [b + now[kind] for b, (_, now) in zip(below, uses, strict=True)]
        if above != below:
            there, back = _steps(analysis, times, above), _steps(analysis, times, below)
            parts.append(f'<path class={kind} d="M{" ".join(there)} {" ".join(reversed(back))}Z"/>')
        below = above
    return "".join(parts)


def _steps(analysis: PlanAnalysis, times: Sequence[float], values: Sequence[int]) -> list[str]:
    """Return the points of a step function; only where it changes."""
    points: list[str] = []
    y: int | None = None
    for time_s, value in zip(times, values, strict=True):
        height = _y(analysis, value)
        if height != y:
            x = _x(analysis, time_s)
            points += [f"{x},{height}"] if y is None else [f"{x},{y}", f"{x},{height}"]
            y = height
    return [*points, f"{_x(analysis, times[-1])},{y}"]


def _memory(analysis: PlanAnalysis) -> str:
    """Draw a rectangle for each occupancy: bytes from the bottom up, time from left to right."""

    def rectangle(occupancy: Occupancy) -> str:
        start = analysis.start_of(occupancy)
        top = _y(analysis, start + occupancy.nbytes)
        height = _y(analysis, start) - top
        return _rectangle(analysis, occupancy.start_s, occupancy.end_s, top, height)

    drawn = _drawn(analysis)
    parts = [_group(kind, map(rectangle, drawn[kind])) for kind in KINDS if drawn[kind]]
    if 0 < analysis.plan.partition_bytes < analysis.memory_bytes:
        y = _y(analysis, analysis.plan.partition_bytes)
        parts.append(f'<line class=border x1="0" x2="{TIME_UNITS}" y1="{y}" y2="{y}"/>')
    return "".join(parts)


def _drawn(analysis: PlanAnalysis) -> dict[Kind, list[Occupancy]]:
    """Return the occupancies with an area by kind."""
    by_kind: dict[Kind, list[Occupancy]] = defaultdict(list)
    for occupancy in analysis.occupancies:
        if occupancy.nbytes and analysis.end_s > 0:
            by_kind[occupancy.kind].append(occupancy)
    return by_kind


def _memory_axis(analysis: PlanAnalysis) -> str:
    """Draw round offsets, and the names of the regions."""
    memory = analysis.memory_bytes
    if not memory:
        return ""
    unit = next(n for n in (1 << 30, 1 << 20, 1 << 10, 1) if memory >= 2 * n or n == 1)
    parts = [
        f'<span style="bottom:{t * unit / memory:.3%}">{format_bytes(round(t * unit)) if t else "0"}</span>'
        for t in nice_ticks(memory / unit, 6)
    ]
    partition = analysis.plan.partition_bytes / memory
    if 0 < partition < 1:
        parts.append(f'<b style="bottom:{partition / 2:.3%}">partition</b>')
        parts.append(f'<b style="bottom:{(1 + partition) / 2:.3%}">workspace</b>')
    return "".join(parts)


def _stalls(analysis: PlanAnalysis) -> str:
    if not analysis.stalls:
        return "<p>None: the compute lane never waits.</p>"
    rows = [
        (
            milliseconds(s.seconds),
            milliseconds(s.start_s),
            html.escape(shortened(analysis.name_of(s.step).removeprefix("op "), _NAME_CELLS)),
            "" if s.waits_for is None else html.escape(analysis.name_of(s.waits_for)),
        )
        for s in analysis.longest_stalls
    ]
    return _table(("waits", "at", "op", "for"), rows, {"waits": "n", "at": "n", "for": "long"})


def _traffic(analysis: PlanAnalysis) -> str:
    if not analysis.traffic:
        return "<p>Nothing is copied: every parameter is resident.</p>"
    most = max(1, *(row.nbytes for row in analysis.traffic))
    rows = []
    for row in analysis.traffic:
        tensor = analysis.graph.tensors[row.tensor]
        times = (f"{n}×" if n else "" for n in (row.swapped_in, row.swapped_out))  # noqa: RUF001
        bar = f'<i style="width:{row.nbytes / most:.2%}"></i>'
        size, copied = format_bytes(tensor.nbytes), format_bytes(row.nbytes)
        rows.append((html.escape(tensor.name), tensor.kind, size, *times, copied, bar))
    classes = {"tensor": "long", "size": "n", "in": "n", "out": "n", "copied": "n", "": "bar"}
    return _table(("tensor", "kind", "size", "in", "out", "copied", ""), rows, classes)


def _provenance(analysis: PlanAnalysis) -> str:
    plan, profile, about = analysis.plan, analysis.profile, analysis.plan.provenance
    rows: dict[str, str] = {}
    if about is not None:
        rows = {
            "searcher": about.searcher,
            "seed": str(about.seed),
            "evaluations": str(about.evaluations),
            "first plan": milliseconds(about.baseline_s),
            "lower bound": milliseconds(about.bound_s),
            "gap": gap(about.latency_s, about.bound_s),
        }
    rows |= {
        "all resident": milliseconds(profile.compute_s),
        "device": profile.device,
        "swap in": _link(profile.swap_in),
        "swap out": _link(profile.swap_out),
        "during a copy": f"an op takes {profile.compute_slowdown:.2f}× as long",  # noqa: RUF001
        "during an op": f"a copy takes {profile.swap_slowdown:.2f}× as long",  # noqa: RUF001
        "weights": analysis.graph.weights,
        "graph": plan.graph,
        "profile": plan.profile,
        "plan": plan.fingerprint,
    }
    cells = (f"<tr><td>{name}</td><td class=long>{html.escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{''.join(cells)}</table>"


def _link(link: Link) -> str:
    return f"{format_bytes(link.bandwidth_bytes_per_s)}/s after {link.latency_s * 1e6:.1f} us"


def _table(head: Sequence[str], rows: Collection[Sequence[str]], classes: Mapping[str, str]) -> str:
    """Return a table of at most 25 rows, whose cells are HTML; `classes` are those of columns."""
    of = [f" class={classes[name]}" if name in classes else "" for name in head]
    lines = ["".join(f"<th{c if c == ' class=n' else ''}>{name}</th>" for name, c in zip(head, of, strict=True))]
    for row in list(rows)[:_MOST_ROWS]:
        lines += ["".join(f"<td{c}>{cell}</td>" for cell, c in zip(row, of, strict=True))]
    rest = f"<p>and {len(rows) - _MOST_ROWS} more</p>" if len(rows) > _MOST_ROWS else ""
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>{rest}"


def _data(analysis: PlanAnalysis) -> dict[str, Any]:
    """Return what the script shows of a bar or rectangle, in the order of the drawing."""
    plan, graph, drawn = analysis.plan, analysis.graph, _drawn(analysis)
    stall_of = {s.step: s.waits_for for s in analysis.stalls}
    lane_steps = [s.step for lane, _ in LANES for s in analysis.spans_of(lane)]
    return {
        "end": analysis.end_s,
        "memory": analysis.memory_bytes,
        "partition": plan.partition_bytes,
        "units": TIME_UNITS,
        "tensors": [[t.name, t.nbytes, t.kind] for t in graph.tensors],
        "ops": [[op.name, op.target] for op in graph.ops],
        "stalls": [[s.step, s.waits_for] for s in analysis.stalls],
        "steps": [[i, *_subject(analysis, i), stall_of.get(i)] for i in lane_steps],
        "occupancies": [
            [o.what, o.kind, o.address.offset, int(o.address.region == "workspace"), o.nbytes]
            for kind in KINDS
            for o in drawn[kind]
        ],
    }


def _subject(analysis: PlanAnalysis, step: int) -> tuple[str, int]:
    match analysis.plan.steps[step]:
        case Compute(op=op):
            return "op", op
        case SwapIn(tensor=tensor):
            return "in", tensor
        case SwapOut(tensor=tensor):
            return "out", tensor
        case drop:
            raise AssertionError(drop)


def _group(kind: str, shapes: Any) -> str:
    return f"<g class={kind}>{''.join(shapes)}</g>"


def _rectangle(analysis: PlanAnalysis, start_s: float, end_s: float, y: int, height: int) -> str:
    x, width = _x(analysis, start_s), _x(analysis, end_s - start_s)
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}"/>'


def _x(analysis: PlanAnalysis, seconds: float) -> str:
    return f"{seconds / analysis.end_s * TIME_UNITS:.1f}".removesuffix(".0")


def _y(analysis: PlanAnalysis, nbytes: int) -> int:
    return round((1 - nbytes / analysis.memory_bytes) * MEMORY_UNITS)
