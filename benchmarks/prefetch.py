"""The next model's leading copies beside the inference before it, or not: two servers in turns, few requests under way.

Parameters come from their file, so that copying takes longer than computing. Each request is followed by one of another
model, and what is next is known when an inference begins. Arrivals at random are in `benchmarks.overload`.
"""

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.overload import ENTRY, MEMORY_MIB, MODELS, Bench
from benchmarks.record import markdown_table, record
from benchmarks.traffic import Traffic, client_of
from loadgen.preparation import prepare_visibly
from loadgen.prepare import recipes

WITHOUT, WITH = "--no-prefetch", "--prefetch"
AT_ONCE = (1, 2, 3, 4)
"""Requests under way. One alone has nothing before it: there nothing is to change."""
TURNS = 12


async def measured(bench: Bench, turn_s: float) -> tuple[str, float, bool]:
    """The table, the part of the parameters that stays, and whether p99 is lower by more than chance."""
    rows, p99_ratios = [], list[float]()
    async with AsyncExitStack() as stack:
        servers, clients = {}, {}
        for flag in (WITHOUT, WITH):
            servers[flag] = await stack.enter_async_context(bench.server("--store", "file", flag))
            clients[flag] = await stack.enter_async_context(client_of(servers[flag].url, bench.models))
            await clients[flag].closed_loop(bench.models, AT_ONCE[-1], 1.0)
        for at_once in AT_ONCE:
            found: dict[str, list[list[float]]] = {WITHOUT: [], WITH: []}
            for turn in range(TURNS):
                for flag in (WITHOUT, WITH) if turn % 2 else (WITH, WITHOUT):
                    traffic = await clients[flag].closed_loop(bench.models, at_once, turn_s)
                    found[flag].append(_figures(traffic))
            without, with_it = (np.array(found[flag]) for flag in (WITHOUT, WITH))
            ratios = with_it / without
            rate, p50, p99 = np.median(ratios, axis=0)
            lower = int((ratios[:, 2] < 1).sum())
            rows.append(
                [
                    str(at_once),
                    f"{statistics.median(without[:, 0]):.0f}",
                    *(f"{statistics.median(without[:, n]) * 1e3:.1f}" for n in (1, 2)),
                    *(f"{ratio:.2f}" for ratio in (rate, p50, p99)),
                    f"{lower} of {TURNS}",
                ]
            )
            p99_ratios.append(float(p99))
        share = servers[WITH].resident_share
    header = [
        "under way",
        "answers/s",
        "p50, ms",
        "p99, ms",
        "answers/s, with / without",
        "p50",
        "p99",
        "p99 lower in",
    ]
    chance, *queued = p99_ratios
    return markdown_table(header, rows), share, max(queued) < min(chance, 1 / chance)


def _figures(traffic: Traffic) -> list[float]:
    return [traffic.goodput_per_s, traffic.percentile_s(50), traffic.percentile_s(99)]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    prepared = prepare_visibly(options.folder / "overload", recipes(MODELS, [ENTRY]), force=False, console=console)
    table, share, holds = asyncio.run(measured(Bench(prepared, options.folder, 0.0, console), options.turn))
    verdict = "Where something is queued, p99 is lower by more than chance."
    if not holds:
        verdict = "**What p99 gains where something is queued does not exceed chance.**"
    console.print(f"{table}\n{verdict}", markup=False, soft_wrap=True)
    if options.record:
        intro = (
            f"{MODELS} x {ENTRY} in {MEMORY_MIB} MiB, {share:.0%} of what is copied at all resident, the rest read from"
            " the file with O_DIRECT. Requests under way ask for the models in turn;"
            f" {TURNS} turns of {options.turn:g} s with each server. Columns 2 to 4 are without prefetch, medians of"
            " turns; then medians of the ratios of two turns, one behind the other. Nothing is to change with one under"
            " way: what it shows is chance. Servers and load generator share the CPUs.\n"
        )
        sections = [intro, table, f"\n{verdict}\n"]
        console.print(f"wrote {record('prefetch', 'The next model begins early', 'benchmarks.prefetch', sections)}")
    return 0 if holds else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefetch", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    parser.add_argument("--turn", type=float, default=2.0, help="seconds of each turn (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write docs/results/prefetch.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
