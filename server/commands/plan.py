"""`cohabit plan`: writes one plan file for each memory size and bucket."""

import argparse
from pathlib import Path

from rich.console import Console

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.schedule.simulate import simulate
from cohabit.planner.search.registry import SERVING
from cohabit.server.commands.files import write_graph, write_plan, write_profile
from cohabit.server.commands.flags import MemoryBudget
from cohabit.server.commands.instances import Instance, instances
from cohabit.server.commands.progress import SearchProgress
from cohabit.server.commands.tile import plan_devices
from cohabit.server.errors import ConfigError
from cohabit.server.format import gap, make_table, milliseconds

EXIT_INFEASIBLE = 2

_COLUMNS = ("memory", "batch", "latency", "resident", "bound", "gap", "over link", "period")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Plan every memory size and bucket. Returns 2 if one was infeasible; the others are planned all the same.

    Raises ConfigError without a memory size or a number of devices.
    """
    if options.devices is not None:
        return plan_devices(options, out)
    if not options.memory:
        raise ConfigError("plan: give --memory SIZE, or --devices N")
    rows: list[list[str]] = []
    files: list[Path] = []
    with SearchProgress(errors) as progress:
        planned = instances(options, progress.doing)
        for instance in planned:
            write_graph(options.output, instance.graph)
            write_profile(options.output, instance.graph, instance.profile)
            for memory in options.memory:
                where = [format_bytes(instance.bytes_of(memory)), str(instance.graph.bucket)]
                try:
                    cells, path = _plan(instance, memory, options, progress)
                    rows.append([*where, *cells, path.name])
                    files.append(path)
                except InfeasibleBudget as error:
                    errors.print(f"cohabit: batch {where[1]}: {error}", markup=False, soft_wrap=True)
                    least = format_bytes(error.least_bytes)
                    rows.append([*where, *["-"] * 6, f"infeasible: needs {least}"])
    if files:
        graph, device, weight_bytes = planned[0].graph, planned[0].profile.device, planned[0].weight_bytes
        table = make_table(
            *_COLUMNS,
            "file",
            left=("file",),
            title=f"{graph.name}, {format_bytes(weight_bytes)} of weights, on {device}",
            caption=f"in {options.output}; draw one with: cohabit show {files[0]}",
        )
        for row in rows:
            table.add_row(*row)
        out.print(table)
    return 0 if len(files) == len(rows) else EXIT_INFEASIBLE


def _plan(
    instance: Instance, memory: MemoryBudget, options: argparse.Namespace, progress: SearchProgress
) -> tuple[list[str], Path]:
    """Search and write a plan; returns its cells of the table and its file."""
    graph, searcher = instance.graph, options.search
    progress.doing(f"{graph.name} at batch {graph.bucket} in {memory.text}")
    plan = instance.search(searcher, memory, options, progress)
    label = f"{searcher}-single" if options.single and searcher in SERVING else searcher
    path = write_plan(options.output, graph, plan, memory.text, label)
    about = plan.provenance
    assert about is not None
    cells = [
        milliseconds(about.latency_s),
        milliseconds(about.resident_s),
        milliseconds(about.bound_s),
        gap(about.latency_s, about.bound_s),
        format_bytes(simulate(graph, plan, instance.profile).link_bytes),
        milliseconds(about.period_s),
    ]
    return cells, path
