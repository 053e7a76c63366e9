"""`cohabit profile`: what a model costs on a device, and how fast the device's link is."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from planner.errors import format_bytes
from planner.profile import Link
from server.tools.instances import Instance, instances
from server.tools.options import ProfileOptions
from server.tools.progress import Watch, milliseconds

_SLOWEST = 5


def run(options: ProfileOptions, out: Console, errors: Console) -> int:
    """Measure every batch size that was asked for, or read what was measured before, and show it."""
    with Watch(errors) as watch:
        subjects = instances(options.subject, watch.doing)
    out.print(f"{subjects[0].graph.name} on {subjects[0].profile.device}")
    out.print(_batches(subjects))
    out.print(_slowest(subjects[0]))
    return 0


def _batches(subjects: list[Instance]) -> Table:
    table = Table(
        "batch",
        "resident",
        "swap in",
        "swap out",
        "ops beside copies",
        "copies beside ops",
        box=SIMPLE_HEAD,
    )
    for subject in subjects:
        profile = subject.profile
        table.add_row(
            str(subject.graph.batch),
            milliseconds(profile.compute_s),
            _link(profile.swap_in),
            _link(profile.swap_out),
            f"{profile.compute_slowdown:.2f}x as long",
            f"{profile.swap_slowdown:.2f}x as long",
        )
    return table


def _link(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {link.latency_s * 1e6:.1f} us"


def _slowest(subject: Instance) -> Table:
    """The ops that take longest, with what they read and need."""
    graph, seconds = subject.graph, subject.profile.op_seconds
    table = Table(f"slowest ops at batch {graph.batch}", "time", "parameters", "scratch", box=SIMPLE_HEAD)
    for index in sorted(range(len(seconds)), key=lambda i: -seconds[i])[:_SLOWEST]:
        op = graph.ops[index]
        parameters = sum(graph.tensors[i].nbytes for i in op.reads if graph.tensors[i].kind == "parameter")
        table.add_row(
            op.name, milliseconds(seconds[index]), format_bytes(parameters), format_bytes(op.scratch_bytes)
        )
    return table
