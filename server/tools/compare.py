"""`cohabit compare-plans`: every searcher on one model, batch size and memory."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from planner.bounds.bound import latency_bound
from planner.errors import CohabitError, format_bytes
from planner.plan import Plan
from planner.search.driver import search
from planner.search.registry import SEARCHERS
from planner.simulate import simulate
from planner.timeline import Timeline
from server.tools.files import write_graph, write_plan, write_profile
from server.tools.instances import Instance, instances
from server.tools.options import CompareOptions
from server.tools.plan import limit_of, require_known
from server.tools.progress import Watch, gap, milliseconds

_log = logging.getLogger("cohabit.plans")

EXIT_FAILED = 1


@dataclass(frozen=True, slots=True)
class Found:
    plan: Plan
    timeline: Timeline
    seconds: float
    """What the search took, the splitting of the memory included."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """What came of one searcher; a reason in words where no plan did."""

    searcher: str
    result: Found | str
    is_bug: bool = False
    """Whether the reason is none that a searcher may have."""


def run(options: CompareOptions, out: Console, errors: Console) -> int:
    """Try the searchers one after the other. Returns 1 if one of them broke, or none has found a plan.

    That a searcher cannot plan such a problem is a result like others.
    """
    names = options.searchers or SEARCHERS
    for name in names:
        require_known(name)
    with Watch(errors) as watch:
        (instance,) = instances(options.subject, watch.doing)
        attempts = [_attempt(name, instance, options, watch) for name in names]
    if options.output is not None:
        _keep(attempts, instance, options)
    out.print(_table(attempts, instance, instance.bytes_of(options.memory)))
    for attempt in attempts:
        if isinstance(attempt.result, str):
            errors.print(f"cohabit: {attempt.searcher}: {attempt.result}", markup=False, soft_wrap=True)
    useless = all(isinstance(a.result, str) for a in attempts)
    return EXIT_FAILED if useless or any(a.is_bug for a in attempts) else 0


def _attempt(searcher: str, instance: Instance, options: CompareOptions, watch: Watch) -> Attempt:
    """One searcher; whatever goes wrong is said in its row, so that the others' stay."""
    effort = options.effort
    watch.doing(f"{searcher}: preparing")
    started_s = time.monotonic()
    try:
        problem = instance.problem(instance.bytes_of(options.memory), searcher, options.single)
        watch.doing(searcher)
        plan = search(
            problem,
            searcher,
            seed=effort.seed,
            limit=limit_of(effort),
            workers=effort.workers,
            on_progress=watch.searched,
            is_stopped=lambda: watch.is_stopped,
        )
        seconds = time.monotonic() - started_s
        return Attempt(searcher, Found(plan, simulate(instance.graph, plan, instance.profile), seconds))
    except CohabitError as error:
        return Attempt(searcher, str(error))
    except Exception as error:
        _log.debug("searcher failed", exc_info=True)
        return Attempt(searcher, f"unexpected {type(error).__name__}: {error}", is_bug=True)


def _keep(attempts: Sequence[Attempt], instance: Instance, options: CompareOptions) -> None:
    assert options.output is not None
    write_graph(options.output, instance.graph)
    write_profile(options.output, instance.graph, instance.profile)
    for attempt in attempts:
        if not isinstance(attempt.result, str):
            write_plan(options.output, instance.graph, attempt.result.plan, options.memory.text, attempt.searcher)


def _table(attempts: Sequence[Attempt], instance: Instance, memory_bytes: int) -> Table:
    graph, profile = instance.graph, instance.profile
    bound_s = latency_bound(graph, profile, memory_bytes, 0)
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{graph.name} at batch {graph.batch} in {format_bytes(memory_bytes)}:"
        f" {milliseconds(profile.compute_s)} resident, no plan below {milliseconds(bound_s)}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("searcher")
    for name in ("latency", "over bound", "over resident", "over link", "planned in", "evaluations"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("memory as")
    found = [(a.searcher, a.result) for a in attempts if not isinstance(a.result, str)]
    for searcher, result in sorted(found, key=lambda row: row[1].timeline.latency_s):
        table.add_row(searcher, *_cells(result, profile.compute_s, bound_s))
    for attempt in attempts:
        if isinstance(attempt.result, str):
            table.add_row(attempt.searcher, "no plan", *["-"] * 5, "")
    return table


def _cells(found: Found, resident_s: float, bound_s: float) -> list[str]:
    plan, latency_s = found.plan, found.timeline.latency_s
    assert plan.provenance is not None
    split = f"{format_bytes(plan.partition_bytes)} + {format_bytes(plan.workspace_bytes)}"
    return [
        milliseconds(latency_s),
        gap(latency_s, bound_s),
        gap(latency_s, resident_s),
        format_bytes(found.timeline.link_bytes),
        f"{found.seconds:.2f} s",
        str(plan.provenance.evaluations),
        split if plan.workspace_bytes else "one budget",
    ]
