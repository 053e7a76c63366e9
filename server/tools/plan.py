"""`cohabit plan`: one plan for each memory and batch size, written to files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from planner.errors import InfeasibleBudget, UnknownSearcher, format_bytes
from planner.plan import Plan
from planner.problem import Limit
from planner.search.driver import search
from planner.search.registry import SEARCHERS
from planner.simulate import simulate
from server.tools.files import write_graph, write_plan, write_profile
from server.tools.instances import SPLITTING, Instance, instances
from server.tools.options import Effort, Memory, PlanOptions
from server.tools.progress import Watch, gap, milliseconds

EXIT_INFEASIBLE = 2


@dataclass(frozen=True, slots=True)
class Made:
    """A plan and its file, or why there is none."""

    instance: Instance
    memory: Memory
    result: tuple[Plan, Path] | InfeasibleBudget


def run(options: PlanOptions, out: Console, errors: Console) -> int:
    """Plan everything that was asked for. Returns 2 if a budget was infeasible; the others are planned all the same."""
    require_known(options.searcher)
    with Watch(errors) as watch:
        subjects = instances(options.subject, watch.doing)
        for instance in subjects:
            write_graph(options.output, instance.graph)
            write_profile(options.output, instance.graph, instance.profile)
        made = [_make(s, memory, options, watch, errors) for s in subjects for memory in options.memories]
    if any(not isinstance(m.result, InfeasibleBudget) for m in made):
        out.print(_table(made, options.output))
    return EXIT_INFEASIBLE if any(isinstance(m.result, InfeasibleBudget) for m in made) else 0


def require_known(searcher: str) -> None:
    """Raise UnknownSearcher before anything is measured."""
    if searcher not in SEARCHERS:
        raise UnknownSearcher(searcher, SEARCHERS)


def limit_of(effort: Effort) -> Limit | None:
    if effort.seconds is None and effort.evaluations is None:
        return None
    return Limit(effort.evaluations, effort.seconds)


def _make(instance: Instance, memory: Memory, options: PlanOptions, watch: Watch, errors: Console) -> Made:
    title = f"{instance.graph.name} at batch {instance.graph.batch} in {memory.text}"
    watch.doing(f"{title}: splitting the memory")
    effort, searcher = options.effort, options.searcher
    try:
        problem = instance.problem(instance.bytes_of(memory), searcher, options.single)
        watch.doing(title)
        plan = search(
            problem,
            searcher,
            seed=effort.seed,
            limit=limit_of(effort),
            workers=effort.workers,
            on_progress=watch.searched,
            is_stopped=lambda: watch.is_stopped,
        )
    except InfeasibleBudget as error:
        errors.print(f"cohabit: batch {instance.graph.batch}: {error}", markup=False, soft_wrap=True)
        return Made(instance, memory, error)
    label = f"{searcher}-single" if options.single and searcher in SPLITTING else searcher
    return Made(instance, memory, (plan, write_plan(options.output, instance.graph, plan, memory.text, label)))


def _table(made: Sequence[Made], folder: Path) -> Table:
    first = made[0].instance
    table = Table(
        box=SIMPLE_HEAD,
        title=f"{first.graph.name}, {format_bytes(first.weight_bytes)} of parameters, on {first.profile.device}",
        title_justify="left",
        title_style="bold",
        caption=f"in {folder}; look at one with: cohabit show {_first_file(made)}",
        caption_justify="left",
    )
    for name in ("memory", "batch", "latency", "resident", "bound", "gap", "over link", "period"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("file", overflow="fold")
    for one in made:
        table.add_row(*_row(one))
    return table


def _row(made: Made) -> list[str]:
    graph, profile = made.instance.graph, made.instance.profile
    memory = format_bytes(made.instance.bytes_of(made.memory))
    if isinstance(made.result, InfeasibleBudget):
        least = format_bytes(made.result.least_bytes)
        return [memory, str(graph.batch), *["-"] * 6, f"infeasible: needs {least}"]
    plan, path = made.result
    about = plan.provenance
    assert about is not None
    return [
        memory,
        str(graph.batch),
        milliseconds(about.latency_s),
        milliseconds(about.resident_s),
        milliseconds(about.bound_s),
        gap(about.latency_s, about.bound_s),
        format_bytes(simulate(graph, plan, profile).link_bytes),
        milliseconds(about.period_s),
        path.name,
    ]


def _first_file(made: Sequence[Made]) -> Path:
    return next(m.result[1] for m in made if not isinstance(m.result, InfeasibleBudget))
