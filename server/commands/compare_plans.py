"""`cohabit compare-plans`: runs every searcher on one model, batch size and memory size.

A model with dynamic dimensions is planned for its largest bucket.
"""

import argparse
import logging
import time
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.planner.memory import single_budget
from cohabit.planner.plan import Plan, Provenance
from cohabit.planner.search.registry import SEARCHERS
from cohabit.server.commands import EXIT_FAILED
from cohabit.server.commands.planning.files import write_graph, write_plan, write_profile
from cohabit.server.commands.planning.flags import add_effort, add_subject, budget
from cohabit.server.commands.planning.measured import MeasuredGraph, measured_graphs
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.config.sources import typed
from cohabit.server.config.values import LARGEST_BATCH, integer
from cohabit.server.format import PLAN_WORDS, gap, make_table, milliseconds, print_table

_log = logging.getLogger("cohabit.plans")

_TWO_QUESTIONS = (
    "These answer two questions, and are to be compared within one: plans that split the memory, as serving does, keep"
    " their residents beside other models; `one budget` may put everything anywhere, which no server can. --single"
    " plans all as one budget."
)
_Result = tuple[str, Plan, Provenance, float]
"""A searcher, its plan, the plan's provenance, and the seconds taken, including the split of the memory."""


_EXAMPLES = """examples:
  cohabit compare-plans models/resnet50 --memory 64MiB
  cohabit compare-plans models/resnet50 --memory 25% --search best,genetic,greedy --time-limit 30s
  cohabit compare-plans --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

`best`, `genetic` and `offloading` split the memory into a partition and a workspace, as serving does.
The other searchers plan it as one budget.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run every searcher on one model, batch size and memory size, one after the other."
    parser.epilog = _EXAMPLES
    one_batch = integer(1, LARGEST_BATCH)
    add_subject(parser, "N", typed(lambda text: (one_batch(text),)), "batch size (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        required=True,
        type=typed(budget),
        metavar="SIZE",
        help="device memory for the model: 64MiB, 82MB, or 25%% of its weights",
    )
    parser.add_argument(
        "--search",
        type=typed(_searchers),
        default=SEARCHERS,
        metavar="NAME,...",
        help=f"some of {', '.join(SEARCHERS)} (default: all)",
    )
    add_effort(parser, "10s")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write the plans, the graph and the profile here"
    )


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Run the searchers one after the other. Returns 1 if one crashed, or none found a plan.

    A searcher that does not support the problem is a result, not a failure.
    """
    results: list[_Result] = []
    reasons: dict[str, str] = {}
    broke = False
    with SearchProgress(errors) as progress:
        *_, measured = measured_graphs(options, progress.doing)
        for name in options.search:
            progress.doing(name)
            started_s = time.monotonic()
            try:
                plan = measured.search(name, options.memory, options, progress)
                assert plan.provenance is not None
                results.append((name, plan, plan.provenance, time.monotonic() - started_s))
            except CohabitError as error:
                reasons[name] = str(error)
            except Exception as error:  # the comparison continues with the other searchers
                _log.debug("searcher failed", exc_info=True)
                *_, where = traceback.extract_tb(error.__traceback__)
                reasons[name] = (
                    f"a bug of this searcher: {type(error).__name__}: {error}, in {where.name}"
                    f" ({Path(where.filename).name}, line {where.lineno}). The others go on. Please report it with the"
                    " graph and the profile, which --output DIR writes"
                )
                broke = True
    if options.output is not None:
        write_graph(options.output, measured.graph)
        write_profile(options.output, measured.graph, measured.profile)
        for name, plan, *_ in results:
            write_plan(options.output, measured.graph, plan, options.memory.text, name)
    # Searchers without a plan are the last rows; their reasons follow the table.
    title, table = _table(measured, measured.bytes_of(options.memory), results)
    for name in reasons:
        table.add_row(name, "no plan", *["-"] * 5, "")
    print_table(out, table, title=title)
    if results:
        out.print(PLAN_WORDS, style="dim", soft_wrap=True)
    if len({plan.memory for _, plan, *_ in results}) > 1:
        out.print(_TWO_QUESTIONS, soft_wrap=True)
    for name, reason in reasons.items():
        errors.print(f"cohabit: {name}: {reason}", markup=False, soft_wrap=True)
    return 0 if results and not broke else EXIT_FAILED


def _table(measured: MeasuredGraph, memory_bytes: int, results: list[_Result]) -> tuple[str, Table]:
    """Return a title and a table of the results, lowest latency first."""
    from cohabit.planner.bounds.relaxation import latency_bound
    from cohabit.planner.schedule.simulate import simulate

    graph, profile = measured.graph, measured.profile
    budget = single_budget(memory_bytes)
    bound_s = latency_bound(graph, profile, budget)
    table = make_table(
        *("searcher", "latency", "over bound", "over resident"),
        *("over link", "planned in", "evaluations", "memory as"),
        left=("searcher", "memory as"),
    )
    for _, plan, made, seconds in sorted(results, key=lambda r: r[2].latency_s):
        split = f"{format_bytes(plan.memory.partition_bytes)} + {format_bytes(plan.memory.workspace_bytes)}"
        table.add_row(
            made.searcher,
            milliseconds(made.latency_s),
            gap(made.latency_s, bound_s),
            gap(made.latency_s, profile.compute_s),
            format_bytes(simulate(graph, plan, profile).link_bytes),
            f"{seconds:.2f} s",
            str(made.evaluations),
            "one budget" if plan.memory == budget else split,
        )
    title = f"{graph.name} at batch {graph.bucket} in {format_bytes(memory_bytes)}"
    return f"{title}: {milliseconds(profile.compute_s)} resident, lower bound {milliseconds(bound_s)}", table


def _searchers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SEARCHERS:
            raise ValueError(f"no searcher is called {name}; there are {', '.join(SEARCHERS)}")
    return names
