"""HOME's point, swaps mixed with recomputation: where that pays, and how drawn swarms converge (Figure 8).

    python -m benchmarks.planner.mixing --record

Simulated, on a V100's roofline. Searches stop after a number of evaluations, so that a busy machine does not matter.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import structs

from benchmarks.planner.cache import cached, graph_parser_of
from benchmarks.planner.chains import NETWORKS
from benchmarks.planner.profiles import v100_pcie3
from benchmarks.planner.time_parts import TimeParts
from benchmarks.planner.training import capture_training
from benchmarks.record import markdown_table, publish
from cohabit.planner.arrays import GraphArrays
from cohabit.planner.graph import Graph
from cohabit.planner.lifetimes import live_activation_bytes
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.beaumont.grouping import turn
from cohabit.planner.papers.home.cost import evaluate
from cohabit.planner.papers.home.particle_swarm import PARTICLES, InitialParticles, ParticleSwarm
from cohabit.planner.plan import Compute, Plan
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Link, Profile
from cohabit.planner.schedule.alap import codes, tables
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.search.driver import search

CASES = (
    ("resnet18", (0.75, 0.6), (96e9, 24e9, 12e9, 3e9)),
    ("resnet50", (0.75, 0.6, 0.4), (24e9, 12e9)),
)
"""Nets, shares of their step's memory, and bandwidths. PCIe 3, as in the paper, is the one of 12e9."""
WAYS = ("dynprog", "chain_checkpointing", "capuchin", "particle_swarm")
EVALUATIONS = 8 * PARTICLES
SHARE, ITERATIONS = 0.6, 16
"""Of the swarms: the share of the step's memory, and the most iterations."""
NEAR = (0.1, 0.01)
"""How close to its end the search is, relatively."""


def step_of(net: str, bandwidth: float, cache: Path | None) -> tuple[Graph, Profile]:
    """A training step and its profile."""
    training = NETWORKS[net]
    graph, work = cached(f"chain-{net}-b{training.batch}", cache, lambda: capture_training(net, training))
    link = Link(10e-6, bandwidth)
    return graph, structs.replace(v100_pcie3(graph, work), swap_in=link, swap_out=link)


def resident_bytes(graph: Graph) -> int:
    """The least counted memory with which a plan never moves a parameter or state."""
    held = [structs.replace(t, kind="parameter") if t.is_weight else t for t in graph.tensors]
    weights = sum(t.aligned_bytes for t in held if t.is_weight)
    return weights + max(live_activation_bytes(structs.replace(graph, tensors=tuple(held))))


def problem_of(graph: Graph, profile: Profile, share: float) -> Problem:
    return Problem(graph, profile, single_budget(int(share * resident_bytes(graph))), objective="period")


def mixed(cache: Path | None) -> Iterator[Sequence[str]]:
    """Return steps' times over their ops' times, by swaps alone, by recomputation alone, and by both."""
    for net, shares, bandwidths in CASES:
        for bandwidth in bandwidths:
            graph, profile = step_of(net, bandwidth, cache)
            gaps = Gaps(graph)
            at = turn(gaps)
            over_turn = (g for g in gaps.all if g.is_offloadable(graph) and g.last_use < at <= g.next_use)
            copy_s = 2 * sum(graph.tensors[gap.tensor].nbytes for gap in over_turn) / bandwidth
            for share in shares:
                problem = problem_of(graph, profile, share)
                plans = {way: search(problem, way, limit=Limit(evaluations=EVALUATIONS)) for way in WAYS}
                row = [f"{net}, {share:.0%}, {bandwidth / 1e9:g} GB/s", f"{copy_s / profile.compute_s:.2f}"]
                row += [over_ops(plan, profile) for plan in plans.values()]
                row += [f"{part:.1%}" for part in TimeParts.of(graph, plans["particle_swarm"], profile).shares[1:]]
                yield [*row, f"{one_by_one_s(graph, plans['chain_checkpointing'], profile):.3f}"]


def over_ops(plan: Plan, profile: Profile) -> str:
    """The period over the ops' time; `-` if only the serial schedule is left, which keeps no weights."""
    assert plan.provenance is not None
    return f"{plan.provenance.period_s / profile.compute_s:.3f}" if plan.residents else "-"


def one_by_one_s(graph: Graph, checkpoints: Plan, profile: Profile) -> float:
    """Return the cost over the ops' time of the particle that recomputes what a plan does and keeps the rest.

    Memory is not limited.
    """
    ran, again = set[int](), set[int]()
    for step in checkpoints.steps:
        if isinstance(step, Compute):
            again |= {*graph.ops[step.op].writes} if step.op in ran else set()
            ran.add(step.op)
    gaps = Gaps(graph)
    at = turn(gaps)
    particle = codes(
        Choice.RECOMPUTE
        if gap.tensor in again and Choice.RECOMPUTE in gap.choices and gap.last_use < at <= gap.next_use
        else Choice.KEEP
        for gap in gaps.all
    )
    return (
        evaluate(tables(gaps), GraphArrays.of(graph, profile), particle, resident_bytes(graph)) / profile.compute_s
    )


class DrawnSwarm(ParticleSwarm):
    """Algorithm 1 as printed: all particles are drawn at random, and move until none does."""

    iterations = 500

    def _search(self) -> Iterator[Sequence[bytes]]:
        yield from self._fly([], InitialParticles(self.problem, self._gaps))


class LargeDrawnSwarm(DrawnSwarm):
    particles = 8 * PARTICLES


SWARMS: Mapping[str, type[ParticleSwarm]] = {
    "by rules": ParticleSwarm,
    "drawn": DrawnSwarm,
    "drawn, large": LargeDrawnSwarm,
}


def convergence(net: str, cache: Path | None) -> Iterator[Sequence[str]]:
    """Figure 8: after how many iterations the best step so far is within a share of the last one."""
    graph, profile = step_of(net, 12e9, cache)
    problem = problem_of(graph, profile, SHARE)
    for kind, make in SWARMS.items():
        swarm, best_s = make(problem, 0), list[float]()
        while len(best_s) < ITERATIONS * swarm.particles and (candidates := swarm.ask()):
            costs = [swarm.evaluate(c, math.inf) for c in candidates]
            swarm.tell(candidates, costs)
            for cost in costs:
                best_s.append(min(problem.seconds(cost), best_s[-1] if best_s else math.inf))
        last_s = best_s[-1]
        row = [f"{net}, {kind}", str(swarm.particles)]
        row += [f"{step_s / profile.compute_s:.3f}" for step_s in (best_s[0], last_s)]
        for near in NEAR:
            evaluated = next(n for n, s in enumerate(best_s, 1) if s <= last_s * (1 + near))
            row.append(f"{evaluated / swarm.particles:.1f}")
        yield [*row, f"{len(best_s) / swarm.particles:.0f}"]


def main(argv: Sequence[str] | None = None) -> int:
    options = graph_parser_of("benchmarks.planner.mixing", __doc__).parse_args(argv)
    header = ["net, share, link", "copies / ops", *WAYS]
    header += ["overlap", "recomputation", "swapping", "checkpoints one by one"]
    sections = [
        "## Swaps, recomputation, and both\n",
        MIXING,
        markdown_table(header, list(mixed(options.cache)), shown=False),
    ]
    header = ["net at 60 %, particles", "number", "first", "last", "within 10 %", "within 1 %", "iterations"]
    sections += ["## Convergence of drawn swarms (Figure 8)\n", SWARM]
    sections.append(markdown_table(header, list(convergence("resnet18", options.cache))))
    publish(options, "Where mixing swaps with recomputation pays, and drawn swarms: HOME", sections)
    return 0


MIXING = f"""**Simulated**, on `v100_pcie3` (unscaled roofline), batch 32, weights in memory. Times are over the ops'
time. *Copies / ops*: the time to copy every activation that waits for the backward pass out and in. The paper says that
the copies of most layers take more than twice as long as the layer; its link is PCIe 3. `dynprog` swaps only,
`chain_checkpointing` recomputes only, `capuchin` and `particle_swarm` do both; the next three columns are the parts of
the swarm's step. *Checkpoints one by one*: HOME's cost of the tensors that `chain_checkpointing` recomputes, if each is
recomputed by itself, right before its use, with what it needs, which is released again (section 2.2). {EVALUATIONS}
evaluations each. `-`: there is only the serial schedule.
"""
SWARM = """**Simulated**, behind 12 GB/s; first and last best step over the ops' time. An iteration has as many
evaluations as the swarm has particles. *By rules*: the first particles are made by rules. *Drawn*: all particles are
drawn at random, as far as memory allows, and move until none does (Algorithm 1). Theirs: 500 particles, 16 to 89
iterations.
"""


if __name__ == "__main__":
    sys.exit(main())
