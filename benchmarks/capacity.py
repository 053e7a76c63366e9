"""`cohabit fit` against a server: latencies that it predicts, and those that a client measures.

Each layout is served, and gets a Poisson load at each rate over HTTP. What a request and an execution take besides
what plans know is calibrated with all weights resident, at the lowest and the highest rate: a server that has been idle
takes longer, and executions may take longer than their profiles. Every figure is then predicted with the same four
numbers. Models and caches are those of `make demo`, in
`.demo`.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, publish
from benchmarks.scrape import by_model, serve_command, serving
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.run import run_load
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.server.capacity.simulation import IDLE_AFTER_S, Overheads

LAYOUTS = {"resident": "150%", "partitioned": "25%", "time_shared": "25%"}
"""Layouts, with their memory."""
CALM_BUSY = 0.6
"""Up to this share of a lane's time, predictions are to hold."""
WARM_UP_S = 2.0
COUNTERS = ("cohabit_compute_seconds_sum", "nv_inference_exec_count")


@dataclass(frozen=True, slots=True)
class Point:
    """A layout at a rate."""

    layout: str
    rate_per_s: float
    measured: Report
    compute_s: dict[str, float]
    """Seconds of a mean execution, by model."""


class ModelPrediction(msgspec.Struct):
    name: str
    latency_s: float
    """Of an execution, without overheads."""


class Prediction(msgspec.Struct):
    p50_s: float
    p99_s: float
    mean_s: float
    busy: float
    models: list[ModelPrediction]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepare_visibly(options.folder / "repository", recipes(options.models), force=False, console=console)
    points = asyncio.run(_measure(options, console))
    overheads = _calibrated(options, points[0], points[len(options.rates) - 1])
    about = (
        f"Calibrated with all weights resident at {options.rates[0]:g}/s and {options.rates[-1]:g}/s: a request takes"
        f" {overheads.request_s * 1e3:.2f} ms besides its execution, up to {overheads.idle_s * 1e3:.2f} ms more on an"
        f" idle server; an execution takes {overheads.execution_factor:.2f} times its prediction and"
        f" {overheads.execution_s * 1e3:.2f} ms. *Busy* is predicted.\n"
    )
    rows, errors = [], {"p99": list[float](), "mean": list[float]()}
    for point in points:
        found, latency = _predict(options, point, overheads), point.measured.latency
        assert latency is not None
        ratios = {"p99": found.p99_s / latency.p99_s, "mean": found.mean_s / latency.mean_s}
        if found.busy <= CALM_BUSY:
            for name, ratio in ratios.items():
                errors[name].append(abs(ratio - 1))
        cells = [found.mean_s, latency.mean_s, found.p99_s, latency.p99_s]
        rows.append(
            [
                f"{point.layout}, {point.rate_per_s:g}",
                f"{found.busy:.0%}",
                *(f"{seconds * 1e3:.2f}" for seconds in cells),
                *(f"{ratios[name]:.2f}" for name in ("mean", "p99")),
            ]
        )
    header = ["layout, requests/s", "busy", "mean ms, simulated", "measured", "p99 ms, simulated", "measured"]
    table = markdown_table([*header, "mean ratio", "p99 ratio"], rows, shown=False)
    summary = [
        f"{name}: {np.median(found):.0%} off in the median, {max(found):.0%} at worst, of {len(found)} cases up to"
        f" {CALM_BUSY:.0%} busy\n"
        for name, found in errors.items()
        if found
    ]
    publish(options, "`cohabit fit` against a server", [about, table, *summary])
    return 0


async def _measure(options: argparse.Namespace, console: Console) -> list[Point]:
    points = []
    for layout, memory in LAYOUTS.items():
        repository, cache = options.folder / "repository", options.folder / "cache"
        async with serving(serve_command(repository, memory, layout, cache)) as server:
            for rate in options.rates:
                before = [by_model(server.metrics_url, counter) for counter in COUNTERS]
                load = Load(
                    rate_per_s=rate, duration_s=options.duration, model_count=options.models, warmup_s=WARM_UP_S
                )
                report = await run_load(server.url, load)
                await asyncio.sleep(1.1)  # metrics are a second old at most
                after = [by_model(server.metrics_url, counter) for counter in COUNTERS]
                seconds, counts = (
                    {model: value - old[model] for model, value in new.items()}
                    for old, new in zip(before, after, strict=True)
                )
                compute_s = {model: seconds[model] / count for model, count in counts.items() if count}
                points.append(Point(layout, rate, report, compute_s))
                console.print(f"{layout} at {rate:g}/s measured")
    return points


def _calibrated(options: argparse.Namespace, idle: Point, busy: Point) -> Overheads:
    """Return the overheads with which the simulation has the measured means at two rates."""
    plain = {model.name: model.latency_s for model in _predict(options, idle, Overheads()).models}
    predicted_s = [plain[name] for point in (idle, busy) for name in point.compute_s]
    measured_s = [seconds for point in (idle, busy) for seconds in point.compute_s.values()]
    factor, execution_s = (max(float(number), 0.0) for number in np.polyfit(predicted_s, measured_s, 1))
    executions = Overheads(execution_s=execution_s, execution_factor=factor)
    more_s = []
    for point in (idle, busy):
        latency = point.measured.latency
        assert latency is not None
        more_s.append(latency.mean_s - _predict(options, point, executions).mean_s)
    shares = [1 / (1 + point.rate_per_s * IDLE_AFTER_S) for point in (idle, busy)]  # means of Poisson arrivals
    idle_s = max((more_s[0] - more_s[1]) / (shares[0] - shares[1]), 0.0) if shares[0] > shares[1] else 0.0
    return Overheads(max(more_s[1] - idle_s * shares[1], 0.0), idle_s, execution_s, factor)


def _predict(options: argparse.Namespace, point: Point, overheads: Overheads) -> Prediction:
    command = [sys.executable, "-m", "cohabit.server.cli", "fit", str(options.folder / "repository"), "--json"]
    command += ["--cache", str(options.folder / "cache"), "--memory", LAYOUTS[point.layout]]
    command += ["--layout", point.layout, "--rate", str(point.rate_per_s)]
    for flag, seconds in (
        ("--request-ms", overheads.request_s),
        ("--idle-ms", overheads.idle_s),
        ("--execution-ms", overheads.execution_s),
    ):
        command += [flag, str(seconds * 1e3)]
    command += ["--execution-factor", str(overheads.execution_factor)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.convert(json.loads(printed)["fit"], Prediction)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.capacity", __doc__)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--rates", type=float, nargs="+", default=[20.0, 60.0, 100.0, 150.0, 200.0, 250.0])
    parser.add_argument("--duration", type=float, default=30.0, help="seconds per rate (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
