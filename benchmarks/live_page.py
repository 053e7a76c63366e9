"""What the live page costs the server: sixteen models under load, the page watched in every other turn."""

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from rich.console import Console

from benchmarks.record import parser_of, publish, table_of
from benchmarks.scrape import cpu_s, serve_command, serving
from benchmarks.traffic import Client, client_of
from benchmarks.turns import LIKELY, Ratio, turns
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODELS, MEMORY = 16, "25%"
RATES_PER_S = (0.0, 300.0)
PAIRS = 12
"""Turns with the page and without, at each rate."""
TRACED = 10
"""One of so many requests is traced, so that lanes are drawn as well."""


@dataclass(slots=True)
class Turns:
    """What came out of the turns at one rate, with the page watched or not."""

    cores: list[float] = field(default_factory=list)
    """CPU seconds of the front end and the engine, per second."""
    p50_s: list[float] = field(default_factory=list)
    p99_s: list[float] = field(default_factory=list)
    documents: int = 0
    nbytes: int = 0
    answered: int = 0
    sent: int = 0


@asynccontextmanager
async def watching(url: str, found: Turns) -> AsyncIterator[None]:
    """Read the page's events as the page does, and draw nothing: a browser's work is not the server's."""

    async def read() -> None:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/ui/events", timeout=None) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                found.documents += line.startswith(b"data: ")
                found.nbytes += len(line)

    reader = asyncio.create_task(read())
    try:
        yield
        if reader.done():
            await reader
    finally:
        reader.cancel()


async def turn(
    client: Client, models: Sequence[str], rate_per_s: float, seconds: float, seed: int, found: Turns
) -> None:
    """Send the load for a while, and add what it took."""
    loop = asyncio.get_running_loop()
    before_s, start_s = cpu_s(psutil.Process().children()), loop.time()
    if rate_per_s:
        traffic = await client.open_loop(models, rate_per_s, seconds, seed)
        found.p50_s.append(traffic.percentile_s(50))
        found.p99_s.append(traffic.percentile_s(99))
        found.answered += len(traffic.ok_latencies_s)
        found.sent += sum(traffic.statuses.values())
    else:
        await asyncio.sleep(seconds)
    found.cores.append((cpu_s(psutil.Process().children()) - before_s) / (loop.time() - start_s))


async def measured(folder: Path, turn_s: float) -> dict[tuple[float, bool], Turns]:
    """What came out, by the rate and by whether the page was watched."""
    trace = (f"file={folder / 'live-page-trace.json'}", f"rate={TRACED}")
    flags = [part for setting in trace for part in ("--trace-config", setting)]
    command = serve_command(folder / "repository", MEMORY, "partitioned", folder / "cache", *flags)
    models = [recipe.name for recipe in recipes(MODELS)]
    found = {(rate, watched): Turns() for rate in RATES_PER_S for watched in (False, True)}
    async with serving(command) as server, client_of(server.url, models) as client:
        await client.open_loop(models, max(RATES_PER_S), turn_s)  # warms up
        for pair, watched in turns((False, True), PAIRS):
            for rate in RATES_PER_S:
                of_turn = found[rate, watched]
                async with watching(server.url, of_turn) if watched else nullcontext():
                    await turn(client, models, rate, turn_s, pair, of_turn)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepare_visibly(options.folder / "repository", recipes(MODELS), force=False, console=console)
    found = asyncio.run(measured(options.folder, options.turn))
    rows = [_row(rate, found[rate, False], found[rate, True]) for rate in RATES_PER_S]
    watched = [found[rate, True] for rate in RATES_PER_S]
    size = sum(one.nbytes for one in watched) / max(1, sum(one.documents for one in watched))
    intro = (
        f"{MODELS} models in {MEMORY} of their weights, one server, {PAIRS} turns of {options.turn:g} s each with"
        f" the page's events read and without, in turns; one of {TRACED} requests is traced. *Cores* are CPU"
        " seconds of front end and engine per second: medians; *difference* is the median over pairs of turns,"
        " with the least and the greatest. p50 and p99 are medians of the watched turns; their ratio is the"
        f" geometric mean over pairs, with its {LIKELY:.0%} bootstrap interval. A document, one a"
        f" second, took {size / 1024:.1f} KiB.\n"
    )
    publish(options, "The live page", [intro, table_of(rows)])
    return 0


def _row(rate: float, without: Turns, watched: Turns) -> dict[str, str]:
    more = [b - a for a, b in zip(without.cores, watched.cores, strict=True)]
    row = {
        "requests/s": f"{rate:.0f}",
        "cores, not watched": f"{statistics.median(without.cores):.3f}",
        "cores, watched": f"{statistics.median(watched.cores):.3f}",
        "difference": f"{statistics.median(more):+.1%} ({min(more):+.1%} to {max(more):+.1%})",
    }
    if not rate:
        return row | dict.fromkeys(("p50", "p99", "p99 over unwatched", "answered"), "-")
    return row | {
        "p50": f"{statistics.median(watched.p50_s) * 1e3:.1f} ms",
        "p99": f"{statistics.median(watched.p99_s) * 1e3:.1f} ms",
        "p99 over unwatched": str(Ratio.of(np.divide(watched.p99_s, without.p99_s))),
        "answered": f"{watched.answered + without.answered} of {watched.sent + without.sent}",
    }


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.live_page", __doc__)
    parser.add_argument("--turn", type=float, default=10.0, help="seconds of each turn (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
