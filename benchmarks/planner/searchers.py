"""Every searcher on every network, memory and device: latency over the lower bound, in equal time on one core each.

python -m benchmarks.planner.searchers --record

All searchers plan one model in a single budget. `benchmarks.planner.served` is about those of serving.
"""

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.planner.cache import graph_parser_of, in_processes
from benchmarks.planner.models import NETWORKS, inference_graph
from benchmarks.planner.profiles import cpu_file, h100_pcie5, v100_pcie3
from benchmarks.record import markdown_table, publish
from cohabit.planner.errors import CohabitError
from cohabit.planner.layout.feasible import page_aligned
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import SwapIn, SwapOut
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.search.registry import SEARCHERS, can_plan
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget

DEVICES = {"V100, PCIe 3": v100_pcie3, "H100, PCIe 5": h100_pcie5, "one CPU core, file": cpu_file}
SHARES = (0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Case:
    network: str
    device: str
    share: float
    """Of the weights."""
    served: bool = False
    """Whether the memory is split into a partition and a workspace."""

    def problem(self, cache: Path | None) -> Problem:
        graph, work = inference_graph(self.network, 1, cache)
        profile = DEVICES[self.device](graph, work)
        memory = page_aligned(int(self.share * graph.parameter_bytes))
        if not self.served:
            return Problem(graph, profile, single_budget(memory))
        return Problem(graph, profile, split_budget({Bucket(1): graph}, {Bucket(1): profile}, memory))


@dataclass(frozen=True)
class Outcome:
    """What one searcher made of a case; the refusal if it made nothing."""

    gap: float | None
    seconds: float
    first_s: float
    link_share: float
    """Bytes copied per byte of weights."""
    winner: str = ""
    """The member of `best` that found its plan."""


def run(case: Case, searcher: str, seconds: float, cache: Path | None) -> Outcome:
    first: list[float] = []
    started = time.monotonic()

    def progress(evaluations: int, best_s: float, bound_s: float) -> None:
        if not first and best_s < float("inf"):
            first.append(time.monotonic() - started)

    try:
        problem = case.problem(cache)
        started = time.monotonic()
        limit = Limit(seconds=seconds, strict=True)
        plan = search(problem, searcher, limit=limit, on_progress=progress)
    except CohabitError:
        return Outcome(None, time.monotonic() - started, 0.0, 0.0)
    took = time.monotonic() - started
    assert plan.provenance is not None
    sizes = problem.graph.tensors
    copied = sum(sizes[s.tensor].nbytes for s in plan.steps if isinstance(s, SwapIn | SwapOut))
    winner = plan.provenance.searcher.partition(" (")[2].removesuffix(")")
    return Outcome(plan.provenance.gap, took, first[0], copied / problem.graph.parameter_bytes, winner)


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.searchers", __doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time of each search, on one core (default: %(default)s)"
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    cases = [Case(n, d, s) for n in options.networks for d in DEVICES for s in SHARES]
    searchers = [name for name in SEARCHERS if can_plan(name, cases[0].problem(options.cache))]
    for network in options.networks:
        inference_graph(network, 1, options.cache)
    jobs = [(c, s, options.seconds, options.cache) for c in cases for s in searchers]
    results = in_processes(run, jobs, options.processes)
    found = {(job[0], job[1]): result for job, result in zip(jobs, results, strict=True)}
    about = (
        "Inference at batch 1 in a single budget of a share of the weights, parameters and activations together,"
        " simulated; op times are rooflines (`benchmarks/planner/profiles.py`), scratch counts as none. Every searcher"
        f" has {options.seconds:g} s on one core; *found by* is the one whose plan `best` took."
        " Gaps are over the lower bound; *copied* is per byte of weights."
        " An entry is `refused` where the searcher made no plan; a plan far above the rest is the serial one.\n"
    )
    sections = [
        about,
        _summary(cases, found),
        *_tables(cases, searchers, found),
    ]
    publish(options, "Every searcher on every network", sections)
    return 0


def _summary(cases: Sequence[Case], found: dict[tuple[Case, str], Outcome]) -> str:
    best = {c: found[c, "best"] for c in cases}
    wide = [(b.gap, c) for c, b in best.items() if b.gap is not None and c.share >= 0.25]
    worst_gap, worst = max(wide, key=lambda w: w[0])
    mean = statistics.mean(gap for gap, _ in wide)
    first = [b.first_s for b in best.values() if b.gap is not None]
    beaten = [
        f"{c.network} on {c.device} at {c.share:.1%} by {s}"
        for (c, s), f in found.items()
        if f.gap is not None and f.gap < (best[c].gap or 0.0) - 1e-3
    ]
    return (
        f"`best` at 25 % of the weights and more ({len(wide)} cases): {mean:.2%} over the bound on average, at worst"
        f" {worst_gap:.2%} ({worst.network} on {worst.device} at {worst.share:.1%}). First plan after"
        f" {statistics.median(first):.2f} s (median), {max(first):.2f} s (slowest). Beaten by more than 0.1 % of the"
        f" bound: {'; '.join(beaten) if beaten else 'never'}.\n"
    )


def _tables(cases: Sequence[Case], searchers: Sequence[str], found: dict[tuple[Case, str], Outcome]) -> list[str]:
    header = ["network, share", *searchers, "found by", "best: copied", "best: s"]
    sections = []
    for device in DEVICES:
        rows = []
        for case in (c for c in cases if c.device == device):
            gaps = [found[case, s].gap for s in searchers]
            best = found[case, "best"]
            cells = ["refused" if gap is None else f"{gap:.2%}" for gap in gaps]
            rows.append(
                [
                    f"{case.network}, {case.share:.1%}",
                    *cells,
                    best.winner,
                    f"{best.link_share:.2f}",
                    f"{best.seconds:.1f}",
                ]
            )
        sections += [f"## {device}\n", markdown_table(header, rows, shown=False)]
    return sections


if __name__ == "__main__":
    sys.exit(main())
