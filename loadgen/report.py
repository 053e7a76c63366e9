"""What a run measured, as data and as a table. Durations are seconds; the JSON report is `Report`."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from cohabit.loadgen.load import Load
from cohabit.loadgen.openloop import NOT_SENT, Outcome

FORMAT_VERSION = 2

LATE_GENERATOR_S = 5e-3
"""A send lag (p99) above which latencies measure the generator rather than the server."""

_HEADINGS = ("p50", "p90", "p99", "p99.9", "max", "mean")


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentiles, with linear interpolation between the two nearest samples."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    p999_s: float
    max_s: float


class ModelReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    sent: int
    completed: int
    errors: dict[str, int]
    within_slo: int
    latency: Spread | None
    """Of the completed requests, from their intended send times; None if there are none."""


class RunDescription(Load, frozen=True, kw_only=True):
    """The load of a run, and where and when it ran."""

    url: str
    started_at: str = ""
    """ISO 8601, UTC."""
    command: tuple[str, ...] = ()
    host: str = ""
    """Machine and versions of the generator."""


class Report(RunDescription, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. Requests of the warm-up are in none of the numbers."""

    sent: int
    completed: int
    achieved_per_s: float
    """Completed requests per second, until the last answer if that is later than the end of the run."""
    goodput_per_s: float
    """Requests answered within `slo_s` of their intended send time, per second of the run."""
    latency: Spread | None
    send_lag: Spread | None
    errors: dict[str, int]
    """Requests that were not answered, by kind: "HTTP 503", "timeout", "connection", "not sent"."""
    error_examples: dict[str, str]
    models: tuple[ModelReport, ...]
    format_version: int = FORMAT_VERSION

    @property
    def all_answered(self) -> bool:
        return self.completed > 0 and not self.errors

    @property
    def generator_was_late(self) -> bool:
        return self.send_lag is not None and self.send_lag.p99_s > LATE_GENERATOR_S


def make_report(run: RunDescription, outcomes: Sequence[Outcome], models: Sequence[str]) -> Report:
    """Summarise the outcomes of the arrivals after the warm-up."""
    measured = [o for o in outcomes if o.arrival.at_s >= run.warmup_s]
    completed = [o for o in measured if o.failure is None]
    end_s = max((o.arrival.at_s + o.latency_s for o in completed), default=0.0) - run.warmup_s
    by_model: dict[str, list[Outcome]] = {model: [] for model in models}
    for outcome in measured:
        by_model[outcome.arrival.model].append(outcome)
    reports = tuple(_model_report(model, of_model, run.slo_s) for model, of_model in by_model.items())
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
    )


def spread(samples_s: Sequence[float]) -> Spread | None:
    """Return the percentiles of the samples, or None if there are none."""
    if not samples_s:
        return None
    p50, p90, p99, p999 = np.percentile(samples_s, [50, 90, 99, 99.9]).tolist()
    return Spread(float(np.mean(samples_s)), p50, p90, p99, p999, max(samples_s))


def print_report(report: Report, console: Console) -> None:
    """Print a report's table, and what is wrong with the run if something is."""
    table = Table(
        title="Latency from the intended send time (ms)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", no_wrap=True)
    for heading in ("sent", "answered", "errors", *_HEADINGS):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in report.models:
        table.add_row(row.model, *_cells(row))
    table.add_section()
    table.add_row("all", *_cells(report), style="bold")
    console.print(table)
    console.print(
        f"offered {report.rate_per_s:g}/s, sent {report.sent}, answered {report.completed}"
        f" ({report.achieved_per_s:.1f}/s); within {report.slo_s * 1e3:g} ms: {report.goodput_per_s:.1f}/s"
    )
    if report.send_lag is not None:
        console.print(f"send lag: p50 {_ms(report.send_lag.p50_s)} ms, p99 {_ms(report.send_lag.p99_s)} ms")
    for kind, count in report.errors.items():
        console.print(f"[red]{count} x {kind}[/red]: {report.error_examples[kind]}", highlight=False)
    if report.generator_was_late:
        console.print(
            "[yellow]warning:[/yellow] the generator sent requests late, and the latencies include that;"
            " give it more CPU or a lower rate"
        )


def _cells(row: ModelReport | Report) -> list[str]:
    counts = [str(row.sent), str(row.completed), str(sum(row.errors.values()))]
    s = row.latency
    if s is None:
        return counts + ["-"] * len(_HEADINGS)
    return counts + [_ms(value) for value in (s.p50_s, s.p90_s, s.p99_s, s.p999_s, s.max_s, s.mean_s)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _model_report(model: str, outcomes: Sequence[Outcome], slo_s: float) -> ModelReport:
    completed = [o for o in outcomes if o.failure is None]
    return ModelReport(
        model=model,
        sent=sum(o.failure is None or o.failure.kind != NOT_SENT for o in outcomes),
        completed=len(completed),
        errors=_errors(outcomes),
        within_slo=sum(o.latency_s <= slo_s for o in completed),
        latency=spread([o.latency_s for o in completed]),
    )


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(sorted(Counter(o.failure.kind for o in outcomes if o.failure is not None).items()))
