"""Streaming parameters against having them: predicted and measured time, overlap, and the copy lane's bandwidth.

Three models at 25 % and 50 % of their weights, from both stores, each beside its own resident run and the bound.
All shares of a model run in turn in one process, so that ratios hold on a machine whose speed drifts.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks.programs import LoadedProgram, loaded
from benchmarks.record import parser_of, publish, table_of
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.runtime.cpu.backend import CpuBackend
from cohabit.runtime.lowering import packing
from cohabit.runtime.lowering.lower import Lowered, lower
from cohabit.runtime.measure.profile import resident_plan
from cohabit.runtime.memory import StoreKind
from cohabit.runtime.options import Options
from cohabit.runtime.stores.host import Store, open_store

MODELS = ("resnet152", "bert_base", "minilm")
SHARES = (0.25, 0.5)
SHOWN = (
    "model, store, share of weights",
    "resident ms",
    "streamed ms",
    "predicted / streamed",
    "streamed / resident",
    "MiB copied",
)
"""Columns of the page; the others are in the data alone."""
STORES: tuple[StoreKind, ...] = ("ram", "file")


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds; medians over the rounds, with the fastest and slowest of the streamed run."""

    model: str
    store: str
    share: float
    resident_s: float
    profiled_s: float
    """The resident run's time by the profile, whose ratio with the predicted one no drift of the machine changes."""
    bound_s: float
    predicted_s: float
    streamed_s: float
    fastest_s: float
    slowest_s: float
    over_resident: float
    """The median of the rounds' ratios."""
    link_bytes: int
    copy_bytes_per_s: float


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    console = Console(highlight=False)
    torch.set_num_threads(options.threads)
    chosen = recipes(len(options.models), options.models)
    prepare_visibly(options.folder / "zoo", chosen, force=False, console=console)
    rows: list[Row] = []
    for recipe in chosen:
        console.print(f"{recipe.name}: lowering")
        archive = options.folder / "zoo" / recipe.name / "1" / "model.pt2"
        kernels = Options(packed=packing.unavailable() is None)  # as served
        lowered = lower(archive, recipe.name, [1], options.folder / "lowered", options=kernels)
        for kind in options.stores:
            store = open_store(kind, lowered.weights_path, lowered.manifest, verify_reads=options.verify_reads)
            rows += _measure(lowered, store, options, console.print)
            store.close()
    publish(options, "Streamed against resident, predicted against measured", _sections(rows, options))
    return 0


def _measure(lowered: Lowered, store: Store, options: argparse.Namespace, say: Callable[[str], None]) -> list[Row]:
    """Profile once, plan every share, and run in turns: resident, and each share streamed and serial."""
    graph, resident = lowered.graphs[Bucket(1)], resident_plan(lowered.graphs[Bucket(1)])
    weights = lowered.manifest.segment_bytes + lowered.manifest.table_bytes
    say(f"{lowered.name}: {store.kind} store: profiling")
    profile = CpuBackend().measure(lowered, store, None, lambda text: None)[1][Bucket(1)]
    plans = []
    for share in options.shares:
        budget = int(weights * share) // 4096 * 4096
        memory = split_budget({Bucket(1): graph}, {Bucket(1): profile}, budget)
        plans.append(search(Problem(graph, profile, memory)))
    with ExitStack() as stack:
        whole = _Runs(resident, stack.enter_context(loaded(lowered, Bucket(1), resident, None, store)))
        runs = [_Runs(p, stack.enter_context(loaded(lowered, Bucket(1), p, profile, store))) for p in plans]
        for _ in range(options.rounds):
            for run in (whole, *runs):
                run.once()
    rows = [r.row(store.kind, s, profile, whole) for s, r in zip(options.shares, runs, strict=True)]
    for row in rows:
        shown = ((row.streamed_s, "streamed"), (row.predicted_s, "predicted"), (row.resident_s, "resident"))
        say(f"  {row.share:.0%}: " + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for seconds, name in shown))
    return rows


class _Runs:
    """A program, and the seconds that its runs took, after a first one."""

    def __init__(self, plan: Plan, program: LoadedProgram) -> None:
        self.plan, self.program = plan, program
        self.seconds: list[float] = []
        self._copying: list[float] = []
        program.settled_run_s()

    def once(self) -> None:
        """Run twice, the second run counts: the first fills the caches."""
        program, executor = self.program, self.program.executor
        program.settled_run_s()
        before = executor.swap_busy_s
        self.seconds.append(program.settled_run_s())
        self._copying.append(executor.swap_busy_s - before)

    def row(self, kind: StoreKind, share: float, profile: Profile, resident: "_Runs") -> Row:
        found, link_bytes = self.plan.provenance, self.program.program.link_bytes
        assert found is not None
        return Row(
            model=self.program.lowered.name,
            store=kind,
            share=share,
            resident_s=statistics.median(resident.seconds),
            profiled_s=profile.compute_s,
            bound_s=found.bound_s,
            predicted_s=found.latency_s,
            streamed_s=statistics.median(self.seconds),
            fastest_s=min(self.seconds),
            slowest_s=max(self.seconds),
            over_resident=statistics.median(a / b for a, b in zip(self.seconds, resident.seconds, strict=True)),
            link_bytes=link_bytes,
            copy_bytes_per_s=link_bytes / statistics.median(self._copying) if link_bytes else 0.0,
        )


def _sections(rows: Sequence[Row], options: argparse.Namespace) -> list[str]:
    cells = [
        {
            "model, store, share of weights": f"{r.model}, {r.store}, {r.share:.0%}",
            "resident ms": f"{r.resident_s * 1e3:.1f}",
            "bound ms": f"{r.bound_s * 1e3:.1f}",
            "predicted ms": f"{r.predicted_s * 1e3:.1f}",
            "streamed ms": f"{r.streamed_s * 1e3:.1f}",
            "fastest ms": f"{r.fastest_s * 1e3:.1f}",
            "slowest ms": f"{r.slowest_s * 1e3:.1f}",
            "predicted / streamed": f"{r.predicted_s / r.streamed_s:.3f}",
            "streamed / resident": f"{r.over_resident:.3f}",
            "as predicted": f"{r.predicted_s / r.profiled_s:.3f}",
            "MiB copied": f"{r.link_bytes / 2**20:.0f}",
            "copy GB/s": f"{r.copy_bytes_per_s / 1e9:.2f}",
        }
        for r in rows
    ]
    return [
        f"Batch 1, {options.threads} compute thread(s), weights packed as they are served, medians of {options.rounds}"
        " rounds; a round runs a model resident and in all its shares, each twice, and counts the second run. *Bound*"
        " and *predicted* come from a profile taken just before. The share is of all weights, embedding tables"
        " included; these stay in the host store at every budget. Partition and workspace together are the share.\n",
        table_of([{heading: row[heading] for heading in SHOWN} for row in cells]),
        table_of(cells, shown=False),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("benchmarks.streaming", __doc__)
    parser.add_argument("--record-as", metavar="NAME", help="name of the result file (default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="zoo models (default: %(default)s)")
    parser.add_argument(
        "--shares", nargs="+", type=float, default=list(SHARES), help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--stores", nargs="+", choices=STORES, default=list(STORES), help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads (default: %(default)s)")
    parser.add_argument("--verify-reads", action="store_true", help="compare all reads with checksums")
    return parser


if __name__ == "__main__":
    sys.exit(main())
