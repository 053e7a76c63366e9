"""HOME's Table 3: the time of the particle swarm's search and of its cost model, Algorithm 2.

python -m benchmarks.planner.speed --record
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.planner.cache import graph_parser_of
from benchmarks.planner.mixing import problem_of, step_of
from benchmarks.planner.models import NETWORKS
from benchmarks.planner.searchers import Case
from benchmarks.record import markdown_table, publish
from cohabit.planner.papers.home.cost import TOO_MUCH_S, evaluate
from cohabit.planner.papers.home.particle_swarm import InitialParticles, ParticleSwarm
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.alap import Codes, tables
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.warm import warm_up

TRAINING_STEPS = ("resnet18", "resnet50", "inception_v4")
"""Timed beside the networks for inference. The paper has a ResNet and Inception-v3."""


def median_ms(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call, after one to warm up."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


class CountedSwarm(ParticleSwarm):
    """The particle swarm, with the number of runs of Algorithm 2."""

    modelled = 0

    def _cost(self, particle: Codes) -> float:
        self.modelled += 1
        return super()._cost(particle)


def home_problems(cache: Path | None) -> Mapping[str, Problem]:
    """Return inference in 25 % of the weights and training in 60 % of a step's memory, in the order of their ops."""
    found = {n: Case(n, "V100, PCIe 3", 0.25).problem(cache) for n in NETWORKS}
    for net in TRAINING_STEPS:
        graph, profile = step_of(net, 12e9, cache)
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
    rows, memory_bytes = tables(gaps), problem.memory.nbytes
    assert evaluate(rows, problem.arrays, particle, memory_bytes) < TOO_MUCH_S
    return [
        name,
        str(len(problem.graph.ops)),
        str(len(gaps.all)),
        f"{search_s:.1f}",
        str(simulated),
        str(swarm.modelled),
        f"{median_ms(lambda: evaluate(rows, problem.arrays, particle, memory_bytes), repeats):.3f}",
        f"{median_ms(lambda: swarm.evaluate(particle.tobytes(), math.inf), repeats):.1f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.speed", __doc__)
    parser.add_argument("--repeats", type=int, default=200, help="evaluations to time (default: %(default)s)")
    options = parser.parse_args(argv)
    warm_up("particle_swarm", single=True)
    rows = [swarm_row(name, problem, options.repeats) for name, problem in home_problems(options.cache).items()]
    header = ["network", "ops", "gaps", "search, s", "simulated", "modelled", "Algorithm 2, ms", "simulator, ms"]
    sections = ["## HOME's swarm and cost model (Table 3)\n", HOME, markdown_table(header, rows)]
    publish(options, "How long HOME's swarm takes", sections)
    return 0


HOME = """One search of `particle_swarm` from its start to its default end, and one evaluation of a particle, in the
median: by HOME's cost model (Algorithm 2), and by the planner's simulator, the particle's schedule included. One
thread. Inference is at batch 1 in 25 % of the weights, a training step at batch 32 in 60 % of its memory, both on
`v100_pcie3`. A *gap* is the time between two uses of a tensor, for which the swarm decides. *Simulated* and *modelled*
are the numbers of evaluations in that search: the simulator ranks particles, and Algorithm 2 moves them. Theirs:
9 to 350 s for 500 iterations of 500 particles with 16 threads, and 0.5 to 21.8 ms for an evaluation.
"""


if __name__ == "__main__":
    sys.exit(main())
