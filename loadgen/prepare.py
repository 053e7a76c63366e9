"""Write a repository of zoo models in Triton's layout: NAME/1/model.pt2."""

import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from loadgen.errors import UsageError
from loadgen.sizes import weight_bytes
from loadgen.zoo import ZOO

_NOTE = "recipe.json"
"""File inside each archive that says what was built."""


class Recipe(msgspec.Struct, frozen=True):
    """A model of the repository: its name there, and what it is built from."""

    name: str
    entry: str
    seed: int
    version: int = 1
    """Raised when the zoo changes in a way that makes files from before it stale."""


@dataclass(frozen=True, slots=True)
class Prepared:
    recipe: Recipe
    path: Path
    weight_bytes: int
    was_there: bool


def recipes(count: int, entries: Sequence[str] = (), seed: int = 0) -> list[Recipe]:
    """Say which models a repository of `count` has.

    With `entries`, these are taken in turn; an entry that is taken more than once gives models NAME_00, NAME_01..
    with other weights each. Without, all are rankers except one sentence embedder with real weights.
    """
    if count < 1:
        raise UsageError(f"--models {count}: a repository has at least 1 model")
    if entries:
        return _in_turn(count, entries, seed)
    minilm = [Recipe("minilm", "minilm_short", seed)] if count > 1 else []
    return [Recipe(f"ranker_{k:02d}", "ranker", seed + k) for k in range(count - len(minilm))] + minilm


def _in_turn(count: int, entries: Sequence[str], seed: int) -> list[Recipe]:
    unknown = sorted(set(entries) - set(ZOO))
    if unknown:
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
) -> Iterator[Prepared]:
    """Build what is not there yet, one model at a time; each file appears complete or not at all."""
    for recipe in chosen:
        path = repository / recipe.name / "1" / "model.pt2"
        was_there = not force and is_intact(path, recipe)
        if not was_there:
            on_build(recipe)
            _build(recipe, path)
        yield Prepared(recipe, path, weight_bytes(path), was_there)


def is_intact(path: Path, recipe: Recipe) -> bool:
    """Say whether `path` is a complete archive that was built from `recipe`."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(f"{path.stem}/extra/{_NOTE}") == msgspec.json.encode(recipe)
    except (OSError, KeyError, zipfile.BadZipFile):
        return False


def _build(recipe: Recipe, path: Path) -> None:
    from loadgen.zoo.exporting import export_model, save_model  # torch takes seconds to import

    model, inputs = ZOO[recipe.entry].build(recipe.seed)
    save_model(export_model(model, inputs), path, {_NOTE: msgspec.json.encode(recipe).decode()})
