"""SwapAdvisor's serving results (Table 2; thesis, Table 5.2) replanned: ResNet-152 on a V100 behind PCIe 3.

    python -m benchmarks.planner.table2 --record

The paper's numbers are measured. All others are simulated by one simulator with one profile: plans of our
implementation of SwapAdvisor's genetic search, plans of `best` for the same single budget, and plans of `best` as they
are served, in a partition and a workspace. Every search has the same time on one core.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace
from rich.console import Console
from rich.progress import track

from benchmarks.planner.cache import graph_parser_of
from benchmarks.planner.models import inference_graph
from benchmarks.planner.profiles import RESNET152_S, v100_pcie3
from benchmarks.record import markdown_table, publish
from cohabit.planner.errors import InfeasibleBudget
from cohabit.planner.graph import Graph
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Plan, SwapIn, SwapOut
from cohabit.planner.problem import Limit, Problem
from cohabit.planner.profile import Profile
from cohabit.planner.search.driver import search
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.fitting import split_budget
from cohabit.planner.warm import warm

MB = 10**6
PAPER_S = {
    (64, 1): 0.024,
    (128, 1): 0.022,
    (128, 16): 0.077,
    (192, 1): 0.018,
    (192, 16): 0.044,
    (256, 1): 0.017,
    (256, 16): 0.043,
    (256, 32): 0.130,
    (320, 1): 0.017,
    (320, 16): 0.042,
    (320, 32): 0.073,
    (512, 1): 0.017,
    (512, 16): 0.040,
    (512, 32): 0.067,
    (512, 64): 0.238,
    (640, 64): 0.123,
    (1024, 64): 0.121,
}
"""Measured seconds per inference (thesis), by memory in MB and batch; other cells could not run, or are resident."""

TEXT = """\
*Paper* is what SwapAdvisor's authors measured on a V100; its percentages are over their resident times (17, 40, 67,
121 ms). All other columns are simulated, by the same simulator with the same profile. `genetic` is our implementation
of SwapAdvisor's search, `best` is ours. Both plan one budget for parameters and activations, in which all bytes are
counted. Plans *as served* have a partition and a workspace. A measured number must not be compared with a simulated
one. *Bound* is the lower bound of any plan in a single budget. Each search has {seconds:g} s on one core.

The profile's shape is assumed: `v100_pcie3` (`benchmarks/planner/profiles.py`) is a roofline scaled to the paper's
resident times, 12 GB/s, 10 us per transfer. The scratch of the paper's convolutions is not known: it counts as none,
but in the last three columns, in which every convolution needs {scratch_mb} MB of it, at any batch size; that is
assumed, too. MB are 10^6 bytes.
"""

CONV_SCRATCH_MB = 16
"""Assumed scratch of a convolution, in the columns that count it."""

HEADER = [
    "memory MB, batch", "paper, measured s", "paper, measured", "genetic, simulated", "best, simulated",
    "best as served, simulated", "bound, simulated", "MB copied as served", "genetic, scratch", "best, scratch",
    "bound, scratch",
]  # fmt: skip


def cell(memory_mb: int, batch: int, seconds: float, cache: Path | None) -> list[str]:
    """A row of the table."""
    graph, work = inference_graph("resnet152", batch, cache)
    resident_s, memory = RESNET152_S[batch], memory_mb * MB
    profile = v100_pcie3(graph, work, resident_s)
    limit = Limit(seconds=seconds, strict=True)
    problem = Problem(graph, profile, single_budget(memory))
    genetic, best = by_both(problem, limit)

    def served() -> Plan:
        split = split_budget({Bucket(batch): graph}, {Bucket(batch): profile}, memory)
        return search(Problem(graph, profile, split), limit=limit)

    last = _planned(served)
    paper_s = PAPER_S.get((memory_mb, batch))
    copies = (
        [step.tensor for step in last.steps if isinstance(step, SwapIn | SwapOut)] if isinstance(last, Plan) else []
    )
    copied = sum(graph.tensors[t].nbytes for t in copies)
    scratched = with_conv_scratch(graph)
    with_scratch = Problem(scratched, replace(profile, graph=scratched.fingerprint), problem.memory)
    plans = by_both(with_scratch, limit)
    return [
        f"{memory_mb}, {batch}",
        *([f"{paper_s:.3f}", f"{paper_s / resident_s - 1:+.0%}"] if paper_s else ["-"] * 2),
        *(_overhead(plan, profile) for plan in (genetic, best, last)),
        _bound(problem, best),
        f"{copied / MB:.0f}" if isinstance(last, Plan) else "-",
        *(_overhead(plan, profile) for plan in plans),
        _bound(with_scratch, plans[1]),
    ]


def by_both(problem: Problem, limit: Limit) -> list[Plan | InfeasibleBudget]:
    """Return the plans of `swapadvisor` and `best`."""
    return [_planned(lambda: search(problem, name, limit=limit)) for name in ("swapadvisor", "best")]  # noqa: B023


def with_conv_scratch(graph: Graph) -> Graph:
    """Return the graph whose convolutions need CONV_SCRATCH_MB of scratch."""
    scratch_bytes = CONV_SCRATCH_MB * MB
    ops = (replace(op, scratch_bytes=scratch_bytes) if "conv" in op.target else op for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def _planned(make) -> Plan | InfeasibleBudget:  # type: ignore[no-untyped-def]
    try:
        return make()
    except InfeasibleBudget as refusal:
        return refusal


def _overhead(plan: Plan | InfeasibleBudget, profile: Profile) -> str:
    """Over the resident time; rounding may make it less than nothing."""
    if isinstance(plan, InfeasibleBudget):
        return f"needs {plan.least_bytes / MB:.1f} MB"
    assert plan.provenance is not None
    return f"{max(plan.provenance.latency_s / profile.compute_s - 1, 0.0):+.1%}"


def _bound(problem: Problem, plan: Plan | InfeasibleBudget) -> str:
    """The lower bound over the resident time, if there is a plan."""
    over = max(problem.bound_s / problem.profile.compute_s - 1, 0.0)
    return f"{over:+.1%}" if isinstance(plan, Plan) else "-"


def main(argv: Sequence[str] | None = None) -> int:
    parser = graph_parser_of("benchmarks.planner.table2", __doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each search (default: %(default)s)")
    parser.add_argument("--cells", type=int, help="only so many of the cells, for a short run")
    options = parser.parse_args(argv)
    cells = sorted({*PAPER_S, (64, 16), (96, 1)})[: options.cells]
    warm()
    rows = [
        cell(*each, options.seconds, options.cache)
        for each in track(cells, "planning", console=Console(stderr=True))
    ]
    about = TEXT.format(seconds=options.seconds, scratch_mb=CONV_SCRATCH_MB)
    sections = [about, "## Op times by the roofline\n", markdown_table(HEADER, rows)]
    publish(options, "ResNet-152 in little memory: SwapAdvisor's Table 2, replanned", sections)
    return 0


if __name__ == "__main__":
    sys.exit(main())
