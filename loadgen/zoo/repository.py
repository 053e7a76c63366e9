"""Writes a repository of zoo models in Triton's layout, NAME/1/model.pt2."""

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cohabit.loadgen.errors import UsageError
from cohabit.loadgen.zoo import ZOO

_NOTE = "recipe.json"
"""File inside each archive with its `Recipe`."""


class Recipe(msgspec.Struct, frozen=True):
    """A model of the repository: its name there, and its zoo entry, seed and version."""

    name: str
    entry: str
    """Name in the zoo."""
    seed: int
    version: int = 1
    """Incremented when a change to the zoo makes older files stale."""


@dataclass(frozen=True, slots=True)
class PreparedModel:
    recipe: Recipe
    path: Path
    weight_bytes: int
    was_there: bool


def recipes(count: int, entries: Sequence[str] = (), seed: int = 0) -> list[Recipe]:
    """Return the recipes of a repository with `count` models.

    `entries` are taken in turn; an entry taken more than once gives models NAME_00, NAME_01.. with different weights.
    Without entries, all are rankers except one sentence embedder with real weights.
    """
    if count < 1:
        raise UsageError(f"--models {count}: a repository has at least 1 model")
    if not entries:
        minilm = [Recipe("minilm", "minilm_short", seed)] if count > 1 else []
        return [Recipe(f"ranker_{k:02d}", "ranker", seed + k) for k in range(count - len(minilm))] + minilm
    if unknown := sorted(set(entries) - set(ZOO)):
        raise UsageError(f"--zoo: no model {', '.join(unknown)}; there are {', '.join(ZOO)}")
    taken = [entries[k % len(entries)] for k in range(count)]
    total, seen = Counter(taken), Counter[str]()
    chosen = []
    for entry in taken:
        name = entry if total[entry] == 1 else f"{entry}_{seen[entry]:02d}"
        chosen.append(Recipe(name, entry, seed + seen[entry]))
        seen[entry] += 1
    return chosen


def prepare(
    repository: Path,
    chosen: Sequence[Recipe],
    force: bool = False,
    on_build: Callable[[Recipe], None] = lambda _: None,
) -> Iterator[PreparedModel]:
    """Build the missing models one at a time. Each file is written atomically."""
    for recipe in chosen:
        path = repository / recipe.name / "1" / "model.pt2"
        was_there = not force and is_intact(path, recipe)
        if not was_there:
            on_build(recipe)
            _build(recipe, path)
        yield PreparedModel(recipe, path, weight_bytes(path), was_there)


def prepare_visibly(
    repository: Path, chosen: Sequence[Recipe], force: bool, console: Console
) -> list[PreparedModel]:
    """Prepare the models with a progress bar, which disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    prepared = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing models", total=len(chosen))
        for model in prepare(
            repository, chosen, force, lambda recipe: progress.update(task, description=f"building {recipe.name}")
        ):
            prepared.append(model)
            progress.advance(task)
    return prepared


def is_intact(path: Path, recipe: Recipe) -> bool:
    """Whether `path` is a complete archive built from `recipe`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{path.stem}/extra/{_NOTE}") == msgspec.json.encode(recipe)
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def weight_bytes(path: Path) -> int:
    """Return the bytes of the weights in a `.pt2` archive, without reading them."""
    with zipfile.ZipFile(path) as archive:
        return sum(i.file_size for i in archive.infolist() if "/data/weights/weight_" in i.filename)


def print_repository(repository: Path, prepared: Sequence[PreparedModel], console: Console) -> None:
    table = Table()
    for heading in ("model", "built from", "seed", "weights", ""):
        table.add_column(heading, justify="right" if heading in ("seed", "weights") else "left")
    for model in prepared:
        recipe, state = model.recipe, "kept" if model.was_there else "built"
        table.add_row(recipe.name, recipe.entry, str(recipe.seed), _in_mib(model.weight_bytes), state)
    table.add_section()
    table.add_row("all", "", "", _in_mib(sum(model.weight_bytes for model in prepared)), "", style="bold")
    console.print(str(repository), style="italic", markup=False, soft_wrap=True)
    console.print(table)


def print_zoo(console: Console) -> None:
    table = Table()
    for heading in ("name", "parameters", "weights", "description"):
        table.add_column(heading, justify="right" if heading in ("parameters", "weights") else "left")
    for entry in ZOO.values():
        weights = "real" if entry.real_weights else "random"
        size = _in_mib(entry.parameter_bytes)
        table.add_row(entry.name, f"{entry.parameters:,}", size, f"{entry.description} ({weights} weights)")
    console.print(table)


def _build(recipe: Recipe, path: Path) -> None:
    from cohabit.loadgen.zoo.exporting import export_model, save_model  # torch takes seconds to import

    model, inputs = ZOO[recipe.entry].build(recipe.seed)
    save_model(export_model(model, inputs), path, {_NOTE: msgspec.json.encode(recipe).decode()})


def _in_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
