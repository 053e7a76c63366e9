"""`cohabit plan`: writes one plan file for each memory size and bucket."""

import argparse
from pathlib import Path

from rich.console import Console

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.search.registry import BASELINES, SEARCHERS
from cohabit.server.commands.planning.files import write_graph, write_plan, write_profile
from cohabit.server.commands.planning.flags import MemoryBudget, add_effort, add_subject, budgets
from cohabit.server.commands.planning.measured import MeasuredGraph, measured_graphs
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.config.sources import typed
from cohabit.server.config.values import batches
from cohabit.server.errors import ConfigError
from cohabit.server.format import PLAN_WORDS, disturbed, gap, make_table, milliseconds, print_table

EXIT_INFEASIBLE = 2

_COLUMNS = ("memory", "batch", "latency", "resident", "bound", "gap", "over link", "period")


_EXAMPLES = """examples:
  cohabit plan models/resnet50 --memory 64MiB
  cohabit plan models/resnet50 --memory 25%,50%,75% --batch-sizes 1,16 --output plans
  cohabit plan models/bert --memory 32MiB --search genetic --time-limit 30s --workers 4
  cohabit plan --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

Each batch size is planned on its own. When `cohabit serve` plans several batch sizes of a model, their plans keep
the same parameters resident.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Plan how a model runs in some memory: which parameters stay resident, when the others are copied, and to\n"
        "which addresses. Writes plans, graphs and profiles as JSON files."
    )
    parser.epilog = _EXAMPLES
    add_subject(parser, "N,N,...", typed(batches), "batch sizes to plan (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        default=(),
        type=typed(budgets),
        metavar="SIZE,...",
        help="device memory for the model, or several to plan for: 64MiB, 82MB, or 25%% of its weights",
    )
    parser.add_argument(
        "--search",
        default="best",
        choices=(*SEARCHERS, *BASELINES),
        metavar="NAME",
        help=f"how to search: {', '.join(SEARCHERS)}; best, genetic and offloading plan a partition and a"
        " workspace, as serving does, the others one budget. Baselines to compare with, for one budget:"
        f" {', '.join(BASELINES)} (default: %(default)s)",
    )
    add_effort(parser)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plans"),
        metavar="DIR",
        help="folder for the plans, graphs and profiles (default: ./%(default)s)",
    )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Plan every memory size and bucket. Returns 2 if one was infeasible, after planning the others.

    Raises ConfigError without a memory size.
    """
    if not options.memory:
        raise ConfigError("plan: give --memory SIZE")
    from cohabit.planner.compiled import COMPILING, compiles_first
    from cohabit.planner.profile import NOISY

    rows: list[list[str]] = []
    files: list[Path] = []
    tried: list[int] = []
    with SearchProgress(errors) as progress:
        planned = measured_graphs(options, progress.doing)
        if compiles_first():
            errors.print(f"cohabit: {COMPILING}", soft_wrap=True)
        for measured in planned:
            write_graph(options.output, measured.graph)
            write_profile(options.output, measured.graph, measured.profile)
            for memory in options.memory:
                where = [format_bytes(measured.bytes_of(memory)), str(measured.graph.bucket)]
                try:
                    cells, path, evaluations = _plan(measured, memory, options, progress)
                    tried.append(evaluations)
                    rows.append([*where, *cells, path.name])
                    files.append(path)
                except InfeasibleBudget as error:  # a row of the table; the other sizes are still planned
                    errors.print(f"cohabit: batch {where[1]}: {error}", markup=False, soft_wrap=True)
                    least = format_bytes(error.least_bytes)
                    rows.append([*where, *["-"] * 6, f"infeasible: needs {least}"])
    if files:  # without a plan, the errors above say everything
        graph, device, weight_bytes = planned[0].graph, planned[0].profile.device, planned[0].weight_bytes
        noise = max(measured.profile.noise for measured in planned)
        if noise > NOISY:
            errors.print(f"cohabit: {disturbed(noise)}", soft_wrap=True)
        table = make_table(*_COLUMNS, "file", left=("file",))
        for row in rows:
            table.add_row(*row)
        print_table(
            out,
            table,
            title=f"{graph.name}, {format_bytes(weight_bytes)} of weights, on {device}",
            total=f"{_range(tried)} tried per plan. In {options.output}; draw one with: cohabit show {files[0]}",
        )
        out.print(PLAN_WORDS, style="dim", soft_wrap=True)
    return 0 if len(files) == len(rows) else EXIT_INFEASIBLE


def _range(tried: list[int]) -> str:
    least, most = min(tried), max(tried)
    count = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return f"{count} candidate{'' if most == 1 else 's'}"


def _plan(
    measured: MeasuredGraph, memory: MemoryBudget, options: argparse.Namespace, progress: SearchProgress
) -> tuple[list[str], Path, int]:
    """Search and write a plan. Returns its table cells, its file, and the number of candidates tried."""
    from cohabit.planner.schedule.simulate import simulate

    graph, searcher = measured.graph, options.search
    progress.doing(f"{graph.name} at batch {graph.bucket} in {memory.text}")
    plan = measured.search(searcher, memory, options, progress)
    path = write_plan(options.output, graph, plan, memory.text, searcher)
    about = plan.provenance
    assert about is not None
    cells = [
        milliseconds(about.latency_s),
        milliseconds(about.resident_s),
        milliseconds(about.bound_s),
        gap(about.latency_s, about.bound_s),
        format_bytes(simulate(graph, plan, measured.profile).link_bytes),
        milliseconds(about.period_s),
    ]
    return cells, path, about.evaluations
