"""How preparing a repository looks on a terminal."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from loadgen.prepare import Prepared, Recipe, prepare
from loadgen.sizes import in_mib
from loadgen.zoo import ZOO


def prepare_visibly(repository: Path, chosen: Sequence[Recipe], force: bool, console: Console) -> list[Prepared]:
    """Prepare the models with a progress bar, which goes away when all are there."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing models", total=len(chosen))

        def on_build(recipe: Recipe) -> None:
            progress.update(task, description=f"building {recipe.name}")

        prepared = []
        for one in prepare(repository, chosen, force, on_build):
            prepared.append(one)
            progress.advance(task)
    return prepared


def print_repository(repository: Path, prepared: Sequence[Prepared], console: Console) -> None:
    table = Table(title=str(repository), title_justify="left")
    for heading, justify in (("model", "left"), ("built from", "left"), ("seed", "right"), ("weights", "right")):
        table.add_column(heading, justify="right" if justify == "right" else "left")
    table.add_column("")
    for one in prepared:
        recipe = one.recipe
        state = "was there" if one.was_there else "built"
        table.add_row(recipe.name, recipe.entry, str(recipe.seed), in_mib(one.weight_bytes), state)
    table.add_section()
    table.add_row("all", "", "", in_mib(sum(one.weight_bytes for one in prepared)), "", style="bold")
    console.print(table)


def print_zoo(console: Console) -> None:
    table = Table(title="Models", title_justify="left")
    table.add_column("name")
    table.add_column("parameters", justify="right")
    table.add_column("weights", justify="right")
    table.add_column("description")
    for entry in ZOO.values():
        weights = "real" if entry.real_weights else "random"
        size = in_mib(entry.parameter_bytes)
        table.add_row(entry.name, f"{entry.parameters:,}", size, f"{entry.description} ({weights} weights)")
    console.print(table)
