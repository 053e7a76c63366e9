"""Served plans: latency over the lower bound in equal CPU time, alongside another checkout's searcher `best`.

    python -m benchmarks.planner.served --against ../annealing --record

`--against` is a checkout of another commit with a virtual environment in `.venv`; its searches run in turns with
ours.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import cohabit.planner.graph
import cohabit.planner.profile
from benchmarks.planner.cache import DEFAULT_CACHE
from benchmarks.planner.models import NETWORKS
from benchmarks.planner.searchers import DEVICES, SHARES, Case
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.planner.errors import CohabitError
from cohabit.planner.problem import Problem

MODULE = "benchmarks.planner.served"
OURS, THEIRS = "ours", "theirs"


class Process:
    """A process of a checkout that answers `benchmarks.planner.served_search`'s requests."""

    def __init__(self, checkout: Path) -> None:
        own = Path(sys.executable) if checkout.samefile(".") else checkout / ".venv" / "bin" / "python"
        command = [str(own.absolute()), "-P", str(Path(__file__).with_name("served_search.py").absolute())]
        self._process = subprocess.Popen(
            command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read() == "ready"

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._read())
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True)
class Found:
    """Gaps to our bound by CPU time, of one search; empty for a refusal."""

    gaps: Mapping[float, float]
    evaluations: int = 0


Results = dict[tuple[Case, int, str], Found]
"""By case, seed, and OURS or THEIRS."""


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def request_of(problem: Problem, folder: Path, case: Case) -> dict[str, Any]:
    stem = f"{case.network}-{list(DEVICES).index(case.device)}"
    graph, profile = folder / f"{stem}.graph.json", folder / f"{stem}.profile.json"
    if not profile.exists():
        graph.write_bytes(cohabit.planner.graph.encode(problem.graph))
        profile.write_bytes(cohabit.planner.profile.encode(problem.profile))
    memory = problem.memory
    return {
        "graph": str(graph), "profile": str(profile), "memory": [memory.workspace_bytes, memory.partition_bytes]
    }  # fmt: skip


def searched(
    cases: Sequence[Case], seeds: Sequence[int], marks: Sequence[float], checkouts: Mapping[str, Path], cache: Path
) -> Results:
    """Run every search, ours and theirs in turns. Seeds after the first search up to the first mark only."""
    results: Results = {}
    processes = {who: Process(checkout) for who, checkout in checkouts.items()}
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            try:
                problem = case.problem(cache)
            except CohabitError:  # the memory is too small for this network
                continue
            request = request_of(problem, Path(folder), case)
            for seed in seeds:
                own = list(marks) if seed == seeds[0] else list(marks)[:1]
                for who in (OURS, THEIRS) if seed % 2 == 0 else (THEIRS, OURS):
                    answer = processes[who].ask({**request, "seed": seed, "marks": own})
                    latencies_s = answer.get("latencies_s", ())
                    gaps = {m: s / problem.bound_s - 1 for m, s in zip(own, latencies_s, strict=False)}
                    results[case, seed, who] = Found(gaps, answer.get("evaluations", 0))
            print(f"{case.network}, {case.device}, {case.share:.1%}", file=sys.stderr, flush=True)
    for process in processes.values():
        process.end()
    return results


def summary(results: Results, marks: Sequence[float]) -> str:
    """Per class of device and time: the ratio of latencies, and both gaps."""
    rows = []
    for mark in marks:
        for device in (*DEVICES, "all"):
            pairs = [
                (found.gaps[mark], results[case, seed, THEIRS].gaps[mark])
                for (case, seed, who), found in results.items()
                if who == OURS and device in ("all", case.device)
                if mark in found.gaps and mark in results[case, seed, THEIRS].gaps
            ]
            if not pairs:
                continue
            ratios = [(1 + ours) / (1 + theirs) for ours, theirs in pairs]
            better, worse = sum(r < 1 - 1e-4 for r in ratios), sum(r > 1 + 1e-4 for r in ratios)
            rows.append([
                f"{device}, {mark:g} CPU s", str(len(pairs)), f"{geometric_mean(ratios):.5f}", str(better), str(worse),
                f"{max(ratios) - 1:+.2%}", f"{mean(o for o, _ in pairs):.2%}", f"{mean(t for _, t in pairs):.2%}",
                f"{max(o for o, _ in pairs):.2%}", f"{max(t for _, t in pairs):.2%}",
            ])  # fmt: skip
    header = ["device, time", "searches", "latency, ours over theirs", "better", "worse", "worst ratio",
              "mean gap", "theirs", "worst gap", "theirs"]  # fmt: skip
    return markdown_table(header, rows)


def every_case(results: Results, seeds: Sequence[int], marks: Sequence[float]) -> str:
    rows = []
    for case in dict.fromkeys(case for case, _, _ in results):
        cells = []
        for mark in marks:
            for who in (OURS, THEIRS):
                found = [results[case, seed, who] for seed in seeds]
                shown = [
                    f"{f.gaps[mark]:.2%}" if f.gaps else "refused" for f in found if mark in f.gaps or not f.gaps
                ]
                cells.append(" ".join(shown))
        rows.append([f"{case.network}, {case.device}, {case.share:.1%}", *cells])
    header = ["network, device, share", *(f"{who}, {mark:g} s" for mark in marks for who in (OURS, THEIRS))]
    return markdown_table(header, rows, shown=False)


def refusals(results: Results, who: str) -> int:
    return len({case for (case, _, by), found in results.items() if by == who and not found.gaps})


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(MODULE, __doc__, has_folder=False)
    parser.add_argument("--against", type=Path, required=True, help="a checkout of another commit")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[0.7, 2.0],
        help="CPU seconds of a search, ascending; only the first seed searches beyond the first (default: 0.7 2)",
    )  # fmt: skip
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="captured graphs (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    options = parser.parse_args(argv)
    cases = [Case(n, d, s, served=True) for n in options.networks for d in DEVICES for s in SHARES]
    checkouts = {OURS: Path.cwd(), THEIRS: options.against}
    with ThreadPoolExecutor(options.processes) as threads:
        parts = [
            threads.submit(
                searched, cases[i :: options.processes], options.seeds, options.seconds, checkouts, options.cache
            )
            for i in range(options.processes)
        ]
        found = [part.result() for part in parts]
    results = {key: part[key] for case in cases for part in found for key in part if key[0] == case}
    held = len({case for case, _, _ in results})
    publish(options, "Served plans", [
        f"Inference at batch 1 in a partition and a workspace, together a share of the weights; simulated. Op times are"
        f" rooflines (`benchmarks/planner/profiles.py`), scratch counts as none. *Ours* is `best` of this commit,"
        f" *theirs* that of {commit_of(options.against)}, in turns. Each search has its own CPU time on one core; with"
        f" seeds {', '.join(map(str, options.seeds))}, and only the first searches for longer than"
        f" {options.seconds[0]:g} s. Gaps are over our lower bound. *better* and *worse* count searches whose latencies"
        f" differ by more than 0.01 %.\n",
        f"{held} cells; refused: ours {refusals(results, OURS)}, theirs {refusals(results, THEIRS)}.\n",
        summary(results, options.seconds),
        "## Every cell: gap to the bound, by seed\n",
        every_case(results, options.seeds, options.seconds),
    ])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
