"""Streaming parameters against having them: predicted and measured time, overlap, and the copy lane's bandwidth.

Three models at 25 % and 50 % of their weights, from both stores, each next to its own resident run, to the same plan
with every copy waited for, and to the bound. Everything of a row runs in turn in one process, so that its ratios hold
on a machine whose speed drifts.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.record import markdown_table, record
from loadgen.preparation import prepare_visibly
from loadgen.prepare import recipes
from planner.fitting import split_budget
from planner.plan import Plan
from planner.problem import Problem
from planner.profile import Profile
from planner.search import search
from planner.simulate import simulate
from runtime.arena import Arena
from runtime.executor import Executor
from runtime.lower import Lowered, lower
from runtime.profile import device_name, measure, resident_plan
from runtime.program import Bases, Program, build
from runtime.store import Store, StoreKind, open_store
from runtime.trace import chrome_trace

MODELS = ("resnet152", "bert_base", "minilm")
SHARES = (0.25, 0.5)
STORES: tuple[StoreKind, ...] = ("ram", "file")


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds; medians over the rounds, with the fastest and slowest of the streamed run."""

    model: str
    store: str
    share: float
    resident_s: float
    bound_s: float
    predicted_s: float
    streamed_s: float
    fastest_s: float
    slowest_s: float
    serial_s: float
    link_bytes: int
    copy_bytes_per_s: float
    gap: float


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    torch.set_num_threads(options.threads)
    chosen = recipes(len(options.models), options.models)
    prepare_visibly(options.folder / "zoo", chosen, force=False, console=console)
    rows: list[Row] = []
    for recipe in chosen:
        console.print(f"{recipe.name}: lowering")
        lowered = lower(
            options.folder / "zoo" / recipe.name / "1" / "model.pt2", recipe.name, [1], options.folder / "lowered"
        )
        for kind in STORES:
            store = open_store(kind, lowered.weights_path, lowered.manifest)
            rows += [_measure(lowered, store, share, options, console.print) for share in SHARES]
            store.close()
    path = record(
        "streaming",
        "Streamed against resident, predicted against measured",
        "benchmarks.streaming",
        _sections(rows, options),
    )
    print(path.read_text())
    return 0


def _measure(
    lowered: Lowered, store: Store, share: float, options: argparse.Namespace, say: Callable[[str], None]
) -> Row:
    """Profile, plan, and run in turns: resident, streamed, serial."""
    graph = lowered.graphs[1]
    say(f"{lowered.name}: {store.kind} store, {share:.0%}: profiling")
    profile = measure(lowered, store, device_name(options.threads, store))[1]
    weights = lowered.manifest.segment_bytes + lowered.manifest.table_bytes
    budget = int(weights * share) // 4096 * 4096
    partition, workspace = split_budget({1: graph}, {1: profile}, budget)
    plan = search(Problem(graph, profile, partition, workspace))
    resident = resident_plan(graph)
    total = partition + workspace
    with Arena(total + resident.partition_bytes) as arena, Executor() as executor:
        streamed = build(lowered, plan, profile, arena, Bases(0, partition), store)
        whole = build(lowered, resident, None, arena, Bases(total, total), store)
        if options.traces is not None:
            executor.load(streamed)
            measured = executor.run(streamed, lowered.examples(1), traced=True).timeline
            assert measured is not None
            timelines = {"predicted": simulate(graph, plan, profile), "measured": measured}
            options.traces.mkdir(parents=True, exist_ok=True)
            path = options.traces / f"{lowered.name}-{store.kind}-{share:.0%}.json"
            path.write_bytes(chrome_trace(timelines, graph, plan))
            say(f"  {path}: open it at ui.perfetto.dev or chrome://tracing")
        return _rounds(lowered, store, share, profile, plan, streamed, whole, executor, options.rounds, say)


def _rounds(
    lowered: Lowered,
    store: Store,
    share: float,
    profile: Profile,
    plan: Plan,
    streamed: Program,
    whole: Program,
    executor: Executor,
    rounds: int,
    say: Callable[[str], None],
) -> Row:
    inputs = lowered.examples(1)
    times: dict[str, list[float]] = {"resident": [], "streamed": [], "serial": []}
    copying: list[float] = []
    executor.load(whole)
    executor.run(whole, inputs)
    executor.load(streamed)
    executor.run(streamed, inputs)
    for _ in range(rounds):
        # The streamed program's partition is its own: the others leave its residents alone.
        times["resident"].append(executor.run(whole, inputs).latency_s)
        executor.settle()
        before = executor.swap_busy_s
        times["streamed"].append(executor.run(streamed, inputs).latency_s)
        executor.settle()
        copying.append(executor.swap_busy_s - before)
        times["serial"].append(executor.run(streamed, inputs, serial=True).latency_s)
        executor.settle()
    assert plan.provenance is not None
    median = {name: statistics.median(values) for name, values in times.items()}
    row = Row(
        model=lowered.name,
        store=store.kind,
        share=share,
        resident_s=median["resident"],
        bound_s=plan.provenance.bound_s,
        predicted_s=plan.provenance.latency_s,
        streamed_s=median["streamed"],
        fastest_s=min(times["streamed"]),
        slowest_s=max(times["streamed"]),
        serial_s=median["serial"],
        link_bytes=streamed.link_bytes,
        copy_bytes_per_s=streamed.link_bytes / statistics.median(copying) if streamed.link_bytes else 0.0,
        gap=plan.provenance.gap,
    )
    shown = ((row.streamed_s, "streamed"), (row.predicted_s, "predicted"), (row.resident_s, "resident"))
    say("  " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for seconds, name in shown))
    return row


def _sections(rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    header = (
        "model, store, share of weights", "resident ms", "bound ms", "predicted ms", "streamed ms (min-max)",
        "predicted / streamed", "streamed / resident", "serial ms", "serial / streamed", "MiB copied", "copy GB/s",
    )  # fmt: skip
    cells = [
        [
            f"{r.model}, {r.store}, {r.share:.0%}",
            f"{r.resident_s * 1e3:.1f}",
            f"{r.bound_s * 1e3:.1f}",
            f"{r.predicted_s * 1e3:.1f}",
            f"{r.streamed_s * 1e3:.1f} ({r.fastest_s * 1e3:.1f}-{r.slowest_s * 1e3:.1f})",
            f"{r.predicted_s / r.streamed_s:.3f}",
            f"{r.streamed_s / r.resident_s:.3f}",
            f"{r.serial_s * 1e3:.1f}",
            f"{r.serial_s / r.streamed_s:.2f}",
            f"{r.link_bytes / 2**20:.0f}",
            f"{r.copy_bytes_per_s / 1e9:.2f}",
        ]
        for r in rows
    ]
    return [
        f"Batch 1, {options.threads} compute thread(s), medians of {options.rounds} rounds; a round runs resident,"
        " streamed and serial once each. *Bound* and *predicted* come from a profile taken just before. *Serial* is"
        " the streamed plan with every copy waited for before the next step. The share is of all weights, embedding"
        " tables included; these stay in the host store at every budget. Partition and workspace together are the"
        " share.\n",
        markdown_table(header, cells),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.streaming", description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="zoo models (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: %(default)s)")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="write predicted and measured timelines there")
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="working folder (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
