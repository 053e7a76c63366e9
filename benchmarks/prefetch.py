"""The next model's leading copies beside the inference before it, and not: one server that is told so in turns.

Models whose copies take longer than their arithmetic alternate with others of which it is the other way round, and
parameters come from their file. Few requests are under way, of another model each; then they arrive at random.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from benchmarks.overload import Bench, only_child
from benchmarks.ratio import DRAWS, LIKELY, Ratio
from benchmarks.record import markdown_table, record
from benchmarks.scrape import Running
from benchmarks.switchable import OFF, ON
from benchmarks.traffic import Client, Traffic, client_of
from loadgen.repository import prepare_visibly, recipes

MODELS, ENTRIES, MEMORY_MIB = 4, ("ranker", "torchcrepe"), 5
LINKS = (None, "400MB/s")
"""The second stands for a slower flash or bus."""
AT_ONCE = (1, 2, 3)
"""Requests under way. One alone has nothing before it: there nothing is to change."""
BUSY = 0.6
"""Arrival rate at random, over the rate at saturation."""
PROGRAM = "python -m benchmarks.switchable"


@dataclass(frozen=True, slots=True)
class Load:
    """What requests come, for so many seconds with this seed."""

    name: str
    send: Callable[[float, int], Awaitable[Traffic]]
    is_queued: bool
    """Whether a request finds others, which the next model's copies can begin beside."""


@dataclass(frozen=True, slots=True)
class Row:
    """What one load showed."""

    cells: list[str]
    p99: Ratio
    is_queued: bool


class Switch:
    """Turns prefetch on and off, and counts what shows that it was."""

    def __init__(self, server: Running, process: int) -> None:
        self._server = server
        self._process = process

    async def turn(self, on: bool) -> None:
        os.kill(self._process, ON if on else OFF)
        await asyncio.sleep(0.1)

    def counts(self) -> NDArray[np.float64]:
        """Executions, and those of which copies had begun before."""
        return np.array([self._server.sum(name) for name in ("nv_inference_exec_count", "cohabit_prefetch_hits")])


async def measured(bench: Bench, link: str | None, turns: int, turn_s: float) -> tuple[list[Row], float]:
    """A row per load, and the part of the parameters that stays."""
    flags = ["--store", "file", *(() if link is None else ("--link-bandwidth", link))]
    async with (
        bench.server(*flags, program=PROGRAM) as server,
        client_of(server.url, bench.models) as client,
    ):
        switch = Switch(server, only_child())
        rate = BUSY * (await bench.saturation(client, bench.models)).goodput_per_s
        loads = [
            *(_closed(client, bench.models, at_once) for at_once in AT_ONCE),
            _open(client, bench.models, rate),
        ]
        rows = [await _row(load, switch, bench.console, turns, turn_s) for load in loads]
        return rows, server.resident_share


def _closed(client: Client, models: Sequence[str], at_once: int) -> Load:
    def send(turn_s: float, seed: int) -> Awaitable[Traffic]:
        return client.closed_loop(models, at_once, turn_s)

    return Load(f"{at_once} under way", send, at_once > 1)


def _open(client: Client, models: Sequence[str], rate_per_s: float) -> Load:
    def send(turn_s: float, seed: int) -> Awaitable[Traffic]:
        return client.open_loop(models, rate_per_s, turn_s, seed)

    return Load(f"{rate_per_s:.0f}/s at random", send, True)


async def _row(load: Load, switch: Switch, console: Console, turns: int, turn_s: float) -> Row:
    """Turns with and without, one behind the other. Raises RuntimeError if the switch did not do what it says."""
    found: dict[bool, list[list[float]]] = {False: [], True: []}
    latencies: dict[bool, list[float]] = {False: [], True: []}
    counts = {False: np.zeros(2), True: np.zeros(2)}
    for turn in track(range(turns), load.name, console=console, transient=True):
        for on in (False, True) if turn % 2 else (True, False):
            await switch.turn(on)
            before = switch.counts()
            traffic = await load.send(turn_s, turn)
            counts[on] += switch.counts() - before
            found[on].append([traffic.goodput_per_s, *(traffic.percentile_s(q) for q in (50, 99))])
            latencies[on] += traffic.ok_latencies_s
    early = {on: begun / executions for on, (executions, begun) in counts.items()}
    if early[False] or bool(early[True]) != load.is_queued:
        raise RuntimeError(
            f"{load.name}: {early[False]:.0%} began early without prefetch, {early[True]:.0%} with it"
        )
    answers, p50, p99 = (Ratio.of(column) for column in (np.array(found[True]) / np.array(found[False])).T)
    ms = {(q, on): f"{np.percentile(latencies[on], q) * 1e3:.1f}" for q in (50, 99) for on in (False, True)}
    cells = [load.name, f"{early[True]:.0%}", f"{answers.mean:.3f}"]
    cells += [ms[50, False], ms[50, True], str(p50), ms[99, False], ms[99, True], str(p99)]
    return Row(cells, p99, load.is_queued)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "prefetch", recipes(MODELS, ENTRIES), force=False, console=console)
    bench = Bench(prepared, options.folder, 10.0, console, "prefetch", MEMORY_MIB)
    header = ["requests", "begun early", "answers/s", "p50, ms", "with", "ratio", "p99, ms", "with", "ratio"]
    sections, lower, higher = list[str](), 0, 0
    for link in options.link or LINKS:
        rows, share = asyncio.run(measured(bench, link, options.turns, options.turn))
        queued = [row.p99 for row in rows if row.is_queued]
        lower += sum(p99.high < 1 for p99 in queued)
        higher += sum(p99.low > 1 for p99 in queued)
        title = f"## {'The file as fast as it is' if link is None else f'The file at {link}'}\n"
        text = f"{share:.0%} of what is copied at all is resident.\n"
        sections += [title, text, markdown_table(header, [row.cells for row in rows])]
        console.print("\n".join(sections[-3:]), markup=False, soft_wrap=True)
    sections.append(f"By more than chance, p99 is lower with prefetch in {lower} rows and higher in {higher}.\n")
    console.print(sections[-1])
    if options.record:
        intro = (
            f"{MODELS} models ({' and '.join(ENTRIES)} in turn) in {MEMORY_MIB} MiB, the rest read from their files"
            " with O_DIRECT. One server, told by a signal to begin the next model's copies early or not:"
            f" {options.turns} turns of {options.turn:g} s each with and without, one behind the other. Requests under"
            " way ask for the models in turn; with one, nothing is to change. *begun early* is the part of the"
            " executions. Milliseconds are those of all turns together, without and with; a ratio is the geometric mean"
            f" from turn to turn, with the interval in which it is in {LIKELY:.0%} of {DRAWS} draws of as many turns."
            " Server and load generator share the CPUs.\n"
        )
        path = record("prefetch", "The next model begins early", "benchmarks.prefetch", [intro, *sections])
        console.print(f"wrote {path}")
    return 0 if lower and not higher else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=16, help="turns with and without (default: %(default)s)")
    parser.add_argument("--turn", type=float, default=2.0, help="seconds of each turn (default: %(default)s)")
    parser.add_argument("--link", action="append", metavar="SIZE/s", help="only with so slow a link; repeatable")
    parser.add_argument("--record", action="store_true", help="write docs/results/prefetch.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
