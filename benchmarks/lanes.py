"""One compute lane and two: eight small models, the same memory, two servers that take turns at the same load."""

import argparse
import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.record import markdown_table, parser_of, publish, work_of_two
from benchmarks.scrape import serve_command, serving
from benchmarks.traffic import Client, client_of
from benchmarks.turns import turns
from cohabit.loadgen.zoo.repository import PreparedModel, prepare_visibly, recipes

MODELS, ENTRIES = 8, ("ranker", "bert_small")
LANES = (1, 2)
SHARE_OF_WEIGHTS = 0.2
"""More than half of the weights are embedding tables, which stay in the host's memory."""
BUSY = 0.6
"""Request rate at which latency is measured, over the lowest saturation of the two."""
AT_ONCE = 32
"""Requests under way where saturation is measured."""
TURNS = 4


@dataclass(slots=True)
class Outcome:
    """What came out for one number of lanes."""

    resident_share: float
    saturation_per_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    answered: int = 0
    sent: int = 0

    @property
    def peak_per_s(self) -> float:
        return statistics.median(self.saturation_per_s)

    def percentile_s(self, percent: float) -> float:
        return float(np.percentile(self.latencies_s, percent))


@asynccontextmanager
async def served(
    prepared: Sequence[PreparedModel], folder: Path, lanes: int
) -> AsyncIterator[tuple[Client, Outcome]]:
    """A client of a server with so many lanes, whose cache is kept between runs; nothing found yet."""
    memory = str(int(SHARE_OF_WEIGHTS * sum(one.weight_bytes for one in prepared)))
    flags = ("--compute-lanes", str(lanes))
    command = serve_command(folder / "lanes", memory, None, folder / "lanes-cache", *flags)
    models = [one.recipe.name for one in prepared]
    async with serving(command) as running, client_of(running.url, models) as client:
        running.require_swaps()
        yield client, Outcome(running.resident_share)


async def measured(
    prepared: Sequence[PreparedModel], folder: Path, turn_s: float
) -> tuple[float, dict[int, Outcome]]:
    """Saturation and latency by the number of lanes, and the rate at which latency was measured."""
    models = [one.recipe.name for one in prepared]
    async with AsyncExitStack() as stack:
        serve = {lanes: await stack.enter_async_context(served(prepared, folder, lanes)) for lanes in LANES}
        clients = {lanes: client for lanes, (client, _) in serve.items()}
        found = {lanes: nothing_yet for lanes, (_, nothing_yet) in serve.items()}
        for client in clients.values():
            await client.closed_loop(models, AT_ONCE, 1.0)
        for _, lanes in turns(LANES, TURNS):
            traffic = await clients[lanes].closed_loop(models, AT_ONCE, turn_s)
            found[lanes].saturation_per_s.append(traffic.goodput_per_s)
        rate = BUSY * min(one.peak_per_s for one in found.values())
        for turn, lanes in turns(LANES, TURNS):
            traffic = await clients[lanes].open_loop(models, rate, turn_s, seed=turn)
            found[lanes].latencies_s += traffic.ok_latencies_s
            found[lanes].answered += len(traffic.ok_latencies_s)
            found[lanes].sent += sum(traffic.statuses.values())
    return rate, found


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "lanes", recipes(MODELS, ENTRIES), force=False, console=console)
    rate, found = asyncio.run(measured(prepared, options.folder, options.turn))
    one = found[LANES[0]]
    rows = [
        [
            f"{lanes}",
            f"{it.resident_share:.0%}",
            f"{it.peak_per_s:.0f}",
            f"{it.peak_per_s / one.peak_per_s:.2f}",
            f"{min(it.saturation_per_s):.0f} - {max(it.saturation_per_s):.0f}",
            f"{it.percentile_s(50) * 1e3:.1f}",
            f"{it.percentile_s(99) * 1e3:.1f}",
            f"{it.percentile_s(99) / one.percentile_s(99):.2f}",
            f"{it.answered} of {it.sent}",
        ]
        for lanes, it in found.items()
    ]
    header = [
        "lanes",
        "resident",
        "saturation, 1/s",
        "over one lane's",
        "its turns",
        "p50, ms",
        "p99, ms",
        "over one lane's",
    ]
    table = markdown_table([*header, "answered"], rows)
    intro = (
        f"{MODELS} models ({' and '.join(ENTRIES)} in turn) in {SHARE_OF_WEIGHTS:.0%} of their weights, the second"
        f" workspace included; *resident* is the part of the swappable weights that stays. Two servers take turns,"
        f" {TURNS} of {options.turn:g} s each: saturation with"
        f" {AT_ONCE} requests under way, then p50 and p99 with {rate:.0f} requests/s arriving at random"
        f" ({BUSY:.0%} of the lower saturation). Servers and load generator share the CPUs. Two processes that"
        f" multiply matrices at once do {work_of_two():.2f} times the work of one here.\n"
    )
    publish(options, "Compute lanes", [intro, table])
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.lanes", __doc__)
    parser.add_argument("--turn", type=float, default=2.5, help="seconds of each turn (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
