"""Served plans: latency over the lower bound, by CPU time of the search.

    python -m benchmarks.planner.served --processes 1 --record

`benchmarks.planner.searchers` compares searchers in a single budget.
"""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.planner.cache import graph_parser_of, in_processes
from benchmarks.planner.models import NETWORKS, inference_graph
from benchmarks.planner.searchers import DEVICES, SHARES, Case
from benchmarks.record import markdown_table, publish
from cohabit.planner.problem import TIE
from cohabit.planner.search.registry import make

MARKS_S = (0.7, 2.0)
"""CPU time after which the best plan so far is taken, that of preparing the search included."""


def gaps_of(case: Case, seed: int, cache: Path | None) -> list[float]:
    """Search with `best`; return the gap to the bound at each of `MARKS_S`.

    A candidate that ends after a mark does not count for it.
    """
    problem = case.problem(cache)
    bound_s, least_s, gaps = problem.bound_s, math.inf, list[float]()
    started_s = time.thread_time()
    searcher = make("best", problem, seed)
    while len(gaps) < len(MARKS_S) and (candidates := searcher.ask()):
        costs = []
        for candidate in candidates:
            cost = searcher.evaluate(candidate, least_s * TIE)
            took_s = time.thread_time() - started_s
            if least_s < math.inf:
                gaps += [least_s / bound_s - 1] * (sum(mark < took_s for mark in MARKS_S) - len(gaps))
            if len(gaps) == len(MARKS_S):
                break
            costs.append(cost)
            least_s = min(least_s, cost.latency_s)
        searcher.tell(candidates[: len(costs)], costs)
    return gaps + [least_s / bound_s - 1] * (len(MARKS_S) - len(gaps))


def summary(found: Mapping[tuple[Case, int], Sequence[float]]) -> str:
    rows = []
    for column, mark in enumerate(MARKS_S):
        for device in (*DEVICES, "all"):
            for least in (0.0, 0.25):
                gaps = [
                    each[column]
                    for (case, _), each in found.items()
                    if device in ("all", case.device) and case.share >= least
                ]
                place = f"{device}, {mark:g} CPU s" + (f", {least:.0%} and more" if least else "")
                rows.append([place, str(len(gaps)), f"{mean(gaps):.2%}", f"{max(gaps):.2%}"])
    return markdown_table(["device, time, share of the weights", "searches", "mean gap", "worst gap"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.served", __doc__)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the searches (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    for network in options.networks:
        inference_graph(network, 1, options.cache)
    cases = [Case(n, d, s, served=True) for n in options.networks for d in DEVICES for s in SHARES]
    searches = [(case, seed) for case in cases for seed in options.seeds]
    jobs = [(*each, options.cache) for each in searches]
    found = dict(zip(searches, in_processes(gaps_of, jobs, options.processes), strict=True))
    rows = [
        [f"{c.network}, {c.device}, {c.share:.1%}, {seed}", *(f"{gap:.2%}" for gap in gaps)]
        for (c, seed), gaps in found.items()
    ]
    header = ["network, device, share, seed", *(f"{mark:g} CPU s" for mark in MARKS_S)]
    sections = [ABOUT, summary(found), "## Every cell\n", markdown_table(header, rows, shown=False)]
    publish(options, "Served plans", sections)
    return 0


ABOUT = """Inference at batch 1 in a partition and a workspace, together a share of the weights; **simulated**. Op times
are rooflines (`benchmarks/planner/profiles.py`), scratch counts as none. Plans are of `best`, gaps over the lower
bound. Each search has its own CPU time on one core.
"""


if __name__ == "__main__":
    sys.exit(main())
