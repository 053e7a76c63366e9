"""SwapAdvisor's Figure 8 on this machine: every layout in one run, at several rates, over HTTP.

In each of several rounds, the layouts take turns: a server is started, gets the load at each rate, and is stopped. Two
servers of one layout differ, for example in where their memory lies; new ones in each round show what that does. In one
round all get the same requests, drawn beforehand (open loop). `resident` has all of the memory; the others are compared
with it round by round. Models and caches are those of `make demo`, in `.demo`.
"""

import argparse
import asyncio
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import serve_command, serving
from benchmarks.turns import LIKELY, Ratio, turns
from cohabit.loadgen.errors import ServerFailed
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.run import run_load
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.sizing.problem import ONE_REGION, LayoutName

LAYOUTS: dict[str, tuple[LayoutName, Sequence[str]]] = {
    "resident": ("resident", ()),
    "partitioned": ("partitioned", ()),
    "partitioned, bfloat16": ("partitioned", ("--weights", "bfloat16")),
    "partitioned, int8": ("partitioned", ("--weights", "int8")),
    **{layout: (layout, ()) for layout in ONE_REGION},
}
"""By the name in the table: the layout, and further flags."""
RATES = (100.0, 200.0, 300.0)
COPIED, COMPUTED = "cohabit_swapped_bytes_total", "cohabit_compute_seconds_sum"
COUNTED = ("nv_inference_count", COPIED, COMPUTED)
WARM_UP_S = 1.0
SLO_S = 0.1
SATURATING_CLIENTS = 16
"""Clients of a closed loop that keep a server busy."""
GIVE_UP_S = 5.0
"""Behind the last arrival of a rate that is too high, what still waits is given up after so long."""


@dataclass(slots=True)
class Point:
    """One layout at one rate: a report per round."""

    layout: str
    rate_per_s: float
    reports: list[Report]
    counted: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """What the server counted meanwhile, by metric, warm-up included."""

    def percentiles_s(self, name: str) -> NDArray[np.float64]:
        """A percentile of the latency, such as `p99_s`, by round."""
        return np.array([math.nan if r.latency is None else getattr(r.latency, name) for r in self.reports])

    @property
    def p99_s(self) -> float:
        """The median over the rounds."""
        return float(np.median(self.percentiles_s("p99_s")))

    def per_inference(self, metric: str) -> float:
        return self.counted[metric] / max(1, self.counted["nv_inference_count"])

    def share(self, count: Callable[[Report], int]) -> float:
        return sum(map(count, self.reports)) / max(1, sum(report.sent for report in self.reports))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 if every layout was measured."""
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    folder: Path = options.folder
    prepared = prepare_visibly(folder / "repository", recipes(options.models), force=False, console=console)
    weight_bytes = sum(p.weight_bytes for p in prepared)
    points, notes, swappable_bytes = asyncio.run(_measure(options, weight_bytes, console))
    sections = [
        _about(options, weight_bytes, swappable_bytes),
        table_of(_rows(points)),
        *notes,
        f"![p99 over the rate, by layout]({options.record_as}.png)",
    ]
    written = publish(options, "SwapAdvisor's Figure 8 on the CPU", sections)
    picture = (written or folder / f"{options.record_as}.md").with_suffix(".png")
    draw(points, picture)
    console.print(f"drawn: {picture}", soft_wrap=True)
    return 0 if {point.layout for point in points} == set(options.layouts) else 1


async def _measure(
    options: argparse.Namespace, weight_bytes: int, console: Console
) -> tuple[list[Point], list[str], float]:
    """Every layout at every rate, ordered by layout; why a layout is missing; and the bytes that are ever copied."""
    if options.shares:
        saturation = await _saturation(options)
        console.print(f"resident saturates at {saturation:.0f} requests/s")
        options.rates = [round(share / 100 * saturation) for share in options.shares]
    layouts, rates = list(options.layouts), sorted(options.rates)
    points = {(layout, rate): Point(layout, rate, []) for layout in layouts for rate in rates}
    notes: dict[str, str] = {}
    swappable_bytes = 0.0
    planned = list(turns(layouts, options.rounds))
    for n, layout in track(planned, "rounds", console=console, transient=True):
        if layout in notes:
            continue
        memory = "100%" if layout == "resident" else _memory(options.memory, weight_bytes)
        of_server, flags = LAYOUTS[layout]
        repository, cache = options.folder / "repository", options.folder / "cache"
        try:
            async with serving(serve_command(repository, memory, of_server, cache, *flags)) as server:
                swappable_bytes = server.sum("cohabit_parameter_bytes")
                for rate in rates:
                    point, before = points[layout, rate], {metric: server.sum(metric) for metric in COUNTED}
                    point.reports.append(await run_load(server.url, _load(rate, n, options)))
                    for metric, value in before.items():
                        point.counted[metric] += server.sum(metric) - value
        except ServerFailed as failure:
            notes[layout] = f"{layout}: {str(failure).splitlines()[-1]}\n"
            console.print(notes[layout], soft_wrap=True)
            continue
        p99s = ", ".join(f"{_ms(points[layout, rate].p99_s)} at {rate:g}/s" for rate in rates)
        console.print(f"round {n + 1}, {layout}: median p99 so far, ms: {p99s}", soft_wrap=True)
    return [point for point in points.values() if point.reports], list(notes.values()), swappable_bytes


def _memory(text: str, weight_bytes: int) -> str:
    """A share is of the exported weights, in whichever codec they are stored."""
    return f"{int(float(text[:-1]) / 100 * weight_bytes)}B" if text.endswith("%") else text


async def _saturation(options: argparse.Namespace) -> float:
    """Requests per second that a server with all of the memory answers to clients that always have a request."""
    repository, cache = options.folder / "repository", options.folder / "cache"
    async with serving(serve_command(repository, "100%", "resident", cache)) as server:
        load = msgspec.structs.replace(_load(1.0, 0, options), concurrency=SATURATING_CLIENTS)
        return (await run_load(server.url, load)).achieved_per_s


def _load(rate: float, seed: int, options: argparse.Namespace) -> Load:
    return Load(
        rate_per_s=rate,
        duration_s=options.duration,
        model_count=options.models,
        zipf=options.zipf,
        seed=seed,
        batch=1,
        slo_s=SLO_S,
        timeout_s=GIVE_UP_S,
        warmup_s=WARM_UP_S,
        max_in_flight=20_000,
    )


def _rows(points: Sequence[Point]) -> list[dict[str, str]]:
    resident = {point.rate_per_s: point.percentiles_s("p99_s") for point in points if point.layout == "resident"}
    rows = []
    for point in points:
        p99s = point.percentiles_s("p99_s")
        within = point.share(lambda report: sum(model.within_slo for model in report.models))
        compared = point.rate_per_s in resident and point.layout != "resident"
        over_resident = str(Ratio.of(p99s / resident[point.rate_per_s][: len(p99s)])) if compared else ""
        rows.append(
            {
                "layout, requests/s": f"{point.layout}, {point.rate_per_s:g}",
                "answered": f"{point.share(lambda report: report.completed):.0%}",
                "in 100 ms": f"{within:.0%}",
                "p50 ms": _ms(float(np.median(point.percentiles_s("p50_s")))),
                "p99 ms": _ms(point.p99_s),
                "p99 / resident's": over_resident,
                "MiB copied each": f"{point.per_inference(COPIED) / 2**20:.2f}",
                "compute ms each": f"{point.per_inference(COMPUTED) * 1e3:.2f}",
            }
        )
    return rows


def draw(points: Sequence[Point], path: Path) -> None:
    """The p99 over the rate, a line for each layout."""
    figure, panel = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for layout in dict.fromkeys(point.layout for point in points):
        own = [point for point in points if point.layout == layout]
        style = "--" if layout == "resident" else "-"
        panel.plot([p.rate_per_s for p in own], [p.p99_s * 1e3 for p in own], style, marker="o", label=layout)
    panel.axhline(SLO_S * 1e3, color="grey", linewidth=0.8)
    panel.set(xlabel="requests per second, all models together", ylabel="p99 latency, ms", yscale="log")
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _about(options: argparse.Namespace, weight_bytes: int, swappable_bytes: float) -> str:
    skew = f", chosen by Zipf's law with exponent {options.zipf:g}" if options.zipf else ", chosen evenly"
    total, copied = weight_bytes / 2**20, swappable_bytes / 2**20
    return (
        f"{options.models} models with {total:.1f} MiB of weights{skew}. Of these, {total - copied:.1f} MiB are"
        " embedding tables, which stay in the host store in every layout;"
        f" {copied:.1f} MiB are ever copied to the device. *Resident* has all of the memory, the others"
        f" {options.memory} of the weights."
        f" Batch 1, {options.rounds} rounds of {options.duration:g} s per layout and"
        " rate, in turns, each with a new server. p50 and p99 are medians over the rounds. The ratio is the geometric"
        f" mean of the rounds, with its {LIKELY:.0%} bootstrap interval. Load generator and servers"
        " share the CPUs. What an inference copies and computes are the server's figures, in the mean.\n"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.figure8", __doc__)
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
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
    parser.add_argument(
        "--shares",
        type=_rates,
        default=[],
        metavar="PERCENT,...",
        help="instead, rates in percent of what the resident server answers at most",
    )
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT", help="(default: all)"
    )
    parser.add_argument("--duration", type=float, default=4.0, help="seconds per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per rate (default: %(default)s)")
    parser.add_argument(
        "--zipf", type=float, default=0.0, metavar="S", help="skew of the models' popularity (0: none)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
