"""The demonstration behind `make demo`: sixteen models in a quarter of their memory, under four policies.

A server per policy is started. They get the same requests in many short turns, one after the other, so that other work
of the machine falls on all of them. Everything it makes lies in `.demo`; running it again uses what is there.
"""

import argparse
import asyncio
import io
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.record import parser_of, record, results_folder
from benchmarks.scrape import cpu_s, serve_command, serving
from benchmarks.turns import LIKELY, Ratio, turns
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.run import run_load
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

POLICIES = {
    "resident": ("all resident", "100%"),
    "partitioned": ("partitioned", "25%"),
    "lru": ("LRU cache", "25%"),
    "time_shared": ("time sharing", "25%"),
}
"""By the server's name for it: the name shown, and the memory as a share of the weights."""
OWN = "partitioned"
RATES_PER_S = (300, 200, 150, 100, 70, 50, 30, 20, 10)
LOAD_SHARE = 0.6
"""The rate is the highest of RATES_PER_S below this share of what the machine saturates at."""
SATURATING_CLIENTS, SATURATION_S = 16, 4.0
WARM_UP_S = 0.25
BUSY = 0.05
"""Share of the CPUs used by other work during the turns from which the sentence mentions it."""
WIDTH = 80
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    # As an interrupt, SIGTERM ends the servers, too, which have sessions of their own.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    folder: Path = options.folder
    console.print(f"[1/3] {options.models} models are exported to {folder} (the first time: a minute or two)")
    prepared = prepare_visibly(folder / "repository", recipes(options.models), force=False, console=console)
    weight_bytes = sum(p.weight_bytes for p in prepared)
    try:
        measured = asyncio.run(_measure(options, console))
    except KeyboardInterrupt:
        console.print("interrupted")
        return INTERRUPTED
    shown: list[Table | str] = [_table(measured), *verdict(measured)]
    console.print(*shown, sep="\n")
    picture = (results_folder() if options.record else folder) / "demo.png"
    draw(measured, picture)
    console.print(f"\nPicture: {picture}", soft_wrap=True)
    if options.record:
        _record(options, shown, weight_bytes)
    return 0 if all(report.all_answered for own in measured.reports.values() for report in own) else 1


@dataclass(slots=True)
class Measured:
    """A report per policy and turn."""

    rate_per_s: float
    saturation_per_s: float
    """What a server with all of the memory answers to clients that always have a request."""
    reports: dict[str, list[Report]] = field(default_factory=lambda: {policy: [] for policy in POLICIES})
    others: list[float] = field(default_factory=list)
    """Share of the CPUs that other processes and other virtual machines used, by turn of a policy."""

    def percentiles_s(self, policy: str, name: str) -> NDArray[np.float64]:
        """A percentile of the latency, such as `p99_s`, by turn; NaN without answers."""
        spreads = [report.latency for report in self.reports[policy]]
        return np.array([np.nan if spread is None else getattr(spread, name) for spread in spreads])

    def ratio(self, policy: str, name: str) -> Ratio | None:
        """Our percentile over another policy's, turn by turn; None with fewer than two turns that have both."""
        ratios = self.percentiles_s(OWN, name) / self.percentiles_s(policy, name)
        ratios = ratios[np.isfinite(ratios)]
        return Ratio.of(ratios) if len(ratios) > 1 else None


async def _measure(options: argparse.Namespace, console: Console) -> Measured:
    async with AsyncExitStack() as stack:
        urls = {}
        console.print(f"[2/3] {len(POLICIES)} servers are started (the first time, each plans its models)")
        for policy, (name, memory) in POLICIES.items():
            command = serve_command(options.folder / "repository", memory, policy, options.folder / "cache")
            with console.status(f"{name}, memory for {memory} of the weights"):
                urls[policy] = (await stack.enter_async_context(serving(command))).url
            console.print(f"      {name}, memory for {memory} of the weights: ready")
        closed = msgspec.structs.replace(_load(options, 1.0, SATURATION_S, 0), concurrency=SATURATING_CLIENTS)
        saturation_per_s = (await run_load(urls["resident"], closed)).achieved_per_s
        measured = Measured(options.rate or rate_for(saturation_per_s), saturation_per_s)
        console.print(
            f"[3/3] {measured.rate_per_s:g} requests/s to each in {options.turns} turns of"
            f" {options.duration / options.turns:.1f} s (with all models resident, this machine answers"
            f" {saturation_per_s:.0f}/s)"
        )
        for policy in POLICIES:  # a first turn of each is not counted
            await run_load(urls[policy], _load(options, measured.rate_per_s, 1.0, options.turns))
        planned = list(turns(POLICIES, options.turns))
        for turn, policy in track(planned, "      turns", console=console, transient=True):
            load = _load(options, measured.rate_per_s, options.duration / options.turns, turn)
            before = psutil.cpu_times(), cpu_s([psutil.Process()])
            measured.reports[policy].append(await run_load(urls[policy], load))
            measured.others.append(others_share(before, (psutil.cpu_times(), cpu_s([psutil.Process()]))))
    return measured


def rate_for(saturation_per_s: float) -> float:
    """Return the rate at which every policy should keep up."""
    return next((rate for rate in RATES_PER_S if rate <= LOAD_SHARE * saturation_per_s), RATES_PER_S[-1])


Times = tuple[Any, float]
"""The machine's CPU times, and the CPU seconds of this process and its servers."""


def others_share(before: Times, after: Times) -> float:
    """Return the share of the CPUs that neither idled nor worked for us: other processes, other virtual machines."""
    spent = dict(zip(after[0]._fields, np.subtract(after[0], before[0]), strict=True))
    spent = {name: s for name, s in spent.items() if not name.startswith("guest")}  # part of user
    idle_s = spent["idle"] + spent.get("iowait", 0.0)
    total_s = sum(spent.values())
    return float(max(0.0, total_s - idle_s - (after[1] - before[1])) / total_s) if total_s > 0 else 0.0


def _load(options: argparse.Namespace, rate_per_s: float, duration_s: float, seed: int) -> Load:
    return Load(
        rate_per_s=rate_per_s,
        duration_s=duration_s,
        model_count=options.models,
        seed=seed,
        timeout_s=60.0,
        warmup_s=WARM_UP_S,
        max_in_flight=20_000,
    )


def _table(measured: Measured) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("policy", no_wrap=True)
    for heading in ("memory", "answered", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column(f"p99 of {OWN} / its p99", justify="right", no_wrap=True)
    for policy, (name, memory) in POLICIES.items():
        reports, ratio = measured.reports[policy], None if policy == OWN else measured.ratio(policy, "p99_s")
        table.add_row(
            name,
            memory,
            f"{sum(r.completed for r in reports) / max(1, sum(r.due for r in reports)):.0%}",
            *(f"{np.nanmedian(measured.percentiles_s(policy, key)) * 1e3:.1f}" for key in ("p50_s", "p99_s")),
            "" if ratio is None else _interval(ratio),
            style="bold" if policy == OWN else None,
        )
    return table


def verdict(measured: Measured) -> list[str]:
    """Say in a sentence who wins by how much, and in others what speaks against it."""
    lru, shared, resident = (measured.ratio(policy, "p99_s") for policy in ("lru", "time_shared", "resident"))
    if lru is None or shared is None or resident is None:
        return ["Nothing can be compared: fewer than two turns have answers of all policies."]
    said = [
        f"In memory for a quarter of the weights, {OWN} had a {_against(lru, 'an LRU cache of whole models')}, and a"
        f" {_against(shared, 'time sharing')}. With four times the memory, all models resident, p99 was"
        f" {1 / resident.mean:.2f} of {OWN}'s ({1 / resident.high:.2f} to {1 / resident.low:.2f})."
    ]
    used, most = float(np.mean(measured.others)), max(measured.others)
    if used > BUSY:
        said.append(
            f"Other work used {used:.0%} of the CPUs during the turns, {most:.0%} in the worst: it fell on all"
            " policies, and makes all of them slower."
        )
    reports = [report for own in measured.reports.values() for report in own]
    if late := sum(report.generator_was_late for report in reports):
        said.append(f"In {late} of {len(reports)} turns the load generator was late, which counts as latency.")
    return said


def _against(ratio: Ratio, other: str) -> str:
    if ratio.low <= 1 <= ratio.high:
        return f"p99 not to be told apart from that of {other}, {_interval(ratio)} times"
    return f"{'lower' if ratio.high < 1 else 'higher'} p99 than {other}, {_interval(ratio)} times"


def _interval(ratio: Ratio) -> str:
    return f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def draw(measured: Measured, path: Path) -> None:
    """Draw p50 and p99 of every policy: a bar each for the median, and a dot for every turn."""
    figure, panel = plt.subplots(figsize=(7, 3.2), layout="constrained")
    names = [f"{name}\n{memory} of the memory" for name, memory in POLICIES.values()]
    for offset, (key, colour) in zip((-0.2, 0.2), (("p50_s", "#9ec3dd"), ("p99_s", "#1f6f9f")), strict=True):
        for place, policy in enumerate(POLICIES):
            times_ms = measured.percentiles_s(policy, key) * 1e3
            label = key[:3] if place == 0 else None
            panel.barh(place + offset, np.nanmedian(times_ms), 0.36, color=colour, label=label)
            panel.plot(
                times_ms, np.full(len(times_ms), place + offset), ".", color="black", alpha=0.35, markersize=4
            )
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set(xlabel="latency, ms (bars: median of the turns; dots: turns)", xlim=(0, None))
    panel.set_title(f"{measured.rate_per_s:g} requests/s to sixteen models", fontsize=10, loc="left")
    panel.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _record(options: argparse.Namespace, shown: Sequence[Table | str], weight_bytes: int) -> None:
    text = io.StringIO()
    Console(file=text, width=WIDTH, highlight=False).print(*shown, sep="\n")
    about = (
        f"{options.models} models with {weight_bytes / 2**20:.1f} MiB of weights. p50 and p99, from the intended send"
        f" time, are medians of {options.turns} turns. Ratios are geometric means of the turns' ratios, with the"
        f" {LIKELY:.0%} interval of a bootstrap over turns. A turn's requests are the same for all policies. Load"
        " generator and servers share the CPUs.\n"
    )
    sections = [about, f"```\n{text.getvalue()}```\n", "![p50 and p99 by policy](demo.png)"]
    record("demo", "Sixteen models in a quarter of their memory", "benchmarks.demo", sections)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.demo", __doc__)
    parser.add_argument("--models", type=int, default=16, help="how many models (default: %(default)s)")
    parser.add_argument(
        "--rate", type=float, help="requests per second (default: what this machine can do, at most 300)"
    )
    parser.add_argument("--turns", type=int, default=16, help="turns of each policy (default: %(default)s)")
    parser.add_argument(
        "--duration", type=float, default=20.0, help="seconds of load, each policy (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
