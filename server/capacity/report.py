"""A fit in words, and as a page with p99 over memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cohabit.page.document import (
    Cell,
    ChartAxis,
    FactTable,
    Level,
    Line,
    LineChart,
    ReportDocument,
    Section,
    quantity,
    seconds,
    size,
)
from cohabit.page.html import report_page
from cohabit.planner.errors import format_bytes
from cohabit.server.format import milliseconds, percent

if TYPE_CHECKING:
    from cohabit.server.capacity.fit import Fit, HighestRate


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
    summary = "" if slo_s is None else missed(slo_s, highest)
    sections: list[Section] = [_chart(curve, slo_s), _points(curve)]
    if fit is not None:
        summary = sentence(fit, slo_s)
        sections.append(_models(fit))
    return report_page(ReportDocument(f"What fits: {name}", (summary,), sections))


def _chart(curve: "Sequence[Fit]", slo_s: float | None) -> LineChart:
    # A saturated server's latencies depend on the simulated time: the axis excludes them.
    calm = [p.p99_s for p in curve if not p.is_saturated]
    top_s = 1.1 * max([*calm, slo_s or 0.0]) or 1.0
    most = max(p.memory_bytes for p in curve)
    return LineChart(
        "p99 over memory",
        "Simulated: the server's own scheduler with the times that plans predict.",
        ChartAxis("memory, MiB", "linear", 0.0, most / (1 << 20)),
        ChartAxis("p99, ms", "linear", 0.0, top_s * 1e3),
        ["p99"],
        [Line(0, [(p.memory_bytes / (1 << 20), p.p99_s * 1e3) for p in curve], dots=True)],
        None if slo_s is None else Level(slo_s * 1e3, f"SLO {milliseconds(slo_s)}"),
    )


def _points(curve: "Sequence[Fit]") -> FactTable:
    rows: list[list[Cell]] = [
        [size(p.memory_bytes), seconds(p.p50_s), seconds(p.p99_s), seconds(p.mean_s), quantity(p.busy, "share")]
        for p in curve
    ]
    return FactTable("Latency by memory", "", ["memory", "p50", "p99", "mean", "busy"], rows)


def _models(fit: "Fit") -> FactTable:
    rows: list[list[Cell]] = [
        [
            m.name,
            quantity(m.rate_per_s, "1/s"),
            size(m.partition_bytes),
            seconds(m.resident_s),
            seconds(m.latency_s),
            quantity(m.latency_s / m.resident_s - 1 if m.resident_s > 0 else None, "share"),
            seconds(m.p50_s),
            seconds(m.p99_s),
        ]
        for m in fit.models
    ]
    columns = ["model", "rate", "partition", "run, resident", "run, planned", "slower by", "p50", "p99"]
    return FactTable(f"Models in {format_bytes(fit.memory_bytes)}", "", columns, rows)
