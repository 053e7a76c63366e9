"""Twenty-four small models in 64 MiB on one core: requests at random times for minutes, and none may fail.

They are served from a bundle, with parameters on flash. The server has one core; the sender, which sends in an open
loop, has the others, where there are any.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.edge.cgroup import MIB, bundle_of, serve_bundle_command
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report, Spread
from cohabit.loadgen.run import run_load
from cohabit.loadgen.server_process import running_server
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

MODELS, MEMORY = 24, "64MiB"
ENTRIES = ("ranker", "ranker", "ranker", "ranker", "mobilenet_v2", "bert_small")
PATIENCE_S = 120.0


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    folder = options.folder / "edge"
    prepared = prepare_visibly(folder / "fleet", recipes(MODELS, ENTRIES), force=False, console=console)
    bundle = bundle_of(folder / "fleet", MEMORY, folder, console)
    report = asyncio.run(_measure(bundle, Load(rate_per_s=options.rate, duration_s=options.seconds)))
    weights = sum(model.weight_bytes for model in prepared) / MIB
    sections = [
        f"{MODELS} models ({', '.join(dict.fromkeys(ENTRIES))}, each with weights of its own) with {weights:.0f} MiB of"
        f" weights in {MEMORY}, served from a bundle with `--engine in-process` on one core. {options.rate:g}"
        f" requests/s at random times for {options.seconds:g} s, over HTTP, batch 1, sent from the other cores."
        " Latencies count from the intended send time.\n",
        *_tables(report),
        f"To hold: no request fails. {report.sent} were sent, {report.sent - report.completed} failed.\n",
    ]
    publish(options, f"{MODELS} small models on one core", sections)
    return 0 if report.all_answered else 1


async def _measure(bundle: Path, load: Load) -> Report:
    """Serve the bundle on the first core, and send the load from the others."""
    first, *others = sorted(os.sched_getaffinity(0))
    command = ["taskset", "-c", str(first), *serve_bundle_command(bundle)]
    os.sched_setaffinity(0, others or [first])
    try:
        async with running_server(command, PATIENCE_S) as url:
            return await run_load(url, load)
    finally:
        os.sched_setaffinity(0, [first, *others])


def _tables(report: Report) -> list[str]:
    families: dict[str, list[Spread]] = {}
    for model in report.models:
        if model.latency is not None:
            families.setdefault(model.model.rpartition("_")[0], []).append(model.latency)
    rows = [] if report.latency is None else [["all", str(MODELS), *_cells([report.latency])]]
    rows += [[family, str(len(spreads)), *_cells(spreads)] for family, spreads in families.items()]
    errors = [[f"`{report.error_examples[kind]}`", str(count)] for kind, count in report.errors.items()]
    latencies = markdown_table(["models", "how many", "p50 ms", "p99 ms", "longest ms"], rows)
    explained = "Of each family, the worst figure that one of its models has.\n"
    return [latencies, explained, *([markdown_table(["error", "times"], errors)] if errors else [])]


def _cells(spreads: Sequence[Spread]) -> list[str]:
    """The worst of each percentile."""
    columns = [[s.p50_s for s in spreads], [s.p99_s for s in spreads], [s.max_s for s in spreads]]
    return [f"{max(column) * 1e3:.1f}" for column in columns]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.edge.fleet", __doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="of load (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests per second (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
