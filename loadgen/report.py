"""Reports of runs, as data and as tables. Durations are in seconds; the JSON report is `Report`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from hdrh.histogram import HdrHistogram
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import NOT_SENT, Outcome
from cohabit.loadgen.server_times import ServerTimes

FORMAT_VERSION = 3

LATE_GENERATOR_S = 5e-3
"""A run is invalid if its send lag (p99) is above this, and above `LATE_GENERATOR_SHARE` of the latency."""
LATE_GENERATOR_SHARE = 0.1
"""Fraction of the latency (p99), which includes the lag."""

_INTERVALS = 20
_INTERVAL_S = 1.0
_HISTOGRAM_NS = (1_000, 3_600_000_000_000)

_HEADINGS = ("p50", "p90", "p99", "p99.9", "p99.99", "max", "mean")


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles, linearly interpolated between the two nearest samples."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    p9999_s: float
    max_s: float


class TextReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Completed texts."""

    texts: int
    tokens: int
    tokens_per_s: float
    """Over the run, or until the last answer if that comes later."""
    first_token: Spread
    """From the intended send time."""
    between_tokens: Spread | None
    """None if no text has two tokens."""


class ModelReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    sent: int
    completed: int
    errors: dict[str, int]
    within_slo: int
    latency: Spread | None
    """Latency of completed requests, from their intended send times; None if there are none."""
    server: ServerTimes | None = None
    """The server's own times; None if it keeps no statistics."""

    @property
    def due(self) -> int:
        return self.completed + sum(self.errors.values())


class Interval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests due in a part of the run."""

    start_s: float
    """From the end of the warm-up."""
    due: int
    completed: int
    histogram: str
    """Latencies of completed requests in nanoseconds, to three digits: an encoded HdrHistogram (V2, base64)."""


class RunDescription(Load, frozen=True, kw_only=True):
    """A run's load, and where and when it ran."""

    url: str
    started_at: str = ""
    """ISO 8601, UTC."""
    command: tuple[str, ...] = ()
    host: str = ""
    """Machine and versions of the generator."""
    interrupted: bool = False
    """The run was stopped; `duration_s` is its measured part."""
    lane_share: float | None = None
    """Fraction of the time that the server's busiest compute lane computed; None if the server does not report it."""


class Report(RunDescription, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. No number includes requests of the warm-up."""

    sent: int
    completed: int
    achieved_per_s: float
    """Completed requests per second, over the run, or until the last answer if that comes later."""
    goodput_per_s: float
    """Requests answered within `slo_s` of their intended send time, per second of the run."""
    latency: Spread | None
    send_lag: Spread | None
    errors: dict[str, int]
    """Failed requests by kind: "HTTP 503", "timeout", "connection", "not sent"."""
    error_examples: dict[str, str]
    models: tuple[ModelReport, ...]
    generated: TextReport | None = None
    """None if no text was completed."""
    intervals: tuple[Interval, ...] = ()
    """In order; each one second long, or a twentieth of a shorter run."""
    format_version: int = FORMAT_VERSION

    @property
    def due(self) -> int:
        """Requests that were due, answered or not."""
        return self.completed + sum(self.errors.values())

    @property
    def all_answered(self) -> bool:
        return self.completed > 0 and not self.errors

    @property
    def generator_was_late(self) -> bool:
        """Whether the run is invalid, since requests were sent late."""
        if self.send_lag is None:
            return False
        share_s = 0.0 if self.latency is None else LATE_GENERATOR_SHARE * self.latency.p99_s
        return self.send_lag.p99_s > max(LATE_GENERATOR_S, share_s)

    @property
    def within_slo(self) -> float:
        """Fraction of all due requests, including failed ones, answered within `slo_s`."""
        return sum(m.within_slo for m in self.models) / max(1, self.due)

    @property
    def meets_slo(self) -> bool:
        return self.slo_percentile is None or (self.completed > 0 and self.within_slo >= self.slo_percentile / 100)


def make_report(
    run: RunDescription,
    outcomes: Sequence[Outcome],
    models: Sequence[str],
    server: Mapping[str, ServerTimes] | None = None,
) -> Report:
    """Summarise the outcomes of arrivals after the warm-up."""
    measured = [o for o in outcomes if o.arrival.at_s >= run.warmup_s]
    completed = [o for o in measured if o.failure is None]
    end_s = max((o.arrival.at_s + o.latency_s for o in completed), default=0.0) - run.warmup_s
    by_model: dict[str, list[Outcome]] = {model: [] for model in models}
    for outcome in measured:
        by_model[outcome.arrival.model].append(outcome)
    server = server or {}
    reports = tuple(_model_report(m, of_model, run.slo_s, server.get(m)) for m, of_model in by_model.items())
    failures = [o.failure for o in measured if o.failure is not None]
    return Report(
        **msgspec.structs.asdict(run),
        sent=sum(report.sent for report in reports),
        completed=len(completed),
        achieved_per_s=len(completed) / max(run.duration_s, end_s),
        goodput_per_s=sum(report.within_slo for report in reports) / run.duration_s,
        latency=spread([o.latency_s for o in completed]),
        send_lag=spread([o.lag_s for o in measured]),
        errors=_errors(measured),
        error_examples={f.kind: f.detail for f in reversed(failures)},
        models=reports,
        generated=_text_report(completed, max(run.duration_s, end_s)),
        intervals=_intervals(measured, run),
    )


def _text_report(completed: Sequence[Outcome], seconds: float) -> TextReport | None:
    texts = [(o.lag_s, o.tokens) for o in completed if o.tokens is not None]
    first = spread([lag_s + tokens.first_s for lag_s, tokens in texts])
    if first is None:
        return None
    gaps_s = [gap_s for _, tokens in texts for gap_s in tokens.gaps_s]
    count = len(texts) + len(gaps_s)
    return TextReport(len(texts), count, count / seconds, first, spread(gaps_s))


def _intervals(measured: Sequence[Outcome], run: RunDescription) -> tuple[Interval, ...]:
    length_s = min(_INTERVAL_S, run.duration_s / _INTERVALS)
    count = max(1, math.ceil(run.duration_s / length_s - 1e-9))
    histograms = [HdrHistogram(*_HISTOGRAM_NS, 3) for _ in range(count)]
    due = [0] * count
    for outcome in measured:
        k = min(count - 1, int((outcome.arrival.at_s - run.warmup_s) / length_s))
        due[k] += 1
        if outcome.failure is None:
            histograms[k].record_value(max(_HISTOGRAM_NS[0], round(outcome.latency_s * 1e9)))
    return tuple(
        Interval(k * length_s, due[k], histogram.get_total_count(), histogram.encode().decode())
        for k, histogram in enumerate(histograms)
    )


def write_reports(path: Path, reports: Sequence[Report], as_list: bool) -> None:
    """Write one report, or a list of them, as JSON."""
    content = list(reports) if as_list else reports[0]
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def read_reports(path: Path) -> list[Report]:
    """Read a file of `write_reports`. Raises UsageError for any other file."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Report | list[Report])
    except (OSError, msgspec.MsgspecError) as error:
        raise UsageError(f"{path} is not a report of this version of loadgen: {error}") from error
    reports = found if isinstance(found, list) else [found]
    if not reports:
        raise UsageError(f"{path} has no runs")
    return reports


def spread(samples_s: Sequence[float]) -> Spread | None:
    """Return the percentiles of the samples, or None if there are none."""
    if not samples_s:
        return None
    p50, p90, p99, p999, p9999 = np.percentile(samples_s, [50, 90, 99, 99.9, 99.99]).tolist()
    return Spread(float(np.mean(samples_s)), p50, p90, p99, p999, p9999, max(samples_s))


def print_report(report: Report, console: Console) -> None:
    """Print a report's table, and the run's problems, if any."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("model", no_wrap=True)
    for heading in ("sent", "answered", "errors", *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.models:
        table.add_row(row.model, *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(report), style="bold")
    # Titles are printed separately: rich would wrap them at the table's width.
    console.print("Latency from the intended send time (ms)", style="italic", soft_wrap=True)
    console.print(table)
    if any(row.server is not None for row in report.models):
        console.print(f"{SERVER_MEANS} (ms)", style="italic", soft_wrap=True)
        console.print(_server_table(report))
    for remark in remarks(report):
        words, colour = remark.words, _COLOURS[remark.kind]
        opening, colon, rest = words.partition(":")
        shown = (
            f"[{colour}]{escape(opening)}{colon}[/{colour}]{escape(rest)}" if colour and colon else escape(words)
        )
        console.print(shown, highlight=colour is None)


class Remark(msgspec.Struct, frozen=True):
    """A sentence about a run, which the terminal and the page show alike; what it says ends before its first colon."""

    kind: Literal["result", "good", "doubt", "bad"]
    words: str


_COLOURS = {"result": None, "good": "green", "doubt": "yellow", "bad": "red"}


def offered(run: RunDescription) -> str:
    """Describe the load that a run offered."""
    return f"closed loop of {run.concurrency}" if run.concurrency is not None else f"{round(run.rate_per_s, 1):g}/s"


def verdict(report: Report) -> str:
    """Return a run's verdict in a word or two; empty for a run without an SLO."""
    if report.generator_was_late:
        return "invalid"
    if report.slo_percentile is None:
        return ""
    return "meets the SLO" if report.meets_slo else "misses the SLO"


def remarks(report: Report) -> list[Remark]:
    """Describe a run's results, its course, and its verdicts."""
    said = [
        Remark(
            "result",
            f"offered {offered(report)}, sent {report.sent}, answered {report.completed}"
            f" ({report.achieved_per_s:.1f}/s); within {report.slo_s * 1e3:g} ms: {report.within_slo:.2%} of those"
            " that were due",
        )
    ]
    if (texts := report.generated) is not None:
        times = [("first token", texts.first_token), ("between tokens", texts.between_tokens)]
        told = [f"{what} p50 {_ms(s.p50_s)} ms, p99 {_ms(s.p99_s)} ms" for what, s in times if s is not None]
        said.append(
            Remark(
                "result",
                f"{texts.texts} texts of {texts.tokens} tokens ({texts.tokens_per_s:.1f}/s); {'; '.join(told)}",
            )
        )
    # Problems come last: findings, late sends, errors, and the verdict
    said += [Remark("doubt", words) for words in findings(report)]
    if (lag := report.send_lag) is not None:
        said.append(Remark("result", f"send lag: p50 {_ms(lag.p50_s)} ms, p99 {_ms(lag.p99_s)} ms"))
    said += [Remark("bad", f"{n} x {kind}: {report.error_examples[kind]}") for kind, n in report.errors.items()]
    if report.slo_percentile is not None:
        said.append(
            Remark(
                "good" if report.meets_slo else "bad",
                f"SLO {'met' if report.meets_slo else 'missed'}: {report.within_slo:.2%} of the requests were answered"
                f" within {report.slo_s * 1e3:g} ms, {report.slo_percentile:g} % have to be",
            )
        )
    if report.interrupted:
        said.append(Remark("doubt", f"interrupted: after {report.duration_s:.1f} s of measurement"))
    if report.generator_was_late and lag is not None:
        said.append(
            Remark(
                "bad",
                "invalid: the generator could not keep its schedule: it sent requests up to"
                f" {_ms(lag.max_s)} ms late (p99 {_ms(lag.p99_s)} ms), and the latencies include that; give it more"
                " CPU, --processes, or a lower rate",
            )
        )
    return said


def findings(report: Report) -> list[str]:
    """Describe problems in the run's course: a saturated server, or an outage."""
    found = []
    if (growth := _growing_queue(report)) is not None:
        early, late = (_ms(seconds) for seconds in growth)
        found.append(
            f"saturated: {report.achieved_per_s:.1f} of {report.rate_per_s:g} requests/s were answered, and latencies"
            f" grew from {early} to {late} ms: the queue grows as long as the load lasts"
            + ("" if report.lane_share is None else f"; the compute lane was {report.lane_share:.0%} busy")
        )
    length_s = report.duration_s / max(1, len(report.intervals))
    silent = [interval.due > 0 and interval.completed == 0 for interval in report.intervals]
    for is_silent, group in groupby(zip(silent, report.intervals, strict=True), key=lambda pair: pair[0]):
        intervals = [interval for _, interval in group]
        if is_silent and len(intervals) * length_s >= _OUTAGE_S and report.completed:
            start_s = intervals[0].start_s
            found.append(
                f"outage: of the {sum(i.due for i in intervals)} requests that were due from {start_s:.1f} to"
                f" {start_s + len(intervals) * length_s:.1f} s, {len(intervals) * length_s:.1f} s, none was answered"
            )
    return found


_OUTAGE_S = 1.0
_SATURATED, _GROWN = 0.95, 3.0
"""A server is saturated below this fraction of the offered rate, if latencies grow by this factor during the run."""


def _growing_queue(report: Report) -> tuple[float, float] | None:
    """Return the mean latencies of the first and the last quarter of a saturated run; None for other runs."""
    if report.concurrency is not None or report.achieved_per_s > _SATURATED * report.rate_per_s:
        return None
    quarter = max(1, len(report.intervals) // 4)
    means_s = []
    for part in (report.intervals[:quarter], report.intervals[-quarter:]):
        histograms = [HdrHistogram.decode(interval.histogram) for interval in part if interval.completed]
        count = sum(histogram.get_total_count() for histogram in histograms)
        if not count:
            return None
        total = sum(histogram.get_mean_value() * histogram.get_total_count() for histogram in histograms)
        means_s.append(total / count / 1e9)
    return (means_s[0], means_s[1]) if means_s[1] > _GROWN * means_s[0] else None


def runs_table(reports: Sequence[Report]) -> Table:
    """Return a table with one row per run of a sweep."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("offered/s", "answered/s", f"within {reports[0].slo_s * 1e3:g} ms", "p50", "p99", "p99.9"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for report in reports:
        s = report.latency
        shown = ["-"] * 3 if s is None else [_ms(s.p50_s), _ms(s.p99_s), _ms(s.p999_s)]
        rate = f"{report.rate_per_s:g}"
        table.add_row(rate, f"{report.achieved_per_s:.1f}", f"{report.within_slo:.2%}", *shown, verdict(report))
    return table


SERVER_MEANS = "Means as the server counts them, of texts by step; rest: network, front end and client"
SERVER_COLUMNS = ("requests", "queue", "compute", "of which stall", "input, output", "rest", "client's mean")


class ServerRow(NamedTuple):
    """A model's mean times in seconds, by the server but for the last two. The stall is None if it is unknown."""

    model: str
    requests: int
    queue_s: float
    compute_s: float
    stall_s: float | None
    ports_s: float
    rest_s: float
    client_s: float


def server_rows(report: Report) -> list[ServerRow]:
    """Return the rows of the server's means, for models that both sides have measured."""
    rows = []
    for row in report.models:
        if (server := row.server) is not None and row.latency is not None:
            ports_s, mean_s = server.input_s + server.output_s, row.latency.mean_s
            rest_s = mean_s - server.queue_s - server.compute_s - ports_s
            times_s = (server.queue_s, server.compute_s, server.stall_s, ports_s, rest_s, mean_s)
            rows.append(ServerRow(row.model, server.requests, *times_s))
    return rows


def _server_table(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("model", no_wrap=True)
    for heading in SERVER_COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for model, requests, *times_s in server_rows(report):
        table.add_row(model, str(requests), *("-" if time_s is None else _ms(time_s) for time_s in times_s))
    return table


def _cells(row: ModelReport | Report) -> list[str]:
    counts = [str(row.sent), str(row.completed), str(sum(row.errors.values()))]
    s = row.latency
    if s is None:
        return counts + ["-"] * len(_HEADINGS)
    return counts + [_ms(value) for value in (s.p50_s, s.p90_s, s.p99_s, s.p999_s, s.p9999_s, s.max_s, s.mean_s)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _model_report(model: str, outcomes: Sequence[Outcome], slo_s: float, server: ServerTimes | None) -> ModelReport:
    completed = [o for o in outcomes if o.failure is None]
    return ModelReport(
        model=model,
        sent=sum(o.failure is None or o.failure.kind != NOT_SENT for o in outcomes),
        completed=len(completed),
        errors=_errors(outcomes),
        within_slo=sum(o.latency_s <= slo_s for o in completed),
        latency=spread([o.latency_s for o in completed]),
        server=server,
    )


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(sorted(Counter(o.failure.kind for o in outcomes if o.failure is not None).items()))
