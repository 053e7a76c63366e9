"""HOME's Figure 7, Table 2 and Figure 8, in kind: a step's time by its parts, the largest batch, and how the swarm
converges.

    python -m benchmarks.planner.home --record

Simulated: op times are predicted by `planner.papers.tensile.latency` from profiles that `benchmarks.predicted` keeps.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from rich.console import Console

from benchmarks.bisection import largest
from benchmarks.captured.capture import BUCKET, StepOptions, capture
from benchmarks.captured.state import TrainingState
from benchmarks.planner.time_parts import TimeParts
from benchmarks.predicted import measured_profile
from benchmarks.record import markdown_table, parser_of, record, results_folder
from benchmarks.training_nets import NETS, loss
from cohabit.planner.graph import Graph
from cohabit.planner.lifetimes import resident_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.papers.home.particle_swarm import PARTICLES
from cohabit.planner.papers.tensile.latency import predicted
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.serial import least_bytes
from cohabit.planner.search.driver import search
from cohabit.planner.search.registry import make

IMAGES = ("wide_resnet", "inception", "unet")
"""Nets for the bisection: those whose samples are images."""
WAYS = ("capuchin", "particle_swarm", "best")
FRAMEWORKS = ("vdnn_all", "superneurons", "capuchin", "particle_swarm", "best")
"""Whose steps are taken apart; the paper has the first four."""
SHARE = 0.6
"""Of the memory that a step needs if nothing leaves it."""
NEAR = (0.1, 0.01)
"""How close to its end the search is, relatively."""


@cache
def step_of(net: str, batch: int) -> Graph:
    """A training step for so many samples."""
    torch.manual_seed(0)
    model, inputs = NETS[net].model(), NETS[net].batch(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state = TrainingState(model, optimizer)
    lowered, _ = capture(model, optimizer, loss, inputs, state, StepOptions(), torch.device("cpu"))
    return lowered.graphs[BUCKET]


def by_rule(graph: Graph, profile: Profile, way: str, memory_bytes: int, seconds: float) -> Plan | None:
    """A plan that keeps weights in memory, as the papers' rules do; None if only the serial schedule is left."""
    if least_bytes(graph) > memory_bytes:
        return None
    problem = Problem(graph, profile, Memory(memory_bytes, counted=True), objective="period")
    plan = search(problem, way, limit=Limit(seconds=seconds))
    return plan if plan.residents else None


def batches(nets: Sequence[str], folder: Path, seconds: float) -> Iterator[Sequence[str]]:
    """Table 2: per net, the largest batch of each way in what eager needs for its batch, and its samples per second."""
    for net in nets:
        known = [measured_profile(net, folder)]
        first = NETS[net].samples
        step = max(1, first // 16)
        memory_bytes = resident_bytes(step_of(net, first))
        eager = largest(lambda b: resident_bytes(step_of(net, b)) <= memory_bytes, first, step)  # noqa: B023
        profile = predicted(step_of(net, eager), known)
        rate = eager / profile.compute_s
        row = [net, f"{memory_bytes / 2**20:.0f}", f"{eager}, {rate:.1f}"]
        for way in WAYS:

            def planned(batch: int) -> Plan | None:
                graph = step_of(net, batch)  # noqa: B023
                return by_rule(graph, predicted(graph, known), way, memory_bytes, seconds)  # noqa: B023

            most = largest(lambda b: planned(b) is not None, eager, step)
            plan = planned(most)
            assert plan is not None
            assert plan.provenance is not None
            row.append(f"{most} ({most / eager:.2f}), {most / plan.provenance.period_s:.1f}")
        yield row


Breakdown = Mapping[str, Mapping[str, TimeParts | None]]
"""By net and searcher; None where its rule does not fit, and there is only the serial schedule."""


def breakdown(nets: Sequence[str], folder: Path, seconds: float) -> Breakdown:
    """Figure 7: where the time of a step goes, per net and searcher."""
    found: dict[str, dict[str, TimeParts | None]] = {}
    for net in nets:
        graph, profile = measured_profile(net, folder)
        memory_bytes, found[net] = int(SHARE * resident_bytes(graph)), {}
        for name in FRAMEWORKS:
            plan = by_rule(graph, profile, name, memory_bytes, seconds)
            found[net][name] = None if plan is None else TimeParts.of(graph, plan, profile)
    return found


def breakdown_table(found: Breakdown) -> str:
    rows = []
    for net, by_name in found.items():
        for name, parts in by_name.items():
            cells = ["does not fit", *"----"] if parts is None else [f"{parts.period_s:.3f}"]
            cells += [] if parts is None else [f"{share:.1%}" for share in parts.shares]
            rows.append([f"{net}, {name}", *cells])
    header = ["net at 60 %, searcher", "step, s", "computation", "overlap", "recomputation", "swapping"]
    return markdown_table(header, rows)


def draw_breakdown(found: Breakdown, path: Path) -> None:
    """A panel per net, and in it a bar per searcher, of the four parts."""
    figure, panels = plt.subplots(
        1, len(found), figsize=(2.6 * len(found) + 3, 3.8), layout="constrained", squeeze=False
    )
    for (net, by_name), panel in zip(found.items(), panels[0], strict=True):
        shown = [(name, parts) for name, parts in by_name.items() if parts is not None]
        bottom = np.zeros(len(shown))
        for label in ("computation", "overlap", "recomputation", "swapping"):
            heights = np.array([getattr(parts, f"{label}_s") for _, parts in shown])
            panel.bar(range(len(shown)), heights, bottom=bottom, label=label)
            bottom += heights
        panel.set_xticks(range(len(shown)), [name for name, _ in shown], rotation=30, ha="right", fontsize=8)
        panel.set_title(net, fontsize=10)
    panels[0, 0].set_ylabel("simulated time of a step, s")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), fontsize=8, loc="outside upper center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def convergence(nets: Sequence[str], folder: Path, iterations: int) -> Iterator[Sequence[str]]:
    """Figure 8: after how many iterations the best step so far is within a share of the last one."""
    for net in nets:
        graph, profile = measured_profile(net, folder)
        memory = Memory(int(SHARE * resident_bytes(graph)), counted=True)
        problem = Problem(graph, profile, memory, objective="period")
        swarm, best_s = make("particle_swarm", problem, 0), list[float]()
        while len(best_s) < iterations * PARTICLES and (candidates := swarm.ask()):
            costs = [swarm.evaluate(c, math.inf) for c in candidates]
            swarm.tell(candidates, costs)
            for cost in costs:
                best_s.append(min(problem.seconds(cost), best_s[-1] if best_s else math.inf))
        last_s = best_s[-1]
        after = [next(n for n, s in enumerate(best_s, 1) if s <= last_s * (1 + near)) / PARTICLES for near in NEAR]
        row = [net, f"{best_s[0] / problem.bound_s:.3f}", f"{last_s / problem.bound_s:.3f}"]
        yield [*row, *(f"{n:.1f}" for n in after), f"{len(best_s) / PARTICLES:.0f}"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.planner.home", __doc__)
    parser.add_argument("--batches-of", nargs="*", default=IMAGES, choices=IMAGES, help="nets for the bisection")
    parser.add_argument(
        "--nets", nargs="+", default=list(NETS), choices=list(NETS), help="nets for parts and swarm"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="of each search (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=40, help="of the swarm (default: %(default)s)")
    arguments = parser.parse_args(argv)
    parts = breakdown(arguments.nets, arguments.folder, arguments.seconds)
    sections = ["## A step's time by its parts (Figure 7)\n", PARTS, breakdown_table(parts)]
    sections.append("![time of a step by its parts](planner-home.png)\n")
    draw_breakdown(parts, (results_folder() if arguments.record else arguments.folder) / "planner-home.png")
    header = ["net", "memory, MiB", "all in memory", *WAYS]
    sections += ["## The largest batch (Table 2)\n", BATCH]
    sections.append(
        markdown_table(header, list(batches(arguments.batches_of, arguments.folder, arguments.seconds)))
    )
    sections += ["## Convergence (Figure 8)\n", SWARM]
    header = ["net at 60 %", "first over bound", "last over bound", "within 10 %", "within 1 %", "iterations"]
    sections.append(
        markdown_table(header, list(convergence(arguments.nets, arguments.folder, arguments.iterations)))
    )
    Console().print("\n".join(sections), markup=False)
    if arguments.record:
        title = "A step's parts, the largest batch, and the swarm's convergence: HOME, Figure 7, Table 2, Figure 8"
        record("planner-home", title, "benchmarks.planner.home", sections)
    return 0


PARTS = """**Simulated**, by op times that were measured on this machine, copies to and from its file. In the paper's
terms: *computation* is ops for the first time while nothing is copied, *overlap* the same while something is copied,
*recomputation* is ops again, *swapping* is the rest of the time between two steps, when an op waits for a copy. Theirs,
measured on an RTX 2080Ti, for VGG16: HOME has 57 % overlap and nearly no swapping, Capuchin about the same,
SuperNeurons 20.5 % recomputation and 9 % swapping, vDNN 75 % swapping.
"""
BATCH = """**Simulated.** In the memory that the net's step needs for its own batch when nothing leaves memory: the
largest batch, in brackets over that of the first column, and samples per second. Op times are predicted from the
measured profile of the same net at its own batch. A way fits if its plan keeps weights in memory: below that
there is only the serial schedule, which moves everything over every gap. Theirs, measured on an RTX 2080Ti: HOME
2.2 times PyTorch's batch on average, Capuchin 1.97 times.
"""
SWARM = f"""**Simulated**, by op times that were measured on this machine. An iteration is {PARTICLES} evaluations: the
swarm is as large. *First* is the first particle, with which everything leaves. Theirs: 500 particles, 16 to 89
iterations.
"""


if __name__ == "__main__":
    sys.exit(main())
