"""`cohabit export-bundle`: prepares a repository for one memory size, to be served on another machine."""

import argparse
from dataclasses import replace

from rich.console import Console

from cohabit.planner.errors import format_bytes
from cohabit.server.config.bundle import Bundle
from cohabit.server.config.sources import config_of
from cohabit.server.tools.boards import BOARDS, Board
from cohabit.server.tools.flags import BUNDLING
from cohabit.server.tools.format import gap, make_table, milliseconds
from cohabit.server.tools.progress import SearchProgress


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Export a bundle, and print what each model takes and how long it is predicted to take."""
    given = {key: vars(options)[key] for key in BUNDLING if key in vars(options)}
    needed = {"repository": options.repository, "memory": options.memory, "store": options.store}
    config = config_of({**needed, **given})
    config = replace(config, engine="in-process")
    board = None if options.profile is None else BOARDS[options.profile]
    profile = "measured on the exporting machine" if board is None else f"scaled for {board.name}"
    with SearchProgress(errors) as progress:
        progress.doing("starting torch")
        from cohabit.server.deploy.bundle import export

        def show(name: str, stage: str) -> None:
            progress.doing(f"{name}: {stage}")

        adapt = None if board is None else board.scaled
        bundle = export(config, options.output, profile, adapt, show)
    if board is not None and bundle.memory_bytes > board.memory_bytes:
        memory, most = format_bytes(bundle.memory_bytes), format_bytes(board.memory_bytes)
        errors.print(f"cohabit: {memory} is more than the {most} of {board.name}; export again with less --memory")
    _show(bundle, board, options, out)
    return 0


def _show(bundle: Bundle, board: Board | None, options: argparse.Namespace, out: Console) -> None:
    where = "this machine" if board is None else f"{board.name}, scaled from a profile of this machine"
    table = make_table(
        *("model", "weights", "partition", "predicted", "over resident"),
        left=("model",),
        title=f"{format_bytes(bundle.memory_bytes)}, a workspace of {format_bytes(bundle.workspace_bytes)} among them;"
        f" predicted for {where}",
        caption=f"serve it with: cohabit serve {options.output}",
    )
    for model in bundle.models:
        table.add_row(
            model.name if model.version == 1 else f"{model.name} version {model.version}",
            format_bytes(model.weight_bytes),
            format_bytes(model.partition_bytes),
            milliseconds(model.latency_s),
            gap(model.latency_s, model.resident_s),
        )
    out.print(table)
    total = format_bytes(sum(file.nbytes for file in bundle.files.values()))
    out.print(f"{options.output}: {len(bundle.files)} files, {total}, for {bundle.machine}", soft_wrap=True)
