"""How fast the planner is, and how good: ResNet-152 at batch 1, as lowered, with a link like a V100's.

Also HOME's Table 3: the time of the particle swarm's search and of its cost model, Algorithm 2.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.planner.cache import DEFAULT_CACHE
from benchmarks.planner.mixing import problem_of, step_of
from benchmarks.planner.models import NETWORKS
from benchmarks.planner.searchers import DEVICES, Case
from benchmarks.record import markdown_table, parser_of, publish
from cohabit.loadgen.zoo.repository import prepare_visibly, recipes
from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import Graph
from cohabit.planner.layout.feasible import page_aligned
from cohabit.planner.papers.home.cost import TOO_MUCH_S, evaluate
from cohabit.planner.papers.home.cost import seconds as action_seconds
from cohabit.planner.papers.home.particle_swarm import InitialParticles, ParticleSwarm
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.alap import Codes, tables
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.simulate import lanes_of, run, schedule_of, simulate
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.planner.warm import warm_up
from cohabit.runtime.lowering.lower import lower

SHARES = (0.125, 0.25, 0.5, 0.75)
TRAINING_STEPS = ("resnet18", "resnet50", "inception_v4")
"""Timed for HOME's Table 3, as are the networks for inference. The paper has a ResNet and Inception-v3."""


def seconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and worst time of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times), max(times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("benchmarks.planner.speed", __doc__)
    parser.add_argument("--repeats", type=int, default=200, help="simulations to time (default: %(default)s)")
    options = parser.parse_args(argv)
    console = Console(highlight=False)
    graph = _lowered_graph(options.folder, console)
    lowered = [_row(graph, _flat(graph), share, options.repeats) for share in SHARES]
    first = [_first_plans(network) for network in NETWORKS]
    warm_up("particle_swarm", single=True)
    swarms = [swarm_row(name, problem, options.repeats) for name, problem in home_problems().items()]
    header = ["share of the weights", "partition + workspace MiB", "latency ms", "bound ms", "gap", "period ms"]
    header += ["MiB copied", "plan s", "simulate ms", "prepared us"]
    sections = [
        "*Simulate* takes a plan and returns a timeline with every span; *prepared* is the same evaluation inside a"
        " search, on arrays. *Plan* is one search. Memory is partition plus workspace.\n",
        "## ResNet-152 as lowered from its export\n",
        f"{len(graph.ops)} ops, {format_bytes(graph.parameter_bytes)}; 17 ms in equal parts, 12 GB/s, 10 us per"
        " transfer.\n",
        markdown_table(header, lowered, shown=False),
        "## The first plan\n",
        "Seconds until `best` has a plan, over the memory and devices of `planner-searchers.md`, as served. The"
        " first of a kind also loads compiled loops.\n",
        markdown_table(["network", "ops", "median s", "slowest s"], first),
        "## HOME's swarm and cost model (Table 3)\n",
        HOME,
        markdown_table(SWARM_HEADER, swarms),
    ]
    publish(options, "The planner: quality, and how long it takes", sections)
    return 0


def _row(graph: Graph, profile: Profile, share: float, repeats: int) -> list[str]:
    budget = page_aligned(int(share * graph.parameter_bytes))
    memory = split_budget({Bucket(1): graph}, {Bucket(1): profile}, budget)
    problem = Problem(graph, profile, memory)
    plan_s, _ = seconds(lambda: search(problem), 3)
    plan = search(problem)
    lanes = lanes_of(problem.arrays, schedule_of(plan))
    prepared_s, _ = seconds(lambda: run(lanes, profile.compute_slowdown, profile.swap_slowdown, 1), repeats)
    simulate_s, _ = seconds(lambda: simulate(graph, plan, profile), repeats)
    quality = plan.provenance
    assert quality is not None
    return [
        f"{share:.1%}",
        f"{memory.partition_bytes / 2**20:.1f} + {memory.workspace_bytes / 2**20:.1f}",
        f"{quality.latency_s * 1e3:.2f}",
        f"{quality.bound_s * 1e3:.2f}",
        f"{quality.gap:.2%}",
        f"{quality.period_s * 1e3:.2f}",
        f"{simulate(graph, plan, profile).link_bytes / 2**20:.0f}",
        f"{plan_s:.2f}",
        f"{simulate_s * 1e3:.2f}",
        f"{prepared_s * 1e6:.0f}",
    ]


def _first_plans(network: str) -> list[str]:
    times_s: list[float] = []
    for device in DEVICES:
        for share in SHARES:
            problem = Case(network, device, share, served=True).problem(DEFAULT_CACHE)
            times_s.append(_first_plan_s(problem))
    return [network, f"{len(problem.graph.ops)}", f"{statistics.median(times_s):.2f}", f"{max(times_s):.2f}"]


def _first_plan_s(problem: Problem) -> float:
    started_s = time.perf_counter()
    told_s: list[float] = []
    search(problem, limit=Limit(evaluations=1), on_progress=lambda *_: told_s.append(time.perf_counter()))
    return told_s[0] - started_s


class CountedSwarm(ParticleSwarm):
    """The particle swarm, with the number of runs of Algorithm 2."""

    modelled = 0

    def _cost(self, particle: Codes) -> float:
        self.modelled += 1
        return super()._cost(particle)


def home_problems() -> Mapping[str, Problem]:
    """Return inference in 25 % of the weights and training in 60 % of a step's memory, in the order of their ops."""
    found = {n: Case(n, "V100, PCIe 3", 0.25).problem(DEFAULT_CACHE) for n in NETWORKS}
    for net in TRAINING_STEPS:
        graph, profile = step_of(net, 12e9, DEFAULT_CACHE)
        found[f"{net}, training step"] = problem_of(graph, profile, 0.6)
    return dict(sorted(found.items(), key=lambda each: len(each[1].graph.ops)))


def swarm_row(name: str, problem: Problem, repeats: int) -> list[str]:
    """Time one search of the swarm, and for one particle Algorithm 2 and the simulator."""
    swarm, simulated = CountedSwarm(problem, 0), 0
    started_s = time.perf_counter()
    while candidates := swarm.ask()[: swarm.evaluations - simulated]:
        swarm.tell(candidates, [swarm.evaluate(c, math.inf) for c in candidates])
        simulated += len(candidates)
    search_s = time.perf_counter() - started_s
    # A random particle that fits in memory: one that does not is refused before Algorithm 2 goes through its stages.
    gaps = Gaps(problem.graph)
    particle = InitialParticles(problem, gaps).random(np.random.default_rng(0))
    rows, times, memory_bytes = tables(gaps), action_seconds(gaps, problem.profile), problem.memory.nbytes
    assert evaluate(rows, times, particle, memory_bytes) < TOO_MUCH_S
    model_s, _ = seconds(lambda: evaluate(rows, times, particle, memory_bytes), repeats)
    simulator_s, _ = seconds(lambda: swarm.evaluate(particle.tobytes(), math.inf), repeats)
    return [
        name,
        str(len(problem.graph.ops)),
        str(len(gaps.all)),
        f"{search_s:.1f}",
        str(simulated),
        str(swarm.modelled),
        f"{model_s * 1e3:.3f}",
        f"{simulator_s * 1e3:.1f}",
    ]


def _lowered_graph(folder: Path, console: Console) -> Graph:
    prepare_visibly(folder / "zoo", recipes(1, ["resnet152"]), force=False, console=console)
    archive = folder / "zoo" / "resnet152" / "1" / "model.pt2"
    return lower(archive, "resnet152", [1], folder / "lowered").graphs[Bucket(1)]


def _flat(graph: Graph) -> Profile:
    link = Link(10e-6, 12e9)
    return Profile(graph.fingerprint, "V100-like", (17e-3 / len(graph.ops),) * len(graph.ops), link, link)


SWARM_HEADER = ["network", "ops", "gaps", "search, s", "simulated", "modelled", "Algorithm 2, ms", "simulator, ms"]
HOME = """One search of `particle_swarm` from its start to its default end, and one evaluation of a particle, in the
median: by HOME's cost model (Algorithm 2), and by the planner's simulator, the particle's schedule included. One
thread. Inference is at batch 1 in 25 % of the weights, a training step at batch 32 in 60 % of its memory, both on
`v100_pcie3`. A *gap* is the time between two uses of a tensor, for which the swarm decides. *Simulated* and *modelled*
are the numbers of evaluations in that search: the simulator ranks particles, and Algorithm 2 moves them. Theirs:
9 to 350 s for 500 iterations of 500 particles with 16 threads, and 0.5 to 21.8 ms for an evaluation.
"""


if __name__ == "__main__":
    sys.exit(main())
