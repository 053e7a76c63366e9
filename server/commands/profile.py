"""`cohabit profile`: measures a model's ops on a device, and the device's link."""

import argparse

from rich.console import Console

from cohabit.planner.errors import format_bytes
from cohabit.planner.profile import NOISY, Link
from cohabit.server.commands.planning.flags import add_subject
from cohabit.server.commands.planning.measured import measured_graphs
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.config.sources import typed
from cohabit.server.config.values import batches
from cohabit.server.format import disturbed, make_table, milliseconds

_SLOWEST = 5


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure a model on a device: time per op, bandwidth of the link in both directions, and how much concurrent\n"
        "copies and ops slow each other down. The cache keeps the measurements for the other commands."
    )
    add_subject(parser, "N,N,...", typed(batches), "batch sizes to measure (default: 1)")


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Measure every bucket, or read earlier measurements from the cache, and print tables."""
    with SearchProgress(errors) as progress:
        measured = measured_graphs(options, progress.doing)
    first = measured[0]
    noise = max(each.profile.noise for each in measured)
    if noise > NOISY:
        errors.print(f"cohabit: {disturbed(noise)}", soft_wrap=True)
    out.print(f"{first.graph.name} on {first.profile.device}")
    table = make_table("batch", "resident", "swap in", "swap out", "ops during copies", "copies during ops")
    for each in measured:
        profile = each.profile
        table.add_row(
            str(each.graph.bucket),
            milliseconds(profile.compute_s),
            _link(profile.swap_in),
            _link(profile.swap_out),
            f"{profile.compute_slowdown:.2f}x as long",
            f"{profile.swap_slowdown:.2f}x as long",
        )
    out.print(table)
    graph, seconds = first.graph, first.profile.op_seconds
    heading = f"slowest ops at batch {graph.bucket}"
    table = make_table(heading, "time", "parameters", "scratch", left=(heading,))
    for index in sorted(range(len(seconds)), key=lambda i: -seconds[i])[:_SLOWEST]:
        op = graph.ops[index]
        parameters = sum(graph.tensors[i].nbytes for i in op.reads if graph.tensors[i].kind == "parameter")
        table.add_row(
            op.name, milliseconds(seconds[index]), format_bytes(parameters), format_bytes(op.scratch_bytes)
        )
    out.print(table)
    return 0


def _link(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.2f} GB/s after {link.latency_s * 1e6:.1f} us"
