"""Parts by name, imported on first use: the core's, those of our own wings, and those of installed packages.

A wing is a folder that the core does not import. Its module `wing` lists its parts by group, and imports nothing heavy.
A package lists its parts as entry points in its pyproject.toml:

    [project.entry-points."cohabit.searchers"]
    mine = "mypackage.search:MySearcher"

Our own wings are found by their modules instead of entry points: an installation's metadata does not change when a
folder is removed or a part is added to a checkout, and a checkout on PYTHONPATH has none.
"""

from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from typing import Any, NamedTuple

WINGS = (
    "server.importing",
    "server.capacity",
    "server.scale",
    "planner.papers",
    "runtime.shared_region",
    "runtime.training",
    "runtime.tiling",
)
"""Folders of wings, in the order in which their parts are listed."""


class Part(NamedTuple):
    path: str
    """`module` or `module:attribute`."""
    about: str = ""
    """One line for help."""


Parts = Mapping[str, Mapping[str, Part]]
"""Parts by group and name."""


class PartRegistry(Mapping[str, Any]):
    """The parts of a group by name; `registry[name]` imports one. The core's names win, then the wings'.

    Wings are looked for only if a name is not the core's: a server with the core's parts imports no wing.
    """

    def __init__(self, group: str, core: Mapping[str, Part]) -> None:
        self._group = group
        self._core = core

    @cached_property
    def own(self) -> dict[str, Part]:
        """The core's parts and the wings'. Other packages' take a tenth of a second to look for."""
        found = dict(self._core)
        for parts in wings():
            found |= {name: part for name, part in parts.get(self._group, {}).items() if name not in found}
        return found

    @cached_property
    def all(self) -> dict[str, Part]:
        """Every part: also those of installed packages."""
        from importlib.metadata import entry_points

        found = dict(self.own)
        for point in entry_points(group=self._group):
            package = point.module if point.dist is None else point.dist.name
            found.setdefault(point.name, Part(point.value, f"from the package {package}"))
        return found

    def __getitem__(self, name: str) -> Any:
        part = self._core.get(name) or self.own.get(name) or self.all[name]
        module, _, attribute = part.path.partition(":")
        return getattr(import_module(module), attribute) if attribute else import_module(module)

    def __contains__(self, name: object) -> bool:
        return name in self._core or name in self.own or name in self.all

    def __iter__(self) -> Iterator[str]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)


@cache
def wings() -> tuple[Parts, ...]:
    """Return the parts of each wing whose folder is there."""
    found = []
    for wing in WINGS:
        try:
            found.append(import_module(f"cohabit.{wing}.wing").PARTS)
        except ModuleNotFoundError as error:
            if error.name is None or not f"cohabit.{wing}.wing".startswith(error.name):
                raise
    return tuple(found)
