"""Partitions that follow request rates, where the models' popularity turns over every minute.

Requests arrive at random (open loop, over HTTP) for models whose popularity is Zipf's; every minute the models of the
most popular half change places with the others. `partitioned` divides memory for equal rates, and keeps it so;
`elastic` begins with the same division; `lru` keeps whole models, the most recently used. All get the same requests.
The link is as slow as flash or a narrow bus: copies in RAM are so fast that shares of memory hardly matter.
With `--simulate`, the server's scheduler and the decisions of `elastic` run with a simulated clock, in predicted times,
at several rates and links; moves take no time then, and there is no `lru`. Models and caches are those of `make demo`.
"""

import argparse
import asyncio
import csv
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from benchmarks.planner.shares import with_link
from benchmarks.record import markdown_table, parser_of, record
from benchmarks.scrape import serving
from cohabit.loadgen.arrivals import draw_arrivals, zipf_weights
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.repository import prepare_visibly, recipes
from cohabit.loadgen.run import run_load
from cohabit.loadgen.server_process import server_command
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.deployment import ModelDemand
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import plan_model, plans_by_size
from cohabit.server.capacity.simulation import Overheads, SimulatedModel, simulate
from cohabit.server.commands.fit import _candidates
from cohabit.server.config.sources import config_of
from cohabit.server.deploy.elastic import Elastic

LAYOUTS = ("partitioned", "elastic", "lru")
MEMORY = "25%"
TURN_S = 60.0
ZIPF = 1.2
SIMULATED_LINKS = {"as measured": None, "2 GB/s": 2e9, "1 GB/s": 1e9}
SIMULATED_RATES = (50.0, 100.0, 150.0)
OVERHEADS = Overheads(request_s=0.0007, execution_s=0.00015)
DIVISIONS = "cohabit_memory_divisions_total"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    models = [recipe.name for recipe in recipes(options.models)]
    prepare_visibly(options.folder / "repository", recipes(options.models), force=False, console=console)
    if options.simulate:
        return _simulate(options, console)
    trace = options.folder / "elastic.csv"
    _write_trace(trace, models, options.rate, options.turns)
    rows, p99_s = [], {}
    for layout in LAYOUTS:
        report, divisions = asyncio.run(_measure(options, layout, trace))
        latency = report.latency
        assert latency is not None
        p99_s[layout] = latency.p99_s
        cells = [latency.mean_s, latency.p50_s, latency.p99_s]
        row = [f"{seconds * 1e3:.2f}" for seconds in cells]
        rows.append([f"`{layout}`", *row, f"{latency.p99_s / p99_s['partitioned']:.2f}", f"{divisions:.0f}"])
        console.print(*rows[-1])
    about = (
        f"{len(models)} models in {MEMORY} of their weights, {options.rate:g} requests/s, Zipf {ZIPF:g},"
        f" {options.turns} minutes, a link of {options.link}. Every layout got the same requests.\n"
    )
    header = ["layout", "mean ms", "p50 ms", "p99 ms", "p99 over fixed shares", "divisions"]
    table = markdown_table(header, rows)
    console.print(about, table, soft_wrap=True)
    if options.record:
        record("elastic", "Partitions that follow request rates", "benchmarks.elastic", [about, table])
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
    """Serve a layout, and return what its clients saw, and how often memory was divided anew."""
    command = server_command("cohabit", options.folder / "repository", MEMORY, layout)
    command = [*command, "--cache", str(options.folder / "cache"), "--link-bandwidth", options.link]
    async with serving(command) as server:
        # Plans for other sizes are made before the first minute, as they would be in a server that runs for long.
        await run_load(server.url, Load(rate_per_s=options.rate, duration_s=options.settle, warmup_s=0.0))
        before = server.total(DIVISIONS)
        report = await run_load(server.url, Load(trace=str(trace), warmup_s=0.0))
        return report, server.total(DIVISIONS) - before


def _simulate(options: argparse.Namespace, console: Console) -> int:
    folders = {"repository": str(options.folder / "repository"), "cache": str(options.folder / "cache")}
    found, _ = _candidates(config_of({**folders, "memory": "1B"}), None, lambda text: None)
    memory_bytes = int(sum(candidate.weight_bytes for candidate in found) * float(MEMORY.rstrip("%")) / 100)
    rows = []
    for link, bandwidth in SIMULATED_LINKS.items():
        demands = [with_link(candidate.demand, bandwidth) for candidate in found]
        known: dict[str, Any] = {}
        for rate in SIMULATED_RATES:
            simulated = _TurningLoad(demands, memory_bytes, rate, options.turns, known)
            fixed, elastic = simulated.fixed(), simulated.elastic()
            cells = [np.mean(fixed), np.mean(elastic), np.percentile(fixed, 99), np.percentile(elastic, 99)]
            ratios = [cells[1] / cells[0], cells[3] / cells[2]]
            rows.append(
                [
                    f"{link}, {rate:g}/s",
                    *(f"{seconds * 1e3:.2f}" for seconds in cells),
                    *(f"{ratio:.2f}" for ratio in ratios),
                    str(simulated.control.divisions),
                ]
            )
    columns = ["mean ms, fixed", "elastic", "p99 ms, fixed", "elastic", "mean ratio", "p99 ratio", "divisions"]
    table = markdown_table(["link, rate", *columns], rows)
    about = (
        f"**Simulated, not measured:** {len(found)} models in {MEMORY} of their weights, Zipf {ZIPF:g}, {options.turns}"
        " minutes. Moves take no time.\n"
    )
    console.print(about, table, soft_wrap=True)
    if options.record:
        record("elastic", "Partitions that follow request rates, simulated", "benchmarks.elastic", [about, table])
    return 0


class _TurningLoad:
    """Models in memory that is divided for equal rates, and requests whose popular models turn over."""

    def __init__(
        self,
        demands: Sequence[ModelDemand],
        memory_bytes: int,
        rate_per_s: float,
        turns: int,
        known: dict[str, Any],
    ) -> None:
        """`known` is what was planned for several sizes, by profile: models and rates share it."""
        division = divide(demands, memory_bytes)
        self.names = [demand.name for demand in demands]
        arrivals = list(_arrivals(self.names, rate_per_s, turns))
        self.times_s = np.array([at_s for at_s, _ in arrivals])
        self.wanted = np.array([self.names.index(model) for _, model in arrivals])
        self.models: dict[str, Any] = {}
        for demand, nbytes in zip(demands, division.partition_bytes, strict=True):
            plans = plan_model(demand, Memory(division.workspace_bytes, nbytes), quick=True)
            self.models[demand.name] = SimpleNamespace(
                key=demand, demand=demand, profiles=demand.profiles, plans=plans, searched=True, rate_per_s=1.0
            )
        self.partitions = SimpleNamespace(
            workspace_bytes=division.workspace_bytes,
            workspaces=SimpleNamespace(nbytes=division.workspace_bytes),
            arena_bytes=division.memory_bytes,
            held={},
        )
        self.known = known
        self.requests = dict.fromkeys(self.names, 0)
        self.now_s = 0.0
        placement: Any = SimpleNamespace(
            memory=SimpleNamespace(models=self.models, partitions=self.partitions),
            changing=asyncio.Lock(),
            improver=SimpleNamespace(is_busy=False, begin=lambda models: None),
            planner=SimpleNamespace(plans_by_size=self._plans_by_size),
            redivide=self._redivide,
        )
        self.control = Elastic(placement, lambda: self.requests, lambda: self.now_s)

    def fixed(self) -> NDArray[np.float64]:
        return simulate(self._simulated(), self.times_s, self.wanted, OVERHEADS).latencies_s

    def elastic(self) -> NDArray[np.float64]:
        """Check the rates after every second; where memory is divided anew, queues begin empty."""
        return asyncio.run(self._elastic())

    async def _elastic(self) -> NDArray[np.float64]:
        parts, begin, seen, end_s = [], 0, 0, math.ceil(self.times_s[-1])
        await self._redivide({})
        while self.now_s < end_s:
            served, divisions = self._simulated(), self.control.divisions
            self.now_s += 1.0
            end = int(np.searchsorted(self.times_s, self.now_s))
            for number in self.wanted[seen:end]:
                self.requests[self.names[number]] += 1
            seen = end
            await self.control.check()
            if self.control.divisions > divisions or self.now_s >= end_s:
                part = simulate(served, self.times_s[begin:end], self.wanted[begin:end], OVERHEADS)
                parts.append(part.latencies_s)
                begin = end
        return np.concatenate(parts)

    async def _redivide(self, changed: Mapping[str, Any]) -> None:
        for name, (plans, _) in changed.items():
            self.models[name].plans = plans
        sizes = {name: model.plans[min(model.plans)].memory for name, model in self.models.items()}
        self.partitions.held = {n: SimpleNamespace(nbytes=memory.partition_bytes) for n, memory in sizes.items()}

    def _plans_by_size(self, demand: ModelDemand, workspace_bytes: int) -> Any:
        profile = demand.profiles[min(demand.profiles)].fingerprint
        if profile not in self.known:
            self.known[profile] = plans_by_size(demand, workspace_bytes)
        return self.known[profile]

    def _simulated(self) -> list[SimulatedModel]:
        models = []
        for name, model in self.models.items():
            first = model.plans[min(model.plans)].provenance
            predicted_s = {bucket: plan.provenance.latency_s for bucket, plan in model.plans.items()}
            models.append(SimulatedModel(name, predicted_s, max(first.period_s - first.latency_s, 0.0)))
        return models


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.elastic", __doc__)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--rate", type=float, default=60.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="minutes (default: %(default)s)")
    parser.add_argument(
        "--settle", type=float, default=20.0, help="seconds of equal rates before (default: %(default)s)"
    )
    parser.add_argument("--simulate", action="store_true", help="simulate, instead of serving")
    parser.add_argument("--link", default="1GB/s", help="bandwidth of the link (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
