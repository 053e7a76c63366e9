"""`cohabit export-bundle`: prepares a repository for one memory size, to be served on another machine."""

import argparse
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from cohabit.planner.errors import format_bytes
from cohabit.server.commands.planning.progress import SearchProgress
from cohabit.server.config.bundle import Bundle
from cohabit.server.config.config import BY_KEY
from cohabit.server.config.sources import add_flag, config_of, given
from cohabit.server.format import gap, make_table, milliseconds, print_table
from cohabit.server.repository.scan import scan

_EXAMPLES = """examples:
  cohabit export-bundle models --memory 64MiB -o bundle && cohabit serve bundle
  cohabit export-bundle models --memory 25% --link-bandwidth 90MB/s --no-pack-weights --batch-sizes 1 -o bundle

Weights are packed for this processor and this version of torch. --no-pack-weights makes a bundle for other processors.
"""
_SETTINGS = (
    "cache",
    "threads",
    "search",
    "batch_sizes",
    "shape_buckets",
    "weights",
    "compute_lanes",
    "link_bandwidth",
    "rates",
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Lower, measure and plan every model of a repository for one memory size, and write all that `cohabit serve`\n"
        "needs to a folder. It serves that folder without archives, worker processes or searches."
    )
    parser.epilog = _EXAMPLES
    parser.add_argument("repository", metavar="REPOSITORY", help="folder of NAME/VERSION/model.pt2")
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE",
        help="device memory for all models, as of `cohabit serve`: 64MiB, 82MB, or 25%% of the sum of their weights",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder for the bundle")
    store = BY_KEY["store"]
    parser.add_argument(
        "--store", choices=store.choices, default="file", help=f"{store.help} (default: %(default)s)"
    )
    parser.add_argument(
        "--pack-weights",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="prepack weights for oneDNN (CPU-specific; default: yes)",
    )
    for key in _SETTINGS:
        add_flag(parser, BY_KEY[key])


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Export a bundle, and print each model's memory and predicted latency."""
    needed = {"repository": options.repository, "memory": options.memory, "store": options.store}
    config = config_of({**needed, **given(options, _SETTINGS)})
    config = replace(config, engine="in-process", pack_weights=options.pack_weights)
    scan(config.repository)  # raises if there is none
    with SearchProgress(errors) as progress:
        progress.doing("starting torch")
        from cohabit.server.deploy.bundle import export

        def show(name: str, stage: str) -> None:
            progress.doing(f"{name}: {stage}")

        bundle = export(config, options.output, show)
    _show(bundle, options, out)
    return 0


def _show(bundle: Bundle, options: argparse.Namespace, out: Console) -> None:
    table = make_table(
        *("model", "weights", "partition", "predicted", "over resident"),
        left=("model",),
    )
    for model in bundle.models:
        table.add_row(
            model.name if model.version == 1 else f"{model.name} version {model.version}",
            format_bytes(model.weight_bytes),
            format_bytes(model.partition_bytes),
            milliseconds(model.latency_s),
            gap(model.latency_s, model.resident_s),
        )
    workspace = format_bytes(bundle.workspace_bytes)
    print_table(
        out,
        table,
        title=f"{format_bytes(bundle.memory_bytes)}, a workspace of {workspace} among them; predicted for this machine",
        total=f"serve it with: cohabit serve {options.output}",
    )
    total = format_bytes(sum(file.nbytes for file in bundle.files.values()))
    out.print(f"{options.output}: {len(bundle.files)} files, {total}, for {bundle.machine}", soft_wrap=True)
