"""A plan as one self-contained HTML page: figures and tables, and data that `page.js` draws as SVG."""

import html
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import Any

from cohabit.planner.errors import format_bytes
from cohabit.planner.plan import Compute, SwapIn, SwapOut
from cohabit.planner.profile import Link
from cohabit.planner.timeline import Span
from cohabit.server.format import gap, milliseconds, nice_ticks, percent, shortened
from cohabit.server.tools.analysis import KINDS, LANES, Kind, PlanAnalysis, bytes_in_use

TIME_UNITS = 100_000
"""Width of the charts in their own coordinates."""
_MOST_ROWS = 25
_NAME_CELLS = 32

_KIND_NAMES: Mapping[Kind, str] = {"resident": "resident parameter", "parameter": "parameter, swapped in"}


def page(analysis: PlanAnalysis) -> str:
    """Return the whole page."""
    folder = files("cohabit.server.tools")
    template = Template((folder / "page.html").read_text(encoding="utf-8"))
    graph, memory = analysis.graph, format_bytes(analysis.memory_bytes)
    return template.substitute(
        title=html.escape(f"{graph.name}, batch {graph.bucket}, in {memory}"),
        style=(folder / "page.css").read_text(encoding="utf-8"),
        script=(folder / "page.js").read_text(encoding="utf-8"),
        subtitle=_subtitle(analysis),
        tiles="".join(
            f"<div class=tile><dt>{name}</dt><dd>{html.escape(value)}</dd><span>{html.escape(note)}</span></div>"
            for name, value, note in _tiles(analysis)
        ),
        lane_labels=_lane_labels(analysis),
        lane_legend=_lane_legend(analysis),
        legend=_legend({k: _KIND_NAMES.get(k, k) for k in KINDS if any(o.kind == k for o in analysis.occupancies)}),
        budget=memory,
        memory_axis=_memory_axis(analysis),
        stalls=_stalls(analysis),
        traffic=_traffic(analysis),
        provenance=_provenance(analysis),
        data=json.dumps(_data(analysis), separators=(",", ":")).replace("<", "\\u003c"),
    )


def _subtitle(analysis: PlanAnalysis) -> str:
    plan = analysis.plan
    parts = [f"{len(analysis.graph.ops)} ops", f"{len(plan.steps)} steps"]
    if not plan.memory.counted:
        memory = plan.memory
        parts.append(
            f"{format_bytes(memory.partition_bytes)} partition + {format_bytes(memory.workspace_bytes)} workspace"
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
    yield (
        "resident weights",
        format_bytes(analysis.resident_bytes),
        f"of {format_bytes(analysis.graph.weight_bytes)}",
    )
    yield "peak memory", format_bytes(analysis.peak_bytes), f"of {format_bytes(analysis.memory_bytes)}"


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
    partition = analysis.plan.memory.partition_bytes / memory
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
    """Return what the script draws. Times are in TIME_UNITS of the last step's end."""
    plan, graph, end_s = analysis.plan, analysis.graph, analysis.end_s or 1.0

    def x(*times_s: float) -> list[float]:
        return [round(time_s / end_s * TIME_UNITS, 1) for time_s in times_s]

    def subject(step: int) -> tuple[str, int]:
        match plan.steps[step]:
            case Compute(op=op):
                return "op", op
            case SwapIn(tensor=tensor):
                return "in", tensor
            case SwapOut(tensor=tensor):
                return "out", tensor
            case drop:
                raise AssertionError(drop)

    def step(span: Span) -> list[Any]:
        return [span.step, *subject(span.step), stall_of.get(span.step), *x(span.start_s, span.end_s)]

    stall_of = {s.step: s.waits_for for s in analysis.stalls}
    return {
        "end": analysis.end_s,
        "answer": x(analysis.timeline.latency_s)[0] if analysis.has_epilogue else None,
        "memory": analysis.memory_bytes,
        "partition": plan.memory.partition_bytes,
        "units": TIME_UNITS,
        "tensors": [[t.name, t.nbytes, t.kind] for t in graph.tensors],
        "ops": [[op.name, op.target] for op in graph.ops],
        "stalls": [[s.step, s.waits_for, *x(s.start_s, s.end_s)] for s in analysis.stalls],
        "lanes": {lane: [step(span) for span in analysis.spans_of(lane)] for lane, _ in LANES},
        "kinds": KINDS,
        "use": [[*x(time_s), [now[kind] for kind in KINDS]] for time_s, now in bytes_in_use(analysis.occupancies)],
        "occupancies": [
            [o.kind, o.what, o.drawn_at, o.drawn_bytes, o.nbytes, o.has_address, *x(o.start_s, o.end_s)]
            for o in analysis.occupancies
            if o.nbytes
        ],
    }
