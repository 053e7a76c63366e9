"""What SwapAdvisor's two searches and its restricted space are worth (its Figures 9 and 10), and how they converge.

python -m benchmarks.planner.ablation --record
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks.planner.cache import DEFAULT_CACHE
from benchmarks.planner.models import inference_graph
from benchmarks.planner.profiles import v100_pcie3
from benchmarks.planner.training import TRAININGS, training_graph
from benchmarks.record import RESULTS, markdown_table, record
from cohabit.planner.memory import Memory
from cohabit.planner.papers.swapadvisor.genetic import Genetic
from cohabit.planner.problem import Problem
from cohabit.planner.warm import warm

WAYS: Mapping[str, Mapping[str, object]] = {
    "both": {},
    "both, softmax selection": {"selection": "softmax"},
    "schedules only": {"allocations": False},
    "allocations only": {"schedules": False},
    "both, CLS unrestricted": {"restricted": False},
}


@dataclass(frozen=True)
class Course:
    """How a search went, over its generations."""

    seconds: list[float]
    best_s: list[float]
    mean_s: list[float]
    worst_s: list[float]


def problem_of(name: str, memory_bytes: int, cache: Path | None) -> Problem:
    graph, work = training_graph(name, None, cache) if name in TRAININGS else inference_graph(name, 1, cache)
    return Problem(graph, v100_pcie3(graph, work), Memory(memory_bytes, counted=True))


def evolve(problem: Problem, seconds: float, switches: Mapping[str, object], population: int) -> Course:
    search = Genetic(problem, 0, population=population, **switches)  # type: ignore[arg-type]
    course = Course([], [], [], [])
    best_s = float("inf")
    started = time.monotonic()
    while time.monotonic() - started < seconds and (candidates := search.ask()):
        costs = [search.evaluate(c, 0.0) for c in candidates]
        search.tell(candidates, costs)
        best_s = min(best_s, *(c.latency_s for c in costs))
        alive = [c.latency_s for _, c in search.living if np.isfinite(c.latency_s)]
        course.seconds.append(time.monotonic() - started)
        course.best_s.append(best_s)
        course.mean_s.append(float(np.mean(alive)) if alive else np.nan)
        course.worst_s.append(max(alive, default=np.nan))
    return course


def draw(courses: dict[tuple[str, str], Course], names: Sequence[str], path: Path) -> None:
    """One panel per network: the best so far of every way, and mean and worst of the full search's population."""
    figure, panels = plt.subplots(1, len(names), figsize=(5.2 * len(names), 4), layout="constrained", squeeze=False)
    for panel, name in zip(panels[0], names, strict=True):
        for way in WAYS:
            course = courses[name, way]
            (line,) = panel.step(course.seconds, course.best_s, where="post", label=way)
            if way == "both":
                panel.fill_between(course.seconds, course.best_s, course.mean_s, alpha=0.15, color=line.get_color(),
                                   label="both: up to the population's mean")  # fmt: skip
        panel.set(title=name, xlabel="search time, s", ylabel="simulated latency, s", xscale="log", yscale="log")
        panel.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner.ablation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="time per search (default: %(default)s)")
    parser.add_argument("--population", type=int, default=32, help="(default: %(default)s; the paper has 144)")
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="captured graphs (default: %(default)s)")
    parser.add_argument(
        "--record", action="store_true", help="write docs/results/planner-ablation.md and a picture"
    )
    options = parser.parse_args(argv)
    memories = {"lstm8": 128 << 20, "inception_v4": 64 << 20, "inception_4": 16 * 10**9}
    problems = {n: problem_of(n, m, options.cache) for n, m in memories.items()}
    jobs = [(n, w) for n in problems for w in WAYS]
    console = Console(stderr=True)
    warm()
    courses = {
        (n, w): evolve(problems[n], options.seconds, WAYS[w], options.population)
        for n, w in track(jobs, "searching", console=console)
    }
    rows = [
        [f"{n}, {w}", f"{c.best_s[-1] * 1e3:.1f}", f"{problems[n].profile.compute_s / c.best_s[-1]:.1%}",
         f"{c.mean_s[-1] * 1e3:.1f}", f"{c.worst_s[-1] * 1e3:.1f}", str(len(c.seconds))]
        for (n, w), c in courses.items()
    ]  # fmt: skip
    table = markdown_table(
        ["network, searched", "best ms", "of resident speed", "mean", "worst", "generations"], rows
    )
    print(table)
    if options.record:
        draw(courses, list(problems), RESULTS / "planner-ablation.png")
        text = ", ".join(f"{n} in {m / 2**20:.0f} MiB" for n, m in memories.items())
        record("planner-ablation", "SwapAdvisor's search, taken apart", "benchmarks.planner.ablation", [
            f"{text}, on `v100_pcie3`; population {options.population}, {options.seconds:g} s each, one process. Mean"
            " and worst are of the last living population, members that do not fit left out.\n",
            table,
            "![best so far over time](planner-ablation.png)",
        ])  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
