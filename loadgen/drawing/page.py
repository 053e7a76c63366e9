"""Load tests as one self-contained HTML page: latency over throughput, CDF, timeline, differences."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cohabit.loadgen.drawing.latencies import (
    LIKELY,
    LatencyCurves,
    PercentileDifference,
    Series,
    differences,
    latency_curves,
)
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.report import ModelReport, Report
from cohabit.page.document import (
    Alternatives,
    Cell,
    ChartAxis,
    FactTable,
    Level,
    Line,
    LineChart,
    Phrase,
    Quantity,
    ReportDocument,
    Section,
    quantity,
    seconds,
)
from cohabit.page.html import report_page

_LATENCIES = ("p50", "p90", "p99", "p99.9", "p99.99", "max")
"""Columns of tables."""


def write_page(path: Path, series: Series) -> None:
    """Write a self-contained HTML page."""
    try:
        path.write_text(report_page(load_report(series)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from error


def load_report(series: Series) -> ReportDocument:
    """Describe runs: all of them in one table, and each rate in charts."""
    reports = [report for runs in series.values() for report in runs]
    rates = sorted({report.rate_per_s for report in reports})
    curves = {name: list(map(latency_curves, runs)) for name, runs in series.items()}
    sections: list[Section] = [_runs_table(series)]
    if any(len(runs) > 1 for runs in series.values()):
        sections.append(_throughput(series))
    at_rates = [list(_at_rate(curves, rate, len(rates))) for rate in rates]
    if len(rates) > 1:
        highest = max(report.rate_per_s for report in next(iter(series.values())))
        names = [f"{_number(rate)} requests/s" for rate in rates]
        sections.append(Alternatives("Below, runs at", names, at_rates, rates.index(highest)))
    else:
        sections += at_rates[0]
    first = reports[0]
    about = f"{first.started_at.replace('T', ' ')}; generator on {first.host}"
    return ReportDocument("Load test", (about,), sections, notices=list(_notices(series)))


def _number(rate_per_s: float) -> str:
    return f"{round(rate_per_s, 1):g}"


def _notices(series: Series) -> Iterator[Phrase]:
    """Yield reasons not to trust a run's numbers, and its errors."""
    for name, runs in series.items():
        for run in runs:
            which = f"{name}, {_number(run.rate_per_s)}/s: "
            if run.generator_was_late and run.send_lag:
                lag = seconds(run.send_lag.p99_s)
                yield which, "invalid. Requests were sent late (p99 ", lag, "): this measures the generator."
            if run.interrupted:
                yield (f"{which}interrupted after {run.duration_s:.1f} s.",)
            if not run.meets_slo:
                yield which, "SLO missed, ", *_within_slo(run), "."
            for kind, count in run.errors.items():
                yield (f"{which}{count} \u00d7 {kind}",)


def _within_slo(run: Report) -> Phrase:
    return quantity(run.within_slo, "share"), " in ", seconds(run.slo_s)


def _answered(run: Report | ModelReport) -> Phrase:
    return quantity(run.completed, "count"), " of ", quantity(run.due, "count")


def _latency(times: msgspec.Struct | None, name: str) -> Quantity:
    """Return a percentile by its column's name."""
    return seconds(None if times is None else getattr(times, name.replace(".", "") + "_s"))


def _runs_table(series: Series) -> FactTable:
    rows: list[list[Cell]] = [
        [
            name,
            f"{run.concurrency} clients" if run.concurrency else _number(run.rate_per_s),
            f"{run.achieved_per_s:.1f}",
            _answered(run),
            _within_slo(run),
            *(_latency(run.latency, column) for column in _LATENCIES),
        ]
        for name, runs in series.items()
        for run in runs
    ]
    columns = ["run", "offered/s", "answered/s", "answered", "within SLO", *_LATENCIES]
    return FactTable("Runs", "Latencies are from the intended send time.", columns, rows)


def _throughput(series: Series) -> LineChart:
    lines, ends, latencies_ms = list[Line](), [1.0], list[float]()
    for k, runs in enumerate(series.values()):
        by_rate = sorted(runs, key=lambda run: run.rate_per_s)
        measured = [(run.achieved_per_s, run.latency) for run in by_rate if run.latency]
        lines += [
            Line(k, [(achieved, spread.p99_s * 1e3) for achieved, spread in measured], dots=True),
            Line(k, [(achieved, spread.p50_s * 1e3) for achieved, spread in measured], "dashed"),
        ]
        ends += [achieved for achieved, _ in measured]
        latencies_ms += [latency_s * 1e3 for _, spread in measured for latency_s in (spread.p50_s, spread.p99_s)]
    first = next(iter(series.values()))[0]
    return LineChart(
        "Latency over throughput",
        "Solid: p99, dashed: p50.",
        ChartAxis("answered requests per second", "linear", 0.0, 1.03 * max(ends)),
        _log_axis("latency, ms", latencies_ms),
        list(series),
        lines,
        Level(first.slo_s * 1e3, "SLO"),
    )


def _log_axis(name: str, values: Sequence[float]) -> ChartAxis:
    return ChartAxis(name, "log", min(values, default=1.0), max(values, default=1.0))


def _at_rate(curves: Mapping[str, Sequence[LatencyCurves]], rate_per_s: float, rates: int) -> Iterator[Section]:
    """Yield the sections of one rate. A series of one run is shown at every rate."""
    chosen: dict[str, LatencyCurves] = {}
    for name, own in curves.items():
        at_rate = [one for one in own if one.run.rate_per_s == rate_per_s]
        if at_rate or rates == 1 or len(own) == 1:
            chosen[name] = (at_rate or own)[0]
    if any(one.cdf for one in chosen.values()):
        yield _cdf_chart(curves, chosen)
        yield _timeline_chart(curves, chosen)
    yield from _comparisons(curves, rate_per_s)
    yield from (_models_table(name, one.run) for name, one in chosen.items())


def _cdf_chart(curves: Mapping[str, object], chosen: Mapping[str, LatencyCurves]) -> LineChart:
    answered = [one for one in chosen.values() if one.cdf]
    return LineChart(
        "Share of requests answered within a latency",
        "Of all requests that were due.",
        _log_axis("latency, ms", [latency for one in answered for latency, _ in one.cdf]),
        ChartAxis("answered", "nines", 0.0, max(1 - 1 / (one.run.due + 1) for one in answered)),
        list(curves),
        [Line(k, [*chosen[name].cdf], "steps") for k, name in enumerate(curves) if name in chosen],
    )


def _timeline_chart(curves: Mapping[str, object], chosen: Mapping[str, LatencyCurves]) -> LineChart:
    lines = []
    for k, name in enumerate(curves):
        if name in chosen:
            timeline = chosen[name].timeline
            lines.append(Line(k, [(start_s, p99) for start_s, _, p99 in timeline]))
            lines.append(Line(k, [(start_s, p50) for start_s, p50, _ in timeline], "dashed"))
    runs = [one.run for one in chosen.values()]
    return LineChart(
        "Timeline",
        "Solid: p99, dashed: p50, of requests due in each interval.",
        ChartAxis("seconds of the run", "linear", 0.0, max(run.duration_s for run in runs)),
        _log_axis("latency, ms", [ms for line in lines for _, ms in line.points if ms is not None]),
        list(curves),
        lines,
        Level(runs[0].slo_s * 1e3, "SLO"),
    )


def _comparisons(curves: Mapping[str, Sequence[LatencyCurves]], rate_per_s: float) -> Iterator[FactTable]:
    """Compare each further series with the first."""
    (first_name, firsts), *others = curves.items()
    first = next((one.run for one in firsts if one.run.rate_per_s == rate_per_s), None)
    for name, own in others:
        other = next((one.run for one in own if one.run.rate_per_s == rate_per_s), None)
        rows = [] if first is None or other is None else differences(first, other)
        yield FactTable(
            f"{name} compared with {first_name}, {_number(rate_per_s)}/s",
            "Bootstrap over intervals of the run. It shows chance within these runs, not between runs.",
            ["", first_name, name, "difference", f"{LIKELY * 100:g} % interval", ""],
            [_difference_row(row) for row in rows],
            "Not compared: one of them has no answers at this rate.",
        )


def _difference_row(row: PercentileDifference) -> list[Cell]:
    interval = quantity(row.low_s, "+s"), " to ", quantity(row.high_s, "+s")
    verdict = row.undecided or (
        "may be chance" if not row.is_clear else "lower" if row.other_s < row.first_s else "higher"
    )
    both = seconds(row.first_s), seconds(row.other_s)
    return [row.name, *both, quantity(row.other_s - row.first_s, "+s"), interval, verdict]


def _models_table(name: str, run: Report) -> FactTable:
    latencies = _LATENCIES[:-1]
    means = ("queue", "compute", "stall") if any(m.server for m in run.models) else ()
    rows: list[list[Cell]] = [
        [
            m.model,
            _answered(m),
            *(_latency(m.latency, column) for column in latencies),
            *(_latency(m.server, column) for column in means),
        ]
        for m in run.models
    ]
    about = "Queue, compute and stall (part of compute) are the server's own means." if means else ""
    columns = ["model", "answered", *latencies, *means]
    return FactTable(f"Models: {name}, {_number(run.rate_per_s)}/s", about, columns, rows)
