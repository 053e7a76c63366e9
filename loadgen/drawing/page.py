"""Load tests as one self-contained HTML page: latency over throughput, CDF, timeline, differences."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cohabit.loadgen.drawing.latencies import (
    LIKELY,
    LatencyCurves,
    PercentileDifference,
    Series,
    differences,
    latency_curves,
)
from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.report import (
    SERVER_COLUMNS,
    SERVER_MEANS,
    ModelReport,
    Report,
    ServerRow,
    Spread,
    offered,
    remarks,
    server_rows,
    verdict,
)
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
    loads = list(dict.fromkeys(offered(run) for runs in series.values() for run in sorted(runs, key=_load)))
    curves = {name: list(map(latency_curves, runs)) for name, runs in series.items()}
    sections: list[Section] = [_runs_table(series)]
    if any(len(runs) > 1 for runs in series.values()):
        sections.append(_throughput(series))
    at_loads = [list(_at_load(curves, load)) for load in loads]
    if len(loads) > 1:
        highest = offered(max(next(iter(series.values())), key=_load))
        sections.append(Alternatives("Below, runs at", loads, at_loads, loads.index(highest)))
    else:
        sections += at_loads[0]
    first = next(iter(series.values()))[0]
    about = f"{first.started_at.replace('T', ' ')}; generator on {first.host}"
    notices: list[Phrase] = [
        (f"{name}: {remark.words}" if len(loads) == 1 else f"{name}, {offered(run)}: {remark.words}",)
        for name, runs in series.items()
        for run in runs
        for remark in remarks(run)
        if remark.kind in ("doubt", "bad")
    ]
    return ReportDocument("Load test", (about,), sections, notices=notices)


def _load(run: Report) -> float:
    return float(run.concurrency or run.rate_per_s)


def _within_slo(run: Report) -> Phrase:
    return quantity(run.within_slo, "share"), " in ", seconds(run.slo_s)


def _answered(run: Report | ModelReport) -> Phrase:
    return quantity(run.completed, "count"), " of ", quantity(run.due, "count")


def _latency(times: Spread | None, name: str) -> Quantity:
    """Return a percentile by its column's name."""
    return seconds(None if times is None else getattr(times, name.replace(".", "") + "_s"))


def _runs_table(series: Series) -> FactTable:
    rows: list[list[Cell]] = [
        [
            name,
            offered(run),
            f"{run.achieved_per_s:.1f}",
            _answered(run),
            _within_slo(run),
            *(_latency(run.latency, column) for column in _LATENCIES),
            verdict(run),
        ]
        for name, runs in series.items()
        for run in runs
    ]
    columns = ["run", "offered", "answered/s", "answered", "within SLO", *_LATENCIES, ""]
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


def _at_load(curves: Mapping[str, Sequence[LatencyCurves]], load: str) -> Iterator[Section]:
    """Yield the sections of one load, with the runs that offered it."""
    chosen = {name: one for name, own in curves.items() for one in own if offered(one.run) == load}
    yield from (_remarks_table(name, one.run) for name, one in chosen.items())
    if any(one.cdf for one in chosen.values()):
        yield _cdf_chart(curves, chosen)
        yield _timeline_chart(curves, chosen)
    yield from _comparisons(curves, load)
    for name, one in chosen.items():
        yield _models_table(name, one.run)
        if rows := server_rows(one.run):
            yield _server_table(name, one.run, rows)


def _remarks_table(name: str, run: Report) -> FactTable:
    """What the terminal says below its tables."""
    rows: list[list[Cell]] = [[remark.words] for remark in remarks(run)]
    return FactTable(f"Results: {name}, {offered(run)}", "", [""], rows)


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


def _comparisons(curves: Mapping[str, Sequence[LatencyCurves]], load: str) -> Iterator[FactTable]:
    """Compare each further series with the first."""
    (first_name, firsts), *others = curves.items()
    first = next((one.run for one in firsts if offered(one.run) == load), None)
    for name, own in others:
        other = next((one.run for one in own if offered(one.run) == load), None)
        if first is None or other is None:
            continue
        yield FactTable(
            f"{name} compared with {first_name}, {load}",
            "Bootstrap over intervals of the run. It shows chance within these runs, not between runs.",
            ["", first_name, name, "difference", f"{LIKELY * 100:g} % interval", ""],
            [_difference_row(row) for row in differences(first, other)],
            "Not compared: one of them has no answers.",
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
    rows: list[list[Cell]] = [
        [m.model, _answered(m), *(_latency(m.latency, column) for column in latencies)] for m in run.models
    ]
    columns = ["model", "answered", *latencies]
    return FactTable(f"Models: {name}, {offered(run)}", "Latencies are from the intended send time.", columns, rows)


def _server_table(name: str, run: Report, rows: Sequence[ServerRow]) -> FactTable:
    cells: list[list[Cell]] = [
        [model, quantity(requests, "count"), *map(seconds, times_s)] for model, requests, *times_s in rows
    ]
    return FactTable(f"Server: {name}, {offered(run)}", f"{SERVER_MEANS}.", ["model", *SERVER_COLUMNS], cells)
