"""`cohabit compare-plans`: runs every searcher on one model, batch size and memory size."""

import argparse
import logging
import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from planner.bounds.bound import latency_bound
from planner.errors import CohabitError, format_bytes
from planner.plan import Plan
from planner.simulate import simulate
from planner.timeline import Timeline
from server.tools.files import write_graph, write_plan, write_profile
from server.tools.format import gap, make_table, milliseconds
from server.tools.instances import Instance, instances
from server.tools.progress import SearchProgress

_log = logging.getLogger("cohabit.plans")

EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class SearchResult:
    searcher: str
    plan: Plan
    timeline: Timeline
    seconds: float
    """Duration of the search, including the split of the memory."""


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Run the searchers one after the other. Returns 1 if one broke, or none found a plan.

    A searcher that does not support the problem is a result, not a failure.
    """
    results: list[SearchResult] = []
    reasons: dict[str, str] = {}
    broke = False
    with SearchProgress(errors) as progress:
        (instance,) = instances(options, progress.doing)
        for name in options.searchers:
            try:
                results.append(_search(name, instance, options, progress))
            except CohabitError as error:
                reasons[name] = str(error)
            except Exception as error:
                _log.debug("searcher failed", exc_info=True)
                reasons[name] = f"unexpected {type(error).__name__}: {error}"
                broke = True
    if options.output is not None:
        write_graph(options.output, instance.graph)
        write_profile(options.output, instance.graph, instance.profile)
        for result in results:
            write_plan(options.output, instance.graph, result.plan, options.memory.text, result.searcher)
    table = _table(instance, instance.bytes_of(options.memory), results)
    for name in reasons:
        table.add_row(name, "no plan", *["-"] * 5, "")
    out.print(table)
    for name, reason in reasons.items():
        errors.print(f"cohabit: {name}: {reason}", markup=False, soft_wrap=True)
    return 0 if results and not broke else EXIT_FAILED


def _search(
    searcher: str, instance: Instance, options: argparse.Namespace, progress: SearchProgress
) -> SearchResult:
    progress.doing(searcher)
    started_s = time.monotonic()
    plan = instance.search(searcher, options.memory, options, progress)
    seconds = time.monotonic() - started_s
    return SearchResult(searcher, plan, simulate(instance.graph, plan, instance.profile), seconds)


def _table(instance: Instance, memory_bytes: int, results: list[SearchResult]) -> Table:
    """Return a table of the results, lowest latency first."""
    graph, profile = instance.graph, instance.profile
    bound_s = latency_bound(graph, profile, memory_bytes, 0)
    table = make_table(
        *(
            "searcher",
            "latency",
            "over bound",
            "over resident",
            "over link",
            "planned in",
            "evaluations",
            "memory as",
        ),
        left=("searcher", "memory as"),
        title=f"{graph.name} at batch {graph.batch} in {format_bytes(memory_bytes)}:"
        f" {milliseconds(profile.compute_s)} resident, lower bound {milliseconds(bound_s)}",
    )
    for result in sorted(results, key=lambda r: r.timeline.latency_s):
        plan, latency_s = result.plan, result.timeline.latency_s
        assert plan.provenance is not None
        split = f"{format_bytes(plan.partition_bytes)} + {format_bytes(plan.workspace_bytes)}"
        table.add_row(
            result.searcher,
            milliseconds(latency_s),
            gap(latency_s, bound_s),
            gap(latency_s, profile.compute_s),
            format_bytes(result.timeline.link_bytes),
            f"{result.seconds:.2f} s",
            str(plan.provenance.evaluations),
            split if plan.workspace_bytes else "one budget",
        )
    return table
