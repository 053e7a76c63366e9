"""Every searcher on every network, memory and device, one model in a single budget: latency over the lower bound.

Every searcher has the same time on one core.

python -m benchmarks.planner.searchers --record
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks.planner.cache import DEFAULT_CACHE
from benchmarks.planner.models import NETWORKS, inference_graph
from benchmarks.planner.profiles import cpu_file, h100_pcie5, v100_pcie3
from benchmarks.record import markdown_table, record
from planner.errors import CohabitError
from planner.layout.feasible import page_aligned
from planner.plan import SwapIn, SwapOut
from planner.problem import Limit, Problem
from planner.search.driver import search
from planner.search.registry import SEARCHERS

DEVICES = {"V100, PCIe 3": v100_pcie3, "H100, PCIe 5": h100_pcie5, "one CPU core, file": cpu_file}
SHARES = (0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Case:
    network: str
    device: str
    share: float
    """Of the weights."""

    def problem(self, cache: Path | None) -> Problem:
        graph, work = inference_graph(self.network, 1, cache)
        profile = DEVICES[self.device](graph, work)
        return Problem(graph, profile, page_aligned(int(self.share * graph.parameter_bytes)), overlay=True)


@dataclass(frozen=True)
class Found:
    """What one searcher made of a case; the refusal if it made nothing."""

    gap: float | None
    seconds: float
    first_s: float
    link_share: float
    """Bytes copied per byte of weights."""
    refusal: str = ""


def run(case: Case, searcher: str, seconds: float, cache: Path | None) -> Found:
    problem = case.problem(cache)
    first: list[float] = []
    started = time.monotonic()

    def progress(evaluations: int, best_s: float, bound_s: float) -> None:
        if not first and best_s < float("inf"):
            first.append(time.monotonic() - started)

    try:
        plan = search(problem, searcher, limit=Limit(seconds=seconds), on_progress=progress)
    except CohabitError as refusal:
        return Found(None, time.monotonic() - started, 0.0, 0.0, str(refusal))
    took = time.monotonic() - started
    assert plan.provenance is not None
    sizes = problem.graph.tensors
    copied = sum(sizes[s.tensor].nbytes for s in plan.steps if isinstance(s, SwapIn | SwapOut))
    return Found(plan.provenance.gap, took, first[0], copied / problem.graph.parameter_bytes)


def _warm(seconds: float, cache: Path | None) -> None:
    """Compile every searcher's loops, which is not what is to be timed."""
    for searcher in SEARCHERS:
        run(Case("resnet152", "V100, PCIe 3", 0.5), searcher, seconds, cache)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.searchers", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="time of each search, on one core (default: %(default)s)"
    )
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="captured graphs (default: %(default)s)")
    parser.add_argument("--record", action="store_true", help="write docs/results/planner-searchers.md")
    options = parser.parse_args(argv)
    cases = [Case(n, d, s) for n in options.networks for d in DEVICES for s in SHARES]
    searchers = [s for s in SEARCHERS if s != "streaming"]
    for network in options.networks:
        inference_graph(network, 1, options.cache)
    _warm(1.0, options.cache)
    console = Console(stderr=True)
    jobs = [(c, s, options.seconds, options.cache) for c in cases for s in searchers]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        futures = [pool.submit(run, *job) for job in jobs]
        results = [f.result() for f in track(futures, "searching", console=console)]
    found = {(job[0], job[1]): result for job, result in zip(jobs, results, strict=True)}
    sections = [_summary(cases, found), *_tables(cases, searchers, found)]
    print("\n".join(sections))
    if options.record:
        record("planner-searchers", "Every searcher on every network", "benchmarks.planner.searchers", [
            "Inference at batch 1 in a single budget of a share of the weights, parameters and activations together,"
            " simulated; op times are rooflines (`benchmarks/planner/profiles.py`), scratch is not known and counts as"
            f" none. Every searcher has the same time: {options.seconds:g} s on one core; `best` divides it among all"
            " of them. Gaps are over the lower bound; *copied* is per byte of weights."
            " An entry is `refused` where the searcher made no plan; a plan far above the rest is the serial one, which"
            " fits where nothing else does.\n",
            *sections,
        ])  # fmt: skip
    return 0


def _summary(cases: Sequence[Case], found: dict[tuple[Case, str], Found]) -> str:
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


def _tables(cases: Sequence[Case], searchers: Sequence[str], found: dict[tuple[Case, str], Found]) -> list[str]:
    header = ["network, share", *searchers, "best: copied", "best: s"]
    sections = []
    for device in DEVICES:
        rows = []
        for case in (c for c in cases if c.device == device):
            gaps = [found[case, s].gap for s in searchers]
            best = found[case, "best"]
            cells = ["refused" if gap is None else f"{gap:.2%}" for gap in gaps]
            rows.append(
                [f"{case.network}, {case.share:.1%}", *cells, f"{best.link_share:.2f}", f"{best.seconds:.1f}"]
            )
        sections += [f"## {device}\n", markdown_table(header, rows)]
    return sections


if __name__ == "__main__":
    sys.exit(main())
