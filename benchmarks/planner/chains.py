"""Training of deep networks in less and less memory, as chains of layers: Beaumont et al.'s Figures 2 and 3, in kind.

    python -m benchmarks.planner.chains --record

Simulated, on a V100's roofline: offloading by several searchers over our lower bound and over the paper's, and
offloading against optimal checkpointing as the link gets faster.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import structs
from rich.progress import track
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.planner.cache import cached, graph_parser_of
from benchmarks.planner.inception import inception_v4
from benchmarks.planner.profiles import v100_pcie3
from benchmarks.planner.training import Classified, Training, _labelled, capture_training, peak_bytes
from benchmarks.record import markdown_table, publish
from cohabit.loadgen.zoo.vision import ImageClassifier
from cohabit.planner.errors import CohabitError
from cohabit.planner.memory import single_budget
from cohabit.planner.papers.beaumont.dynprog import optima
from cohabit.planner.papers.beaumont.grouping import grouped, turn, virtual_layers
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.papers.beaumont.offload import relaxed_s, whole
from cohabit.planner.plan import Plan, Step, SwapIn, SwapOut
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Link
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.driver import search


def _resnet(kind: str, depths: Sequence[int]) -> Training:
    widths = [64 << n for n in range(4)] if kind == "basic" else [256 << n for n in range(4)]
    config = ResNetConfig(hidden_sizes=widths, depths=list(depths), layer_type=kind, num_labels=1000)
    return Training(lambda: Classified(ImageClassifier(ResNetForImageClassification(config))), _labelled(224), 32)


NETWORKS: Mapping[str, Training] = {
    "resnet18": _resnet("basic", [2, 2, 2, 2]),
    "resnet50": _resnet("bottleneck", [3, 4, 6, 3]),
    "resnet152": _resnet("bottleneck", [3, 8, 36, 3]),
    "inception_v4": Training(lambda: Classified(inception_v4()), _labelled(299), 32),
}
SHOWN = "resnet152"
"""Whose tables are on the page; the others are in the data alone."""
SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Of the memory that a step needs if nothing leaves it."""
OFFLOADING = ("dynprog", "greedy", "autoswap", "tflms", "vdnn", "vdnn_conv", "best")
LB_HEADER = ["network, share of its peak", "LB / ops", "dynprog", "greedy", "dynprog's relaxation"]
CHECKPOINTING = "chain_checkpointing"
BANDWIDTHS = (12e9, 24e9, 36e9)


def planned(problem: Problem, searcher: str, seconds: float | None) -> Plan | None:
    try:
        return search(problem, searcher, limit=Limit(seconds=seconds))
    except CohabitError:
        return None


def problems(name: str, bandwidth: float, cache: Path | None) -> list[Problem]:
    """A problem per share: the makespan of one step, with weights in memory and all bytes counted."""
    training = NETWORKS[name]
    graph, work = cached(f"chain-{name}-b{training.batch}", cache, lambda: capture_training(name, training))
    link = Link(10e-6, bandwidth)
    profile = structs.replace(v100_pcie3(graph, work), swap_in=link, swap_out=link)
    needed = peak_bytes(graph)
    return [Problem(graph, profile, single_budget(int(share * needed))) for share in SHARES]


def chain_of(problem: Problem) -> tuple[LayerChain, int]:
    """Return a problem's chain of virtual layers, and the bytes that the weights leave to it."""
    gaps = Gaps(problem.graph)
    at = turn(gaps)
    weights = (t for t, what in enumerate(problem.graph.tensors) if what.is_weight and gaps.uses[t])
    weights_bytes = sum(problem.graph.tensors[t].aligned_bytes for t in weights)
    chain = grouped(gaps, problem.profile, at, virtual_layers(gaps, at)).chain
    return chain, problem.memory.nbytes - weights_bytes


def proposition_3_s(problem: Problem) -> float:
    """Return the paper's lower bound: the ops, or M_peak - M_GPU copied twice over one channel."""
    chain, memory_bytes = chain_of(problem)
    excess_bytes = max(chain.peak_bytes() - memory_bytes, 0.0)
    return max(problem.profile.compute_s, 2 * excess_bytes / problem.profile.swap_out.bandwidth_bytes_per_s)


def on_one_channel_s(plan: Plan, problem: Problem) -> float:
    """Return the makespan if swap-ins and swap-outs share a channel, in the plan's order."""
    steps, last = list[Step](), None
    for index, step in enumerate(plan.steps):
        if isinstance(step, SwapIn | SwapOut):
            steps.append(step if last is None else structs.replace(step, after=tuple({*step.after, last})))
            last = index
        else:
            steps.append(step)
    return simulate(problem.graph, structs.replace(plan, steps=tuple(steps)), problem.profile).latency_s


def over_proposition_3(name: str, cache: Path | None) -> list[list[str]]:
    """Figure 2 in the paper's model: makespans on one channel over Proposition 3's bound; `-` where no rule fits."""
    rows = []
    for share, problem in zip(SHARES, problems(name, BANDWIDTHS[0], cache), strict=True):
        bound_s, cells = proposition_3_s(problem), []
        for searcher in ("dynprog", "greedy"):
            plan = planned(problem, searcher, None)
            fits = plan is not None and plan.residents  # the serial schedule keeps no weights
            cells.append(f"{on_one_channel_s(plan, problem) / bound_s:.3f}" if plan is not None and fits else "-")
        chain, memory_bytes = chain_of(problem)
        relaxed = [relaxed_s(chain, memory_bytes, whole(chain, choice)) for choice in optima(chain, memory_bytes)]
        cells.append(f"{min(relaxed) / bound_s:.3f}" if relaxed else "-")
        rows.append([f"{name}, {share:.0%}", f"{bound_s / problem.profile.compute_s:.2f}", *cells])
    return rows


def over_bound(name: str, seconds: float, cache: Path | None) -> str:
    """Figure 2: the makespan over our lower bound."""
    rows = []
    for share, problem in zip(SHARES, problems(name, BANDWIDTHS[0], cache), strict=True):
        plans = [planned(problem, searcher, seconds) for searcher in OFFLOADING]
        cells = [
            "-" if p is None or p.provenance is None else f"{p.provenance.latency_s / problem.bound_s:.3f}"
            for p in plans
        ]
        rows.append([f"{name}, {share:.0%}", *cells])
    return markdown_table(["network, share of its peak", *OFFLOADING], rows, shown=name == SHOWN)


def against_checkpointing(name: str, seconds: float, cache: Path | None) -> str:
    """Figure 3: images per second."""
    batch = NETWORKS[name].batch
    by_link = [problems(name, bandwidth, cache) for bandwidth in BANDWIDTHS]
    rows = []
    for n, share in enumerate(SHARES):
        plans = [planned(by_link[0][n], CHECKPOINTING, seconds)]
        plans += [planned(of_link[n], "dynprog", seconds) for of_link in by_link]
        plans += [planned(of_link[n], "best", seconds) for of_link in by_link[:1]]
        cells = [
            "-" if p is None or p.provenance is None else f"{batch / p.provenance.latency_s:.0f}" for p in plans
        ]
        rows.append([f"{name}, {share:.0%}", f"{batch / by_link[0][n].profile.compute_s:.0f}", *cells])
    links = [f"dynprog, {bandwidth / 1e9:g} GB/s" for bandwidth in BANDWIDTHS]
    header = ["network, share of its peak", "all in memory", CHECKPOINTING, *links, "best, 12 GB/s"]
    return markdown_table(header, rows, shown=name == SHOWN)


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.chains", __doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="search time per plan (default: %(default)s)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--lb", action="store_true", help="only Figure 2 over the paper's bound, on one channel")
    options = parser.parse_args(argv)
    if options.lb:
        rows = [
            row for name in track(options.networks, "planning") for row in over_proposition_3(name, options.cache)
        ]
        options.record_as = "planner-chains-lb"
        title = "Offloading over Proposition 3's bound, on one channel: Beaumont et al., Figure 2"
        publish(options, title, [LB, markdown_table(LB_HEADER, rows)])
        return 0
    sections = [ABOUT.format(seconds=options.seconds), "## Makespan over the lower bound (Figure 2)\n"]
    for title, table in (("", over_bound), ("## Images per second (Figure 3)\n", against_checkpointing)):
        sections += [title] * bool(title)
        sections += [table(name, options.seconds, options.cache) for name in track(options.networks, "planning")]
    publish(options, "Offloading and checkpointing of chains: Beaumont et al., Figures 2 and 3", sections)
    return 0


ABOUT = """**Simulated**, on `v100_pcie3` (unscaled roofline), as theirs is from profiles on a V100 behind 12.5 GB/s.
One step at batch 32, weights in memory but for `best`, SGD's updates among the ops. Each direction of the link has a
channel of its own here; theirs is one for both. Bounds are ours, for any plan, not their LB. {seconds:g} s per search.
A searcher whose rule does not fit falls back on the serial schedule, which moves everything over every gap; `-` where
no schedule fits.
"""
LB = """**Simulated**, on `v100_pcie3` (unscaled roofline), as theirs is from profiles on a V100 behind 12.5 GB/s. One
step at batch 32, weights in memory, SGD's updates among the ops. As in the paper, swap-ins and swap-outs share one
channel of 12 GB/s, and makespans are over LB, Proposition 3's bound: the ops' time or, if that is longer, twice the
bytes beyond M_GPU at the peak over the bandwidth. *LB / ops*: that bound over the ops' time. *Relaxation*: DYNPROG's
own cost on the chain of virtual layers, whose copies may be partial (section 5). `-` where the weights and the rule do
not fit.
"""


if __name__ == "__main__":
    sys.exit(main())
