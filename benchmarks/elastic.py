"""Partitions that follow request rates, where the models' popularity turns over every minute.

Requests arrive at random (open loop, over HTTP) for models whose popularity is Zipf's; every minute the models of the
most popular half change places with the others. `partitioned` divides memory for equal rates, and keeps it so;
`elastic` begins with the same division; `lru` keeps whole models, the most recently used. All get the same requests.
The link is as slow as flash or a narrow bus: copies in RAM are so fast that shares of memory hardly matter.
Models and caches are those of `make demo`.
"""

import argparse
import asyncio
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import serve_command, serving
from cohabit.loadgen.arrivals import draw_arrivals, zipf_weights
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.run import run_load
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

LAYOUTS = ("partitioned", "elastic", "lru")
MEMORY = "25%"
TURN_S = 60.0
ZIPF = 1.2
DIVISIONS = "cohabit_memory_divisions_total"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    models = [recipe.name for recipe in recipes(options.models)]
    prepare_visibly(options.folder / "repository", recipes(options.models), force=False, console=console)
    trace = options.folder / "elastic.csv"
    _write_trace(trace, models, options.rate, options.turns)
    rows, p99_s = [], {}
    for layout in LAYOUTS:
        report, divisions = asyncio.run(_measure(options, layout, trace))
        latency = report.latency
        assert latency is not None
        p99_s[layout] = latency.p99_s
        row = {
            "layout": f"`{layout}`",
            "mean ms": f"{latency.mean_s * 1e3:.2f}",
            "p50 ms": f"{latency.p50_s * 1e3:.2f}",
            "p99 ms": f"{latency.p99_s * 1e3:.2f}",
            "p99 over fixed shares": f"{latency.p99_s / p99_s['partitioned']:.2f}",
            "divisions": f"{divisions:.0f}",
        }
        console.print(row)
        rows.append(row)
    about = (
        f"{len(models)} models in {MEMORY} of their weights, {options.rate:g} requests/s, Zipf {ZIPF:g},"
        f" {options.turns} minutes, a link of {options.link}. Every layout got the same requests.\n"
    )
    publish(options, "Partitions that follow request rates", [about, table_of(rows)])
    return 0


def _write_trace(path: Path, models: Sequence[str], rate_per_s: float, turns: int) -> None:
    """Write arrivals whose popular models are others in every turn."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["time", "model"])
        rows.writerows([f"{at_s:.6f}", model] for at_s, model in _arrivals(models, rate_per_s, turns))


def _arrivals(models: Sequence[str], rate_per_s: float, turns: int) -> Iterator[tuple[float, str]]:
    """Yield when a request arrives, and for which model."""
    for turn in range(turns):
        first = turn * len(models) // 2 % len(models)
        weights = zipf_weights([*models[first:], *models[:first]], ZIPF)
        for arrival in draw_arrivals(rate_per_s, TURN_S, weights, seed=turn):
            yield turn * TURN_S + arrival.at_s, arrival.model


async def _measure(options: argparse.Namespace, layout: str, trace: Path) -> tuple[Report, float]:
    """Serve a layout, and return what its clients saw, and how often memory was divided again."""
    repository, cache = options.folder / "repository", options.folder / "cache"
    command = serve_command(repository, MEMORY, layout, cache, "--link-bandwidth", options.link)
    async with serving(command) as server:
        # Plans for other sizes are made before the first minute, as they would be in a server that runs for long.
        await run_load(server.url, Load(rate_per_s=options.rate, duration_s=options.settle, warmup_s=0.0))
        before = server.total(DIVISIONS)
        report = await run_load(server.url, Load(trace=str(trace), warmup_s=0.0))
        return report, server.total(DIVISIONS) - before


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.elastic", __doc__)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="minutes (default: %(default)s)")
    parser.add_argument(
        "--settle", type=float, default=20.0, help="seconds of equal rates before (default: %(default)s)"
    )
    parser.add_argument("--link", default="1GB/s", help="bandwidth of the link (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
