"""A plan as one HTML page that needs nothing else: inline SVG, styles and a script for looking closer."""

import html
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from planner.errors import format_bytes
from planner.plan import Compute, Lane, SwapIn, SwapOut
from server.tools.picture import (
    KINDS,
    Kind,
    Picture,
    Stay,
    base_of,
    held,
    nice_ticks,
    peak_bytes,
    shortened,
)
from server.tools.progress import gap, milliseconds, percent, round_time

TIME_UNITS = 100_000
"""Width of every chart, in its own coordinates."""
MEMORY_UNITS = 100_000
"""Height of the memory charts."""
LANE_UNITS = 10
_MOST_ROWS = 25
_NAME_CELLS = 32

_LANES: tuple[tuple[Lane, str], ...] = (("compute", "compute"), ("swap_in", "swap in"), ("swap_out", "swap out"))
_KIND_NAMES: Mapping[Kind, str] = {
    "resident": "resident parameter",
    "parameter": "parameter, swapped in",
    "state": "state",
    "input": "input",
    "activation": "activation",
    "scratch": "scratch",
}


def page(picture: Picture) -> str:
    """The whole page."""
    folder = files("server.tools")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    graph = picture.graph
    return template.substitute(
        title=_escape(f"{graph.name}, batch {graph.batch}, in {format_bytes(picture.memory_bytes)}"),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        subtitle=_subtitle(picture),
        tiles="".join(_tiles(picture)),
        lanes=_lanes(picture),
        lane_labels=_lane_labels(picture),
        lane_legend=_lane_legend(picture),
        time_axis=_time_axis(picture),
        legend=_legend(picture),
        use=_use(picture),
        budget=format_bytes(picture.memory_bytes),
        memory=_memory(picture),
        memory_axis=_memory_axis(picture),
        answer=_answer(picture),
        stalls=_stalls(picture),
        traffic=_traffic(picture),
        provenance=_provenance(picture),
        data=json.dumps(_data(picture), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _subtitle(picture: Picture) -> str:
    graph, plan = picture.graph, picture.plan
    parts = [f"{len(graph.ops)} ops", f"{len(plan.steps)} steps"]
    if plan.workspace_bytes:
        parts.append(
            f"{format_bytes(plan.partition_bytes)} partition + {format_bytes(plan.workspace_bytes)} workspace"
        )
    return _escape(" · ".join((*parts, picture.profile.device)))


def _tiles(picture: Picture) -> Iterable[str]:
    plan, timeline, about = picture.plan, picture.timeline, picture.plan.provenance
    graph, resident_s = picture.graph, picture.profile.compute_s
    yield _tile("latency", milliseconds(timeline.latency_s), f"{gap(timeline.latency_s, resident_s)} over resident")
    if about is not None:
        yield _tile(
            "gap to the bound", gap(timeline.latency_s, about.bound_s), f"bound {milliseconds(about.bound_s)}"
        )
    if timeline.period_s is not None:
        yield _tile("back to back", milliseconds(timeline.period_s), "per inference")
    share = picture.stall_s / timeline.latency_s if timeline.latency_s else 0.0
    yield _tile("stalled", milliseconds(picture.stall_s), f"{percent(share)}, in {len(picture.stalls)} stalls")
    yield _tile("slowed by copies", milliseconds(picture.slowed_s), "beside ops")
    yield _tile("over the link", format_bytes(timeline.link_bytes), f"{len(picture.traffic)} tensors")
    weights = sum(t.nbytes for t in graph.tensors if t.kind in ("parameter", "state"))
    residents = sum(graph.tensors[p.tensor].nbytes for p in plan.residents)
    yield _tile("resident weights", format_bytes(residents), f"of {format_bytes(weights)}")
    peak = peak_bytes(picture.stays)
    yield _tile("peak memory", format_bytes(peak), f"of {format_bytes(picture.memory_bytes)}")


def _tile(name: str, value: str, note: str) -> str:
    return f"<div class=tile><dt>{name}</dt><dd>{_escape(value)}</dd><span>{_escape(note)}</span></div>"


def _lanes(picture: Picture) -> str:
    """A bar for each step, and behind the compute lane's one for each stall."""
    parts = ["<g class=stall>", *(_bar(picture, 0, s.start_s, s.end_s) for s in picture.stalls), "</g>"]
    for row, (lane, _) in enumerate(_LANES):
        spans = (s for s in picture.timeline.spans if s.lane == lane)
        parts += [f"<g class={lane}>", *(_bar(picture, row, s.start_s, s.end_s) for s in spans), "</g>"]
    return "".join(parts)


def _bar(picture: Picture, row: int, start_s: float, end_s: float) -> str:
    x, width = _x(picture, start_s), _x(picture, end_s - start_s)
    return f'<rect x="{x}" y="{row * LANE_UNITS + 1}" width="{width}" height="{LANE_UNITS - 2}"/>'


def _lane_labels(picture: Picture) -> str:
    labels = []
    for lane, name in _LANES:
        busy_s = sum(s.end_s - s.start_s for s in picture.timeline.spans if s.lane == lane)
        busy = f"{percent(busy_s / picture.end_s)} busy" if busy_s else "not used"
        labels.append(f"<div><b>{name}</b><span>{busy}</span></div>")
    return "".join(labels)


def _lane_legend(picture: Picture) -> str:
    there = {span.lane for span in picture.timeline.spans}
    items = [(lane, name) for lane, name in _LANES if lane in there]
    marks = [*items, *([("stall", "the compute lane waits")] if picture.stalls else [])]
    if _has_epilogue(picture):
        marks.append(("answer", "the answer is there"))
    return "".join(f"<span><i class={kind}></i>{name}</span>" for kind, name in marks)


def _has_epilogue(picture: Picture) -> bool:
    return picture.end_s > picture.timeline.latency_s * (1 + 1e-9)


def _time_axis(picture: Picture) -> str:
    """Round times, for a page whose script does not run; it redraws them when it zooms."""
    if picture.end_s <= 0:
        return ""
    return "".join(
        f'<span style="left:{t / picture.end_s:.4%}">{round_time(t)}</span>' for t in nice_ticks(picture.end_s, 8)
    )


def _answer(picture: Picture) -> str:
    """A line where the answer is there and the epilogue begins."""
    if not _has_epilogue(picture):
        return ""
    x = _x(picture, picture.timeline.latency_s)
    return f'<line class=answer x1="{x}" x2="{x}" y1="0" y2="100%"/>'


def _legend(picture: Picture) -> str:
    there = {s.kind for s in picture.stays if s.nbytes}
    return "".join(f"<span><i class={k}></i>{_KIND_NAMES[k]}</span>" for k in KINDS if k in there)


def _use(picture: Picture) -> str:
    """Bytes in use over time, the kinds on top of one another."""
    uses = held(picture.stays)
    if not uses or not picture.memory_bytes:
        return ""
    parts = []
    below = [0] * len(uses)
    for kind in KINDS:
        above = [b + now[kind] for b, (_, now) in zip(below, uses, strict=True)]
        if above != below:
            parts.append(f'<path class={kind} d="{_band(picture, [t for t, _ in uses], below, above)}"/>')
        below = above
    return "".join(parts)


def _band(picture: Picture, times: Sequence[float], below: Sequence[int], above: Sequence[int]) -> str:
    """The area between two step functions; a point only where one of them changes."""
    there, back = _steps(picture, times, above), _steps(picture, times, below)
    return f"M{' '.join(there)} {' '.join(reversed(back))}Z"


def _steps(picture: Picture, times: Sequence[float], values: Sequence[int]) -> list[str]:
    points: list[str] = []
    y: int | None = None
    for time_s, value in zip(times, values, strict=True):
        height = round((1 - value / picture.memory_bytes) * MEMORY_UNITS)
        if height != y:
            x = _x(picture, time_s)
            points += [f"{x},{y}"] if y is not None else []
            points.append(f"{x},{height}")
            y = height
    return [*points, f"{_x(picture, times[-1])},{y}"]


def _memory(picture: Picture) -> str:
    """A rectangle for each stay: bytes from the bottom up, time from left to right."""
    parts = []
    for kind, stays in _drawn(picture).items():
        parts += [f"<g class={kind}>", *(_rectangle(picture, stay) for stay in stays), "</g>"]
    if 0 < picture.plan.partition_bytes < picture.memory_bytes:
        y = _y(picture, picture.plan.partition_bytes)
        parts.append(f'<line class=border x1="0" x2="{TIME_UNITS}" y1="{y}" y2="{y}"/>')
    return "".join(parts)


def _drawn(picture: Picture) -> dict[Kind, list[Stay]]:
    """What has an area, in the order in which it is drawn."""
    by_kind: dict[Kind, list[Stay]] = defaultdict(list)
    for stay in picture.stays:
        if stay.nbytes and picture.end_s > 0:
            by_kind[stay.kind].append(stay)
    return {kind: by_kind[kind] for kind in KINDS if by_kind[kind]}


def _rectangle(picture: Picture, stay: Stay) -> str:
    start = base_of(picture.plan, stay.address.region) + stay.address.offset
    top = _y(picture, start + stay.nbytes)
    x, width = _x(picture, stay.start_s), _x(picture, stay.end_s - stay.start_s)
    return f'<rect x="{x}" y="{top}" width="{width}" height="{_y(picture, start) - top}"/>'


def _memory_axis(picture: Picture) -> str:
    """Round offsets, and the names of the regions."""
    memory = picture.memory_bytes
    if not memory:
        return ""
    unit = next(n for n in (1 << 30, 1 << 20, 1 << 10, 1) if memory >= 2 * n or n == 1)
    parts = [
        f'<span style="bottom:{t * unit / memory:.3%}">{format_bytes(round(t * unit)) if t else "0"}</span>'
        for t in nice_ticks(memory / unit, 6)
    ]
    partition = picture.plan.partition_bytes / memory
    if 0 < partition < 1:
        parts.append(f'<b style="bottom:{partition / 2:.3%}">partition</b>')
        parts.append(f'<b style="bottom:{(1 + partition) / 2:.3%}">workspace</b>')
    return "".join(parts)


def _stalls(picture: Picture) -> str:
    if not picture.stalls:
        return "<p>None: the compute lane never waits.</p>"
    longest = sorted(picture.stalls, key=lambda s: -s.seconds)
    rows = [
        (
            milliseconds(s.seconds),
            milliseconds(s.start_s),
            shortened(picture.name_of(s.step).removeprefix("op "), _NAME_CELLS),
            "" if s.waits_for is None else picture.name_of(s.waits_for),
        )
        for s in longest[:_MOST_ROWS]
    ]
    return _table(("waits", "at", "op", "for"), rows, right=2) + _rest(len(longest))


def _traffic(picture: Picture) -> str:
    if not picture.traffic:
        return "<p>Nothing is copied: every parameter is resident.</p>"
    most = max(row.nbytes for row in picture.traffic)
    rows = []
    for row in picture.traffic[:_MOST_ROWS]:
        tensor = picture.graph.tensors[row.tensor]
        rows.append(
            "<tr>"
            f"<td class=long>{_escape(tensor.name)}</td><td>{tensor.kind}</td>"
            f"<td class=n>{format_bytes(tensor.nbytes)}</td>"
            f"<td class=n>{_times(row.swapped_in)}</td><td class=n>{_times(row.swapped_out)}</td>"
            f"<td class=n>{format_bytes(row.nbytes)}</td>"
            f'<td class=bar><i style="width:{row.nbytes / most if most else 0:.2%}"></i></td></tr>'
        )
    names = ("tensor", "kind", "size", "in", "out", "copied")
    head = "".join(f"<th{' class=n' if i > 1 else ''}>{n}</th>" for i, n in enumerate(names))
    return f"<table><tr>{head}<th></th></tr>{''.join(rows)}</table>{_rest(len(picture.traffic))}"


def _times(count: int) -> str:
    return f"{count}×" if count else ""  # noqa: RUF001


def _rest(count: int) -> str:
    return f"<p>and {count - _MOST_ROWS} more</p>" if count > _MOST_ROWS else ""


def _provenance(picture: Picture) -> str:
    plan, profile, about = picture.plan, picture.profile, picture.plan.provenance
    rows: list[tuple[str, ...]] = []
    if about is not None:
        rows += [
            ("searcher", about.searcher),
            ("seed", str(about.seed)),
            ("evaluations", str(about.evaluations)),
            ("first plan", milliseconds(about.baseline_s)),
            ("lower bound", milliseconds(about.bound_s)),
            ("gap", gap(about.latency_s, about.bound_s)),
        ]
    rows += [
        ("all resident", milliseconds(profile.compute_s)),
        ("device", profile.device),
        ("swap in", _link(profile.swap_in.latency_s, profile.swap_in.bandwidth_bytes_per_s)),
        ("swap out", _link(profile.swap_out.latency_s, profile.swap_out.bandwidth_bytes_per_s)),
        ("beside a copy", f"an op takes {profile.compute_slowdown:.2f}× as long"),  # noqa: RUF001
        ("beside an op", f"a copy takes {profile.swap_slowdown:.2f}× as long"),  # noqa: RUF001
        ("weights", picture.graph.weights),
        ("graph", plan.graph),
        ("profile", plan.profile),
        ("plan", plan.fingerprint),
    ]
    return _table((), rows)


def _link(latency_s: float, bandwidth_bytes_per_s: float) -> str:
    return f"{format_bytes(bandwidth_bytes_per_s)}/s after {latency_s * 1e6:.1f} us"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A table whose first `right` columns are numbers."""
    number = [
        " class=n" if i < right else " class=long" if i == (len(head) or 2) - 1 else ""
        for i in range(len(head) or 9)
    ]
    parts = ["<table>"]
    if head:
        parts += ["<tr>", *(f"<th{n}>{_escape(h)}</th>" for h, n in zip(head, number, strict=True)), "</tr>"]
    for row in rows:
        cells = (f"<td{n}>{_escape(cell)}</td>" for cell, n in zip(row, number, strict=False))
        parts += ["<tr>", *cells, "</tr>"]
    return "".join((*parts, "</table>"))


def _data(picture: Picture) -> dict[str, Any]:
    """What the script tells of a bar or rectangle that is pointed at, in the order of the drawing."""
    plan, graph = picture.plan, picture.graph
    stall_of = {s.step: s.waits_for for s in picture.stalls}
    lane_steps = [s.step for lane, _ in _LANES for s in picture.timeline.spans if s.lane == lane]
    return {
        "end": picture.end_s,
        "memory": picture.memory_bytes,
        "partition": plan.partition_bytes,
        "units": TIME_UNITS,
        "tensors": [[t.name, t.nbytes, t.kind] for t in graph.tensors],
        "ops": [[op.name, op.target] for op in graph.ops],
        "stalls": [[s.step, s.waits_for] for s in picture.stalls],
        "steps": [[i, *_subject(picture, i), stall_of.get(i)] for i in lane_steps],
        "stays": [
            [stay.what, stay.kind, stay.address.offset, int(stay.address.region == "workspace"), stay.nbytes]
            for stays in _drawn(picture).values()
            for stay in stays
        ],
    }


def _subject(picture: Picture, step: int) -> tuple[str, int]:
    match picture.plan.steps[step]:
        case Compute(op=op):
            return "op", op
        case SwapIn(tensor=tensor):
            return "in", tensor
        case SwapOut(tensor=tensor):
            return "out", tensor
        case drop:
            raise AssertionError(drop)


def _x(picture: Picture, seconds: float) -> str:
    return f"{seconds / picture.end_s * TIME_UNITS:.1f}".removesuffix(".0")


def _y(picture: Picture, nbytes: int) -> int:
    return round((1 - nbytes / picture.memory_bytes) * MEMORY_UNITS)


def _escape(text: str) -> str:
    return html.escape(text)
