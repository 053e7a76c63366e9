"""What a run measured, as data. Durations are seconds; the JSON report is this struct."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.openloop import NOT_SENT, Outcome

FORMAT_VERSION = 1

LATE_GENERATOR_S = 5e-3
"""A send lag (p99) from which latencies say more about the generator than about the server."""


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
    """Over the completed requests, from their intended send times; None if there are none."""


class Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One run. Requests of the warm-up are in none of the numbers."""

    url: str
    seed: int
    batch: int
    rate_per_s: float
    """Offered: the rate that arrivals were drawn for."""
    duration_s: float
    warmup_s: float
    slo_s: float

    sent: int
    completed: int
    achieved_per_s: float
    """Completed requests per second, until the last answer when that is later than the end of the run."""
    goodput_per_s: float
    """Requests answered within `slo_s` of their intended send time, per second of the run."""
    latency: Spread | None
    send_lag: Spread | None
    errors: dict[str, int]
    """Requests that were not answered, by kind: "HTTP 503", "timeout", "connection", "not sent"."""
    error_examples: dict[str, str]
    models: tuple[ModelReport, ...]

    started_at: str = ""
    """ISO 8601, UTC."""
    command: tuple[str, ...] = ()
    host: str = ""
    """Machine and versions that the generator ran on."""
    format_version: int = FORMAT_VERSION

    @property
    def all_answered(self) -> bool:
        return self.completed > 0 and not self.errors

    @property
    def generator_was_late(self) -> bool:
        return self.send_lag is not None and self.send_lag.p99_s > LATE_GENERATOR_S


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a report says about the run beside its outcomes."""

    url: str
    seed: int
    batch: int
    rate_per_s: float
    duration_s: float
    warmup_s: float
    slo_s: float
    started_at: str = ""
    command: tuple[str, ...] = ()
    host: str = ""


def make_report(run: Run, outcomes: Sequence[Outcome], models: Sequence[str]) -> Report:
    """Summarise the outcomes of the arrivals after the warm-up."""
    measured = [o for o in outcomes if o.arrival.at_s >= run.warmup_s]
    completed = [o for o in measured if o.failure is None]
    end_s = max((o.arrival.at_s + o.latency_s for o in completed), default=0.0) - run.warmup_s
    by_model: dict[str, list[Outcome]] = {model: [] for model in models}
    for outcome in measured:
        by_model[outcome.arrival.model].append(outcome)
    failures = [o.failure for o in measured if o.failure is not None]
    return Report(
        **msgspec.structs.asdict(run),
        sent=_sent(measured),
        completed=len(completed),
        achieved_per_s=len(completed) / max(run.duration_s, end_s),
        goodput_per_s=_within(completed, run.slo_s) / run.duration_s,
        latency=spread([o.latency_s for o in completed]),
        send_lag=spread([o.lag_s for o in measured]),
        errors=_errors(measured),
        error_examples={f.kind: f.detail for f in reversed(failures)},
        models=tuple(_model_report(model, of_model, run.slo_s) for model, of_model in by_model.items()),
    )


def spread(samples_s: Sequence[float]) -> Spread | None:
    """Return the percentiles of the samples, or None if there are none."""
    if not samples_s:
        return None
    p50, p90, p99, p999 = np.percentile(samples_s, [50, 90, 99, 99.9]).tolist()
    return Spread(float(np.mean(samples_s)), p50, p90, p99, p999, max(samples_s))


def _model_report(model: str, outcomes: Sequence[Outcome], slo_s: float) -> ModelReport:
    completed = [o for o in outcomes if o.failure is None]
    return ModelReport(
        model=model,
        sent=_sent(outcomes),
        completed=len(completed),
        errors=_errors(outcomes),
        within_slo=_within(completed, slo_s),
        latency=spread([o.latency_s for o in completed]),
    )


def _sent(outcomes: Sequence[Outcome]) -> int:
    return sum(o.failure is None or o.failure.kind != NOT_SENT for o in outcomes)


def _within(completed: Sequence[Outcome], slo_s: float) -> int:
    return sum(o.latency_s <= slo_s for o in completed)


def _errors(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(sorted(Counter(o.failure.kind for o in outcomes if o.failure is not None).items()))
