"""Training steps in a GPU that is too small: throughput relative to infinite memory, searcher by searcher.

    python -m benchmarks.planner.throughput --record

SwapAdvisor's Figures 6 and 7, and the comparison of Beaumont et al., in kind: simulated steps of graphs
captured with AOTAutograd, weights updated in place, on a V100 behind PCIe 3.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner.cache import graph_parser_of, in_processes
from benchmarks.planner.profiles import v100_pcie3
from benchmarks.planner.training import TRAININGS, peak_bytes, training_graph
from benchmarks.record import markdown_table, publish
from cohabit.planner.errors import CohabitError
from cohabit.planner.memory import single_budget
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.search.driver import search
from cohabit.planner.search.registry import SEARCHERS

GB = 10**9
SEARCHED = tuple(name for name in SEARCHERS if name not in ("genetic", "offloading"))
NETWORKS = (
    "wresnet152_4",
    "inception_4",
    "rnn_8_2k",
    "brnn_4_2k",
    "wresnet152_10",
    "nasnet_25",
    "rnn_8_8k",
    "brnn_4_8k",
)
FRACTIONS = (2, 4, 6, 8, 12)
"""Of the memory that a step needs, what the headline's table plans it in: "up to 12X beyond the limit" (abstract)."""
HEADLINE = ("best", "swapadvisor", "on_demand")
PAPER_GB = 16.0
"""Memory of the V100 that SwapAdvisor's section 6.2 measures on."""


class Published(NamedTuple):
    """What SwapAdvisor says of a network: the row of its Table 1, and section 6.2's throughput."""

    needs_gb: int
    ops: int
    sizes: int
    throughput: str
    """Relative to infinite memory; on-demand swapping's in brackets."""


PAPER = {
    "wresnet152_10": Published(180, 882, 26, "95% (80%)"),
    "inception_4": Published(71, 830, 64, "at most 65%"),
    "nasnet_25": Published(193, 5533, 65, "53%"),
    "rnn_8_8k": Published(118, 8594, 7, "70 to 80% (under 1%)"),
    "brnn_4_8k": Published(99, 9034, 9, "70 to 80% (under 1%)"),
}


def memories_gb(network: str, needs_bytes: int, given: Sequence[float]) -> list[float]:
    """The memories to plan a network in: those given, and the paper's share of what the network needs."""
    if network not in PAPER:
        return list(given)
    return [*given, round(needs_bytes / GB * PAPER_GB / PAPER[network].needs_gb, 1)]


def statistics(networks: Sequence[str], needs: Mapping[str, int], cache: Path | None) -> str:
    """Table 1 of SwapAdvisor: memory, ops and different tensor sizes of our graphs beside the paper's."""
    rows = []
    for name in networks:
        graph = training_graph(name, None, cache).graph
        sizes = len({t.nbytes for t in graph.tensors})
        of = PAPER.get(name)
        paper = [f"{of.needs_gb} GB", of.ops, of.sizes] if of else ["", "", ""]
        rows.append([name, f"{needs[name] / GB:.0f} GB", paper[0], len(graph.ops), paper[1], sizes, paper[2]])
    header = ["network", "memory", "paper's", "ops", "paper's", "tensor sizes", "paper's"]
    return markdown_table(header, [[str(cell) for cell in row] for row in rows], shown=False)


def run(network: str, memory_gb: float, searcher: str, seconds: float, cache: Path | None) -> str:
    """Resident time over the period of steps run back to back; the refusal's first words if there is no plan."""
    graph, work = training_graph(network, None, cache)
    problem = Problem(graph, v100_pcie3(graph, work), single_budget(int(memory_gb * GB)), objective="period")
    started = time.monotonic()
    try:
        plan = search(problem, searcher, limit=Limit(seconds=seconds, strict=True))
    except CohabitError as refusal:
        return type(refusal).__name__
    assert plan.provenance is not None
    share = plan.provenance.resident_s / plan.provenance.period_s
    winner = plan.provenance.searcher.partition(" (")[2].removesuffix(")")
    return f"{share:.1%} ({', '.join(filter(None, [winner, f'{time.monotonic() - started:.0f} s']))})"


def headline(networks: Sequence[str], needs: Mapping[str, int], found: Mapping[tuple[str, float, str], str]) -> str:
    """Return the throughput in a half to a twelfth of what each network needs, by network and searcher."""
    rows = [
        [f"{n}, {s}", *(found[n, fraction_gb(needs[n], fraction), s] for fraction in FRACTIONS)]
        for n in networks
        for s in HEADLINE
    ]
    return markdown_table(["network, searcher", *(f"1/{fraction}" for fraction in FRACTIONS)], rows)


def fraction_gb(needs_bytes: int, fraction: int) -> float:
    return round(needs_bytes / GB / fraction, 2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.throughput", __doc__)
    parser.add_argument("--seconds", type=float, default=40.0, help="search time per plan (default: %(default)s)")
    parser.add_argument("--memory", type=float, nargs="+", default=[16.0], help="GB (default: %(default)s)")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(TRAININGS))
    parser.add_argument("--processes", type=int, default=2, help="searches at a time (default: %(default)s)")
    parser.set_defaults(record_as="planner-training")
    options = parser.parse_args(argv)
    needs = {n: peak_bytes(training_graph(n, None, options.cache).graph) for n in options.networks}
    asked = [(n, m) for n in options.networks for m in memories_gb(n, needs[n], options.memory)]
    cases = [(n, m, s) for n, m in asked for s in SEARCHED]
    cases += [
        (n, fraction_gb(needs[n], fraction), s)
        for n in options.networks
        for fraction in FRACTIONS
        for s in HEADLINE
    ]
    jobs = [(*c, options.seconds, options.cache) for c in cases]
    found = dict(zip(cases, in_processes(run, jobs, options.processes), strict=True))
    rows = [
        [
            f"{n}, {needs[n] / GB:.0f} GB in {m:g} GB",
            *(found[n, m, s] for s in SEARCHED),
            PAPER[n].throughput if n in PAPER else "",
        ]
        for n, m in asked
    ]
    table = markdown_table(["network, needs in memory", *SEARCHED, "paper, measured"], rows)
    about = (
        "**Simulated**: throughput of steps run back to back relative to infinite memory, on `v100_pcie3` (unscaled "
        "roofline), and how long the search took. Where the paper names a network's memory, the second row has the "
        "paper's share of it: 16 GB over what its graph takes. Weights are state, and the updates of SGD are part of "
        f"the step. Every searcher has {options.seconds:g} s on one core. In brackets, the searcher whose plan `best` "
        "took. The last column is measured: SwapAdvisor's section 6.2, on a V100 with 16 GB; in brackets, on-demand "
        "swapping. A share far below the others' is the serial plan, which every searcher falls back on.\n"
    )
    graphs = (
        "## The graphs, beside Table 1 of SwapAdvisor\n\nThe paper's graphs are MXNet's; ours are torch's."
        " What a graph takes is the sum of its weights and the most of its activations.\n"
    )
    fractions = (
        "## In a half to a twelfth of the memory\n\nThe same with memory as a share of what a step needs. "
        "The paper's abstract: training with models up to 12 times beyond the GPU's memory has 53 % to 99 % of the "
        "throughput with infinite memory.\n"
    )
    headlines = headline(options.networks, needs, found)
    sections = [about, table, fractions, headlines, graphs, statistics(options.networks, needs, options.cache)]
    publish(options, "Training in too little memory", sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
