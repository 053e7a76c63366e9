"""SwapAdvisor's Figure 8 on this machine: every layout in one run, at several rates, over HTTP.

A server per layout is started, and at each rate they are measured one after the other, the others idle: what else the
machine does meanwhile then falls on all of them. The requests are the same, drawn beforehand, open loop. `resident` has
all of the memory and is what the others are compared with. Six servers take some 4 GiB of the machine's memory.
Everything made lies in `.demo`, as `make demo`'s.
"""

import argparse
import asyncio
import math
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from rich.console import Console

from benchmarks.record import RESULTS, markdown_table, record
from benchmarks.scrape import by_model, free_port
from loadgen.errors import ServerFailed
from loadgen.report import Report
from loadgen.repository import prepare_visibly, recipes
from loadgen.run import Load, run_load
from loadgen.server_process import running_server, server_command
from planner.sizing.deployment import ONE_REGION, LayoutName

LAYOUTS: tuple[LayoutName, ...] = ("resident", "partitioned", *ONE_REGION)
RATES = (50.0, 100.0, 200.0, 300.0)
WARM_UP_S = 1.0
SLO_S = 0.1
GIVE_UP_S = 5.0
"""Behind the last arrival of a rate that is too high, what still waits is given up after so long."""


@dataclass(frozen=True, slots=True)
class Point:
    """One layout at one rate."""

    layout: LayoutName
    report: Report
    swapped_bytes: float

    @property
    def rate_per_s(self) -> float:
        return self.report.rate_per_s

    @property
    def p99_s(self) -> float:
        return math.nan if self.report.latency is None else self.report.latency.p99_s


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every layout was measured."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    folder: Path = options.folder
    prepared = prepare_visibly(folder / "repository", recipes(options.models), force=False, console=console)
    weight_bytes = sum(p.weight_bytes for p in prepared)
    points, notes = asyncio.run(_measure(options, console))
    table = markdown_table(*_table(points))
    console.print(table, soft_wrap=True)
    if options.record:
        record(
            "figure8",
            "SwapAdvisor's Figure 8 on the CPU",
            "benchmarks.figure8",
            [_about(options, weight_bytes), table, *notes, "![p99 over the rate, by layout](figure8.png)"],
        )
    picture = (RESULTS if options.record else folder) / "figure8.png"
    draw(points, picture)
    console.print(f"drawn: {picture}", soft_wrap=True)
    return 0 if {point.layout for point in points} == set(LAYOUTS) else 1


@dataclass(frozen=True, slots=True)
class Running:
    """A layout's server."""

    layout: LayoutName
    url: str
    metrics_url: str


async def _measure(options: argparse.Namespace, console: Console) -> tuple[list[Point], list[str]]:
    """Every layout at every rate, the lowest first, ordered by layout; and why a layout is not there."""
    notes: list[str] = []
    servers: list[Running] = []
    points: list[Point] = []
    async with AsyncExitStack() as stack:
        for layout in LAYOUTS:
            memory = "100%" if layout == "resident" else options.memory
            console.print(f"starting {layout}, memory {memory} of the weights")
            try:
                servers.append(await stack.enter_async_context(_serving(layout, memory, options.folder)))
            except ServerFailed as failure:
                notes.append(f"{layout}: {str(failure).splitlines()[-1]}\n")
                console.print(notes[-1], soft_wrap=True)
        for rate in sorted(options.rates):
            console.rule(f"{rate:g} requests/s")
            for server in servers:
                points.append(await _point(server, rate, options))
                report = points[-1].report
                told = f"{report.completed} of {report.sent} answered, p99 {_ms(points[-1].p99_s)} ms"
                console.print(f"{server.layout}: {told}", soft_wrap=True)
    return sorted(points, key=lambda point: LAYOUTS.index(point.layout)), notes


@asynccontextmanager
async def _serving(layout: LayoutName, memory: str, folder: Path) -> AsyncIterator[Running]:
    metrics_port = free_port()
    command = server_command("cohabit", folder / "repository", memory, layout)
    command += ["--cache", str(folder / "cache"), "--metrics-port", str(metrics_port)]
    async with running_server(command, patience_s=900) as url:
        yield Running(layout, url, f"http://127.0.0.1:{metrics_port}/metrics")


async def _point(server: Running, rate: float, options: argparse.Namespace) -> Point:
    before = sum(by_model(server.metrics_url, "cohabit_swapped_bytes").values())
    report = await run_load(server.url, _load(rate, options))
    swapped = sum(by_model(server.metrics_url, "cohabit_swapped_bytes").values()) - before
    return Point(server.layout, report, swapped)


def _load(rate: float, options: argparse.Namespace) -> Load:
    return Load(
        rate_per_s=rate,
        duration_s=options.duration,
        model_count=options.models,
        zipf=options.zipf,
        seed=0,
        batch=1,
        slo_s=SLO_S,
        timeout_s=GIVE_UP_S,
        warmup_s=WARM_UP_S,
        max_in_flight=20_000,
    )


def _table(points: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    header = [
        "layout, requests/s",
        "answered",
        "in 100 ms",
        "p50 ms",
        "p99 ms",
        "p99 / resident's",
        "MiB copied each",
    ]
    resident = {point.rate_per_s: point.p99_s for point in points if point.layout == "resident"}
    rows = []
    for point in points:
        report = point.report
        p50_s = math.nan if report.latency is None else report.latency.p50_s
        within = sum(model.within_slo for model in report.models)
        rows.append(
            [
                f"{point.layout}, {point.rate_per_s:g}",
                f"{report.completed / max(1, report.sent):.0%}",
                f"{within / max(1, report.sent):.0%}",
                _ms(p50_s),
                _ms(point.p99_s),
                f"{point.p99_s / resident[point.rate_per_s]:.2f}" if point.rate_per_s in resident else "-",
                f"{point.swapped_bytes / 2**20 / max(1, report.completed):.2f}",
            ]
        )
    return header, rows


def draw(points: Sequence[Point], path: Path) -> None:
    """The p99 over the rate, a line for each layout."""
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for layout in LAYOUTS:
        own = [point for point in points if point.layout == layout]
        style = "--" if layout == "resident" else "-"
        panel.plot([p.rate_per_s for p in own], [p.p99_s * 1e3 for p in own], style, marker="o", label=layout)
    panel.axhline(SLO_S * 1e3, color="grey", linewidth=0.8)
    panel.set(xlabel="requests per second, all models together", ylabel="p99 latency, ms", yscale="log")
    panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _about(options: argparse.Namespace, weight_bytes: int) -> str:
    skew = f", chosen by Zipf's law with exponent {options.zipf:g}" if options.zipf else ", chosen evenly"
    return (
        f"{options.models} models with {weight_bytes / 2**20:.1f} MiB of weights (embedding tables in the host store"
        f" included){skew}; {options.duration:g} s per point, batch 1. *Resident* has all of the memory, the others"
        f" {options.memory} of the weights. Load generator and server share the CPUs. Latency counts from the intended"
        " send time, over the answered requests.\n"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figure8", description=__doc__)
    parser.add_argument("--models", type=int, default=16, help="how many models (default: %(default)s)")
    parser.add_argument(
        "--memory", default="25%", metavar="SIZE", help="memory but for resident (25%% of the weights)"
    )
    parser.add_argument(
        "--rates",
        type=_rates,
        default=list(RATES),
        metavar="PER_S,...",
        help=f"requests per second, all models together ({','.join(f'{rate:g}' for rate in RATES)})",
    )
    parser.add_argument("--duration", type=float, default=5.0, help="seconds per point (default: %(default)s)")
    parser.add_argument(
        "--zipf", type=float, default=0.0, metavar="S", help="skew of the models' popularity (0: none)"
    )
    parser.add_argument("--record", action="store_true", help="write docs/results/figure8.md and its picture")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
