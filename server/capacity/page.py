"""A fit in words, and as a page with p99 over memory."""

from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from cohabit.planner.errors import format_bytes
from cohabit.server.format import gap, milliseconds, nice_ticks, percent
from cohabit.server.view.page import static_policy, style_sheet

if TYPE_CHECKING:
    from cohabit.server.capacity.fit import Fit, HighestRate

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _MARGIN = 800, 320, 70, 40, 10
"""Sizes of the chart, in its own units."""


def sentence(fit: "Fit", slo_s: float | None) -> str:
    """Summarize a fit."""
    met = "" if slo_s is None else f", {'meets' if fit.meets(slo_s) else 'misses'} {milliseconds(slo_s)}"
    refused = f", {percent(fit.refused)} refused" if fit.refused else ""
    return (
        f"{len(fit.models)} models, {fit.layout}, in {format_bytes(fit.memory_bytes)} at"
        f" {fit.rate_per_s:.4g} requests/s: p50 {milliseconds(fit.p50_s)}, p99 {milliseconds(fit.p99_s)}{met};"
        f" busy {percent(fit.busy)}{refused} (simulated)"
    )


def missed(slo_s: float, highest: "HighestRate | None") -> str:
    """Say that no memory meets an SLO, and which rate would."""
    found = f"No memory meets {milliseconds(slo_s)} at this rate."
    if highest is None:
        return found
    where = f"in {format_bytes(highest.memory_bytes)}, where all weights stay"
    if not highest.rate_per_s:
        return f"{found} Even a request that meets no other takes longer {where} (simulated)."
    return f"{found} {highest.rate_per_s:.3g} requests/s would, {where} (simulated)."


def fit_page(
    name: str, curve: "Sequence[Fit]", fit: "Fit | None", slo_s: float | None, highest: "HighestRate | None" = None
) -> str:
    """Return a self-contained page of a repository's fits."""
    points = [
        [format_bytes(p.memory_bytes), *map(milliseconds, (p.p50_s, p.p99_s, p.mean_s)), percent(p.busy)]
        for p in curve
    ]
    models = [
        [
            m.name,
            f"{m.rate_per_s:.3g}/s",
            format_bytes(m.partition_bytes),
            milliseconds(m.resident_s),
            milliseconds(m.latency_s),
            gap(m.latency_s, m.resident_s),
            milliseconds(m.p50_s),
            milliseconds(m.p99_s),
        ]
        for m in ([] if fit is None else fit.models)
    ]
    none = "" if slo_s is None else missed(slo_s, highest)
    return _template().substitute(
        policy=escape(static_policy(), quote=True),
        style=style_sheet(),
        title=escape(f"What fits: {name}"),
        sentence=escape(none if fit is None else sentence(fit, slo_s)),
        chart=_chart(curve, slo_s),
        points=_rows(points),
        memory="" if fit is None else f" in {format_bytes(fit.memory_bytes)}",
        models=_rows(models),
    )


def _rows(cells: Sequence[Sequence[str]]) -> str:
    rows = ("".join(f'<td class="n">{escape(cell)}</td>' for cell in row) for row in cells)
    return "".join(f"<tr>{row}</tr>\n" for row in rows)


def _chart(curve: "Sequence[Fit]", slo_s: float | None) -> str:
    """Draw p99 over memory as SVG."""
    # A saturated server's latencies depend on the simulated time: the axis excludes them.
    calm = [p.p99_s for p in curve if not p.is_saturated]
    top_s = 1.1 * max([*calm, slo_s or 0.0]) or 1.0
    most = max(p.memory_bytes for p in curve)

    def x(nbytes: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _MARGIN) * nbytes / most

    def y(seconds: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _MARGIN) * min(seconds / top_s, 1.0)

    def level(seconds: float, style: str) -> str:
        return f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(seconds):.1f}" y2="{y(seconds):.1f}" {style}/>'

    def label(left: float, top: float, anchor: str, text: str) -> str:
        return f'<text x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}">{escape(text)}</text>'

    parts = []
    for tick_ms in nice_ticks(top_s * 1e3, 5):
        parts.append(level(tick_ms / 1e3, 'class="tick"'))
        parts.append(label(_LEFT - 6, y(tick_ms / 1e3) + 4, "end", f"{tick_ms:g} ms"))
    ticks = nice_ticks(most / (1 << 20), 6)
    parts += [label(x(tick * (1 << 20)), _HEIGHT - 15, "middle", f"{tick:g} MiB") for tick in ticks]
    if slo_s is not None:
        parts.append(level(slo_s, 'class="slo"'))
        parts.append(label(_WIDTH - 4, y(slo_s) - 5, "end", f"SLO {milliseconds(slo_s)}"))
    line = " ".join(f"{x(p.memory_bytes):.1f},{y(p.p99_s):.1f}" for p in curve)
    parts.append(f'<polyline points="{line}"/>')
    for p in curve:
        about = escape(f"{format_bytes(p.memory_bytes)}: p99 {milliseconds(p.p99_s)}")
        center = f'cx="{x(p.memory_bytes):.1f}" cy="{y(p.p99_s):.1f}"'
        parts.append(f'<circle {center} r="4"><title>{about}</title></circle>')
    drawn = "".join(parts)
    return (
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="p99 over memory">{drawn}</svg>'
    )


@cache
def _template() -> Template:
    return Template((files("cohabit.server.capacity") / "fit.html").read_text(encoding="utf-8"))
