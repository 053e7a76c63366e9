"""Draws runs as one self-contained HTML page, or as pictures: latency over throughput, CDF, timeline, differences."""

import functools
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hdrh.histogram import HdrHistogram
from numpy.typing import NDArray

from cohabit.loadgen.errors import UnavailableModel, UsageError
from cohabit.loadgen.report import Report

LIKELY = 0.95
"""Confidence level of the intervals of differences."""
_DRAWS = 1000
_PERCENTILES = (50.0, 90.0, 99.0, 99.9)
_CDF_POINTS = 200

Series = Mapping[str, Sequence[Report]]
"""Runs by file name. The others are compared with the first."""


def write_page(path: Path, series: Series) -> None:
    """Write a self-contained HTML page."""
    data = {
        "series": [{"name": name, "runs": [_run(report) for report in runs]} for name, runs in series.items()],
        "differences": _differences(series),
    }
    # "</script>" in a model's name must not end the script.
    text = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    template = files("cohabit.loadgen").joinpath("page.html").read_text(encoding="utf-8")
    try:
        path.write_text(template.replace("null/*data*/", text), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from error


def _run(report: Report) -> dict[str, Any]:
    counts = _counts(report)
    values_ms, totals = counts.values_s * 1e3, counts.by_interval.sum(axis=0)
    due = report.completed + sum(report.errors.values())
    shares = np.cumsum(totals) / max(1, due)
    steps = np.unique(
        np.searchsorted(shares, 1 - np.geomspace(1, 1 / max(2, due), _CDF_POINTS)).clip(0, len(shares) - 1)
    )
    length_s = report.duration_s / max(1, len(report.intervals))
    return {
        "rate": report.rate_per_s,
        "achieved": report.achieved_per_s,
        "due": due,
        "answered": report.completed,
        "within": report.within_slo,
        "slo_ms": report.slo_s * 1e3,
        "slo_percentile": report.slo_percentile,
        "meets_slo": report.meets_slo,
        "errors": report.errors,
        "late_ms": report.send_lag.p99_s * 1e3 if report.generator_was_late and report.send_lag else None,
        "interrupted": report.interrupted,
        "closed_loop": report.concurrency,
        "started_at": report.started_at,
        "host": report.host,
        "seconds": report.duration_s,
        "latency": _in_ms(report.latency),
        "models": [
            {"model": m.model, "due": m.completed + sum(m.errors.values()), "answered": m.completed}
            | {"latency": _in_ms(m.latency), "server": _in_ms(m.server)}
            for m in report.models
        ],
        "cdf": [[float(values_ms[k]), float(shares[k])] for k in steps] if len(values_ms) else [],
        "timeline": [
            [interval.start_s, *_quantiles(row, values_ms, (50.0, 99.0)), interval.completed / length_s]
            for interval, row in zip(report.intervals, counts.by_interval, strict=True)
        ],
    }


def _in_ms(times: msgspec.Struct | None) -> dict[str, float | None] | None:
    """Convert times to milliseconds, renaming `p99_s` to `p99`."""
    if times is None:
        return None
    return {
        name.removesuffix("_s"): None if value is None else value * 1e3
        for name, value in msgspec.structs.asdict(times).items()
        if name.endswith("_s")
    }


class LatencyCounts(msgspec.Struct, frozen=True):
    """Histogram of latencies per interval of the run."""

    values_s: NDArray[np.float64]
    """Ascending; shape [values]."""
    by_interval: NDArray[np.int64]
    """Shape [intervals, values]."""


@functools.lru_cache(maxsize=256)
def _decoded(histogram: str) -> Mapping[int, int]:
    """Return the counts by latency in nanoseconds."""
    decoded = HdrHistogram.decode(histogram)
    counts = np.array(decoded.counts[: decoded.counts_len])
    return {decoded.get_value_from_index(int(k)): int(counts[k]) for k in np.flatnonzero(counts)}


def _counts(report: Report) -> LatencyCounts:
    decoded = [_decoded(interval.histogram) for interval in report.intervals]
    values = sorted(set().union(*decoded)) if decoded else []
    table = np.array([[counts.get(v, 0) for v in values] for counts in decoded], dtype=np.int64)
    return LatencyCounts(np.array(values) / 1e9, table.reshape(len(decoded), len(values)))


def _quantiles(
    counts: NDArray[Any], values: NDArray[np.float64], percentiles: Sequence[float]
) -> list[float | None]:
    """Return percentiles of counted values; all None if there are no counts."""
    total = counts.sum()
    if not total:
        return [None] * len(percentiles)
    ranks = np.searchsorted(np.cumsum(counts), np.array(percentiles) / 100 * total - 1e-9)
    return [float(values[min(k, len(values) - 1)]) for k in ranks]


def _differences(series: Series) -> list[dict[str, Any]]:
    """Compare each further series with the first, at the rates that both have."""
    (first_name, first), *others = series.items()
    by_rate = {report.rate_per_s: report for report in first}
    found = []
    for name, runs in others:
        for report in runs:
            if report.rate_per_s in by_rate:
                rows = differences(by_rate[report.rate_per_s], report)
                found.append({"first": first_name, "other": name, "rate": report.rate_per_s, "rows": rows})
    return found


def differences(first: Report, other: Report, seed: int = 0) -> list[dict[str, float | str | bool]]:
    """Compare percentiles of two runs in milliseconds, with bootstrap intervals of the difference.

    The bootstrap draws intervals of the run with replacement, not requests: latencies of neighbours are correlated, so
    drawing requests would make the interval too narrow.
    """
    rng = np.random.default_rng(seed)
    drawn = [_resampled(_counts(report), rng) for report in (first, other)]
    samples = [sample for sample in drawn if sample is not None]
    exact = [report.latency for report in (first, other)]
    rows: list[dict[str, float | str | bool]] = []
    if len(samples) < 2 or exact[0] is None or exact[1] is None:
        return rows
    for k, percentile in enumerate(_PERCENTILES):
        field = f"p{percentile:g}".replace(".", "") + "_s"
        first_ms, other_ms = (getattr(spread, field) * 1e3 for spread in exact)
        count = min(map(len, samples))  # draws without any answer are left out
        drawn_ms = (samples[1][:count, k] - samples[0][:count, k]) * 1e3
        low, high = np.quantile(drawn_ms, [(1 - LIKELY) / 2, (1 + LIKELY) / 2]).tolist()
        row: dict[str, float | str | bool] = {"name": f"p{percentile:g}", "first": first_ms, "other": other_ms}
        why = _undecided(first, other, percentile)
        is_clear = not why and bool(low > 0 or high < 0)
        rows.append(row | {"low": low, "high": high, "is_clear": is_clear, "undecided": why})
    return rows


_LEAST_BEYOND = 10
"""Minimum requests of each run beyond a percentile for a meaningful interval."""


def _undecided(first: Report, other: Report, percentile: float) -> str:
    """Return why a percentile of two runs cannot be compared; empty if it can."""
    if first.generator_was_late or other.generator_was_late:
        return "a run is invalid"
    beyond = min(first.completed, other.completed) * (1 - percentile / 100)
    return "too few requests" if beyond < _LEAST_BEYOND - 1e-9 else ""


def _resampled(counts: LatencyCounts, rng: np.random.Generator) -> NDArray[np.float64] | None:
    """Return percentiles [draws, percentiles] of runs resampled from this one's intervals; None without latencies."""
    count = len(counts.by_interval)
    if not len(counts.values_s):
        return None
    drawn = rng.multinomial(count, [1 / count] * count, size=_DRAWS).astype(np.float64)
    sums = np.cumsum(drawn @ counts.by_interval.astype(np.float64), axis=1)
    sums = sums[sums[:, -1] > 0]
    columns = [(sums < p / 100 * sums[:, -1:] - 1e-9).sum(axis=1) for p in _PERCENTILES]
    sampled_s: NDArray[np.float64] = counts.values_s[np.stack(columns, axis=1)]
    return sampled_s


def write_pictures(folder: Path, series: Series) -> None:
    """Write throughput.png (for several rates), cdf.png and timeline.png, the last two of the highest common rate."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UnavailableModel("--png needs matplotlib: pip install matplotlib") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    runs = {name: sorted(map(_run, reports), key=lambda run: run["rate"]) for name, reports in series.items()}
    if max(map(len, runs.values())) > 1:  # a curve needs several rates
        figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for name, own in runs.items():
            answered = [run for run in own if run["latency"]]
            panel.plot([r["achieved"] for r in answered], [r["latency"]["p99"] for r in answered], "o-", label=name)
        panel.set(xlabel="answered requests per second", ylabel="p99 latency, ms", yscale="log")
        panel.legend()
        figure.savefig(folder / "throughput.png", dpi=130)
        plt.close(figure)
    # The other pictures have one run per series, at the same rate if there is one.
    common = set.intersection(*({run["rate"] for run in own} for own in runs.values()))
    chosen = {
        name: next((r for r in own if r["rate"] == max(common, default=None)), own[-1])
        for name, own in runs.items()
    }
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, run in chosen.items():
        panel.step(
            [x for x, _ in run["cdf"]],
            [1 - y for _, y in run["cdf"]],
            where="post",
            label=f"{name}, {run['rate']:g}/s",
        )
    panel.set(xlabel="latency, ms", ylabel="share of requests not answered by then", xscale="log", yscale="log")
    panel.legend()
    figure.savefig(folder / "cdf.png", dpi=130)
    plt.close(figure)
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, run in chosen.items():
        points = [point for point in run["timeline"] if point[2] is not None]
        panel.plot([p[0] for p in points], [p[2] for p in points], label=f"{name}, {run['rate']:g}/s")
    panel.set(xlabel="seconds of the run", ylabel="p99 latency, ms", yscale="log")
    panel.legend()
    figure.savefig(folder / "timeline.png", dpi=130)
    plt.close(figure)
