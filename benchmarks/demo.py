"""The demonstration behind `make demo`: sixteen models in a quarter of their memory, next to two other layouts.

A server per layout is started, and they get the load in turns, so that what else the machine does falls on all of them.
Everything it makes lies in `.demo`; running it again uses what is there.
"""

import argparse
import asyncio
import io
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import tritonclient.http
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.record import parser_of, record
from benchmarks.scrape import Running, by_model, get, serve_command, serving
from benchmarks.turns import Ratio, turns
from cohabit.loadgen.client import address_of
from cohabit.loadgen.inputs import random_inputs
from cohabit.loadgen.load import Load
from cohabit.loadgen.report import Report
from cohabit.loadgen.run import SentLoad, send_load
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from examples.sentences import SENTENCES, embed, table

LAYOUTS = (("resident", "100%"), ("time_shared", "25%"), ("partitioned", "25%"))
TURNS = 4
ALONE_REQUESTS = 30
BUSY, BUSY_WINDOW_S = 0.1, 2.0
"""Share of the CPUs that something else uses before anything is started, from which figures are in doubt."""


@dataclass(frozen=True, slots=True)
class Cost:
    """One model's predicted and measured seconds per inference."""

    predicted_s: float
    alone_s: float
    loaded_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    report: Report
    """Of all turns together."""
    turns: Sequence[Report]
    costs: dict[str, Cost]
    swapped_bytes: float


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    folder: Path = options.folder
    console.rule(f"preparing {options.models} models")
    prepared = prepare_visibly(folder / "repository", recipes(options.models), force=False, console=console)
    total = sum(p.weight_bytes for p in prepared)
    console.print(f"{len(prepared)} models with {total / 2**20:.1f} MiB of weights in {folder / 'repository'}")
    others = psutil.cpu_percent(BUSY_WINDOW_S) / 100
    outcomes = asyncio.run(_measure(options, console))
    console.rule("results")
    tables = (_planned_against_measured(outcomes["partitioned"]), _latencies(outcomes, options))
    said = verdict({layout: outcome.turns for layout, outcome in outcomes.items()}, others)
    console.print(*tables, *said, sep="\n")
    if options.record:
        _record(tables, said, total)
    return 0 if all(o.report.all_answered for o in outcomes.values()) else 1


@dataclass(slots=True)
class Measured:
    """A layout's server, and what was measured of it so far."""

    server: Running
    alone_s: dict[str, float]
    turns: list[SentLoad] = field(default_factory=list)


async def _measure(options: argparse.Namespace, console: Console) -> dict[str, Outcome]:
    async with AsyncExitStack() as stack:
        found: dict[str, Measured] = {}
        for layout, memory in LAYOUTS:
            console.rule(f"{layout} layout, memory {memory} of the weights")
            repository, cache = options.folder / "repository", options.folder / "cache"
            command = serve_command(repository, memory, layout, cache)
            server = await stack.enter_async_context(serving(command, show_log=True))
            console.print("each model alone, one request at a time")
            models = [r.name for r in recipes(options.models)]
            found[layout] = Measured(server, await asyncio.to_thread(_measure_alone, server.url, models))
        before = {layout: _statistics(one.server.url) for layout, one in found.items()}
        for turn, layout in turns(found, TURNS):
            console.rule(f"turn {turn + 1} of {TURNS}: {layout}")
            found[layout].turns.append(await send_load(found[layout].server.url, _load(options, turn)))
        outcomes = {layout: _outcome(one, before[layout]) for layout, one in found.items()}
        console.rule("three sentences through MiniLM")
        address = address_of(found["partitioned"].server.url)
        console.print(table(SENTENCES, await asyncio.to_thread(embed, address, SENTENCES)))
    return outcomes


def _outcome(measured: Measured, before: dict[str, tuple[int, float]]) -> Outcome:
    after = _statistics(measured.server.url)
    predicted = by_model(measured.server.metrics_url, "cohabit_predicted_seconds")
    costs = {
        m: Cost(predicted[m], alone_s, (after[m][1] - before[m][1]) / max(1, after[m][0] - before[m][0]))
        for m, alone_s in measured.alone_s.items()
    }
    turns = [turn.report for turn in measured.turns]
    return Outcome(joined(measured.turns).report, turns, costs, measured.server.sum("cohabit_swapped_bytes_total"))


def joined(turns: Sequence[SentLoad]) -> SentLoad:
    """Join several loads of one server, one after the other, without their warm-ups."""
    outcomes, at_s = [], 0.0
    for turn in turns:
        for outcome in turn.outcomes:
            if outcome.arrival.at_s >= turn.run.warmup_s:
                arrival = replace(outcome.arrival, at_s=outcome.arrival.at_s - turn.run.warmup_s + at_s)
                outcomes.append(replace(outcome, arrival=arrival))
        at_s += turn.run.duration_s
    run = msgspec.structs.replace(turns[0].run, duration_s=at_s, warmup_s=0.0)
    return SentLoad(run, outcomes, turns[0].models)


def _load(options: argparse.Namespace, turn: int) -> Load:
    return Load(
        rate_per_s=options.rate,
        duration_s=options.duration / TURNS,
        model_count=options.models,
        zipf=0.0,
        seed=turn,
        batch=1,
        slo_s=0.1,
        timeout_s=60.0,
        warmup_s=1.0,
        max_in_flight=20_000,
    )


def _measure_alone(url: str, models: Sequence[str]) -> dict[str, float]:
    """Mean seconds per inference of each model, with one request at a time and the models in turn."""
    client = tritonclient.http.InferenceServerClient(address_of(url), network_timeout=60.0)
    rng = np.random.default_rng(0)
    requests = {m: random_inputs(client.get_model_metadata(m), batch=1, rng=rng) for m in models}
    for model in models:
        client.infer(model, requests[model])
    before = _statistics(url)
    for _ in range(ALONE_REQUESTS):
        for model in models:
            client.infer(model, requests[model])
    after = _statistics(url)
    client.close()
    return {m: (after[m][1] - before[m][1]) / (after[m][0] - before[m][0]) for m in models}


def _statistics(url: str) -> dict[str, tuple[int, float]]:
    """Inferences so far and the seconds that they took, by model."""
    stats = msgspec.json.decode(get(f"{url}/v2/models/stats"))["model_stats"]
    parts = {s["name"]: s["inference_stats"] for s in stats}
    return {name: (p["success"]["count"], p["compute_infer"]["ns"] / 1e9) for name, p in parts.items()}


def _planned_against_measured(outcome: Outcome) -> Table:
    table = Table(
        title="partitioned: planned against measured, ms per inference", title_justify="left", box=SIMPLE_HEAD
    )
    for heading in ("model", "planned", "alone", "under load"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model, cost in outcome.costs.items():
        table.add_row(model, _ms(cost.predicted_s), _ms(cost.alone_s), _ms(cost.loaded_s))
    table.caption = (
        "planned: of ops and copies, timed one by one. Measured times have the work of the other servers, of the load"
        " generator and of the machine in them, and up to a few tenths of a millisecond between the ops."
    )
    table.caption_justify = "left"
    return table


def _latencies(outcomes: dict[str, Outcome], options: argparse.Namespace) -> Table:
    load = f"{options.models} models, {options.rate:g} requests/s for {options.duration:g} s"
    title = f"{load}; milliseconds from the intended send time: median of {TURNS} turns (least - most)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for heading in ("layout", "memory", "answered", "per s", "<100ms", "p50", "p90", "p99", "GiB in"):
        table.add_column(heading, justify="left" if heading in ("layout", "memory") else "right")
    memory = dict(LAYOUTS)
    for layout in reversed(outcomes):
        report, turns = outcomes[layout].report, outcomes[layout].turns
        shown = [_over_turns(_percentiles(turns, name)) for name in PERCENTILES]
        table.add_row(
            layout,
            memory[layout],
            f"{report.completed}/{report.sent}",
            f"{report.achieved_per_s:.0f}",
            f"{sum(m.within_slo for m in report.models) / max(1, report.sent):.0%}",
            *shown,
            f"{outcomes[layout].swapped_bytes / 2**30:.1f}",
        )
    return table


PERCENTILES = ("p50", "p90", "p99")


def _percentiles(turns: Sequence[Report], name: str) -> NDArray[np.float64]:
    """Return a percentile of each turn, in seconds; turns without answers have none."""
    return np.array([getattr(turn.latency, f"{name}_s") for turn in turns if turn.latency is not None])


def _over_turns(values_s: NDArray[np.float64]) -> str:
    return f"{_ms(np.median(values_s))} ({_ms(values_s.min())} - {_ms(values_s.max())})" if values_s.size else "-"


def verdict(turns: Mapping[str, Sequence[Report]], others: float) -> list[str]:
    """Say in sentences what the turns show about `partitioned`, by layout, and what speaks against it.

    `others` is the share of the CPUs that something else used before.
    """
    own = turns["partitioned"]
    said = [_compared(own, turns[layout], layout, words) for layout, words in COMPARED]
    late = sum(turn.generator_was_late for each in turns.values() for turn in each)
    if late:
        said.append(
            f"In {late} of {sum(map(len, turns.values()))} turns the load generator was late: these are in doubt."
        )
    if others > BUSY:
        said.append(
            f"Something else kept the CPUs {others:.0%} busy before anything was started: repeat this on a quiet"
            " machine before you draw conclusions."
        )
    return said


COMPARED = (
    ("time_shared", "time sharing in the same memory"),
    ("resident", "all models resident in four times the memory"),
)


def _compared(own: Sequence[Report], others: Sequence[Report], layout: str, words: str) -> str:
    """Compare percentiles with those of another layout, turn by turn."""
    parts = []
    for name in reversed(PERCENTILES):
        pairs = [(a.latency, b.latency) for a, b in zip(own, others, strict=True)]
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(known) < 2:
            return f"partitioned cannot be compared with {layout}: fewer than two turns have answers of both."
        ratio = Ratio.of(np.array([getattr(a, f"{name}_s") / getattr(b, f"{name}_s") for a, b in known]))
        kind = "lower" if ratio.high < 1 else "higher" if ratio.low > 1 else "not to be told apart"
        parts.append(f"{name} {kind}, {ratio.mean:.2f} of it ({ratio.low:.2f} - {ratio.high:.2f})")
    return f"partitioned against {words}: {'; '.join(parts)}."


def _record(tables: Sequence[Table], said: Sequence[str], weight_bytes: int) -> None:
    text = io.StringIO()
    Console(file=text, width=110, highlight=False).print(*tables, *said, sep="\n")
    about = (
        f"{weight_bytes / 2**20:.1f} MiB of weights. *Alone* is the mean of {ALONE_REQUESTS} requests, one at a time,"
        " the models in turn; *under load* the mean of the batches that they went in. Load generator and servers share"
        f" the CPUs. They got the load in {TURNS} turns, one after the other, a turn's requests the same for all.\n"
    )
    sections = [about, f"```\n{text.getvalue()}```\n"]
    record("demo", "Sixteen models in a quarter of their memory", "benchmarks.demo", sections)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.demo", __doc__)
    parser.add_argument("--models", type=int, default=16, help="how many models (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=300.0, help="requests per second (default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds of load, each (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
