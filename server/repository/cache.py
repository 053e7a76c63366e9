"""Inventory of the cache: the files of each archive, and their removal."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cohabit.planner import cache_file
from cohabit.planner.errors import CohabitError, FormatError
from cohabit.runtime import pieces
from cohabit.server.errors import RepositoryError

_NAME = re.compile(r"(cuda-)?[0-9a-f]{32,64}(\.division|\.ladders)?\.json", re.ASCII)
"""File names of profiles, plans and ladders. Others, such as those of a folder given by mistake, are not touched."""
_PREFIX_DIGITS = 32
"""Number of digits of an archive's fingerprint at the start of names in the cache."""


class _Origins(msgspec.Struct, frozen=True):
    """The graphs of a cached profile, measurement or plan. Other fields are not read."""

    graph: str = ""
    graphs: tuple[str, ...] = ()
    """Fingerprints before scratch was measured; `profiles` name the graphs with measured scratch."""
    profiles: tuple["_Origins", ...] = ()


_origins = msgspec.json.Decoder(_Origins)


@dataclass
class CachedArchive:
    """Cached files of one archive."""

    digits: str
    """First digits of the archive's fingerprint."""
    names: set[str] = field(default_factory=set)
    lowered: set[Path] = field(default_factory=set)
    graphs: set[str] = field(default_factory=set)
    profiles: set[Path] = field(default_factory=set)
    plans: set[Path] = field(default_factory=set)
    notes: set[Path] = field(default_factory=set)

    @property
    def files(self) -> set[Path]:
        return self.lowered | self.profiles | self.plans | self.notes

    @property
    def last_use_s(self) -> float:
        """Seconds since the epoch. Most file systems record reads once a day at most, and some never."""
        times = [0.0]
        for path in self.lowered:
            with suppress(FileNotFoundError):
                status = path.stat()
                read_s = status.st_atime if path.suffix == ".bin" else 0.0  # the inventory itself reads the others
                times.append(max(status.st_mtime, read_s))
        return max(times)


@dataclass
class CacheContents:
    lowered: dict[str, CachedArchive]
    """By the first digits of the fingerprint. Archives that differ in their weights only share profiles and plans."""
    others: set[Path]
    """Files that belong to no lowered archive, or to all."""
    packs: set[Path]
    """Files with the weights that several archives may share, and their index."""
    fingerprints: dict[Path, str]
    """Fingerprint of the archive at each path when it was read."""

    @property
    def files(self) -> set[Path]:
        return self.others.union(self.packs, *(archive.files for archive in self.lowered.values()))

    def of_archive(self, path: Path) -> CachedArchive:
        """Return the files of an archive, which may be none. Raises CohabitError if it cannot be read."""
        from cohabit.runtime.lowering.archive_file import fingerprint

        digits = fingerprint(path)[:_PREFIX_DIGITS]
        return self.lowered.get(digits, CachedArchive(digits))

    def unused_by(self, repository: Path, on_damaged: Callable[[Path, CohabitError], None]) -> set[Path]:
        """Return the files of archives that no version in a repository has.

        A damaged archive keeps the files that were made of it, and is given to `on_damaged`. Raises RepositoryError if
        these files are unknown.
        """
        used = {fingerprint[:_PREFIX_DIGITS] for fingerprint in self._archives_of(repository, on_damaged)}
        unused = {digits for digits in self.lowered if digits not in used}
        kept: set[Path] = set().union(*(a.files for digits, a in self.lowered.items() if digits not in unused))
        return set().union(*(self.lowered[digits].files for digits in unused)) - kept

    def _archives_of(self, repository: Path, on_damaged: Callable[[Path, CohabitError], None]) -> set[str]:
        """Return the fingerprints of the archives of all versions in a repository."""
        from cohabit.runtime.lowering.archive_file import fingerprint
        from cohabit.server.repository.scan import scan
        from cohabit.server.repository.sources import ModelSource

        paths = {source.path for source in scan(repository) if isinstance(source, ModelSource)}
        paths |= {path for path in repository.resolve().glob("*/*/*.pt2") if path.is_file()}
        found: set[str] = set()
        for path in sorted(paths):
            try:
                found.add(fingerprint(path))
            except CohabitError as error:
                if path not in self.fingerprints:
                    raise RepositoryError(
                        f"{path}: {error}; its cached files cannot be identified, and nothing was removed. Repair or"
                        " remove it"
                    ) from error
                on_damaged(path, error)
                found.add(self.fingerprints[path])
        return found


def read_cache(cache: Path) -> CacheContents:
    """Assign the files of a cache to the archives that they were made of."""
    from cohabit.runtime.lowering.archive_file import noted_archives, notes_of  # torch takes a second to import
    from cohabit.runtime.lowering.lower import folders_of, graphs_of

    lowered: dict[str, CachedArchive] = {}
    for folder, digits in folders_of(cache / "weights").items():
        files = {path for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
        if files:  # `rm` leaves empty folders
            archive = lowered.setdefault(digits, CachedArchive(digits))
            archive.lowered |= files
            archive.graphs |= graphs_of(folder)
    others: set[Path] = set()
    fingerprints: dict[Path, str] = {}
    for note, (path, fingerprint) in noted_archives(notes_of(cache / "weights")).items():
        fingerprints[path] = fingerprint
        if (known := lowered.get(fingerprint[:_PREFIX_DIGITS])) is None:
            others.add(note)
        else:
            known.notes.add(note)
            known.names.add(path.parent.parent.name if path.parent.name.isdecimal() else path.stem)
    owners: dict[str, list[CachedArchive]] = {}
    for archive in lowered.values():
        for graph in archive.graphs:
            owners.setdefault(graph, []).append(archive)
    for path in _named(cache / "profiles"):
        origins = _origins_of(path)
        of_profile = _owners(owners, {origins.graph, *origins.graphs})
        for owner in of_profile:
            owner.profiles.add(path)
            for profile in origins.profiles:
                owners.setdefault(profile.graph, []).append(owner)
        if not of_profile:
            others.add(path)
    for path in _named(cache / "plans"):
        of_plan = _owners(owners, {_origins_of(path).graph})
        for owner in of_plan:
            owner.plans.add(path)
        if not of_plan:
            others.add(path)
    packs = set((cache / "weights" / pieces.FOLDER).glob("[!.]*"))
    return CacheContents(lowered, others, packs, fingerprints)


def _named(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.name))


def _origins_of(path: Path) -> _Origins:
    with suppress(FileNotFoundError, FormatError, msgspec.DecodeError):
        return _origins.decode(cache_file.read(path))
    return _Origins()


def _owners(owners: dict[str, list[CachedArchive]], graphs: set[str]) -> list[CachedArchive]:
    """Return the archives of any of these graphs."""
    return [archive for graph in graphs for archive in owners.get(graph, ())]


def disk_bytes(files: Iterable[Path]) -> int:
    """Return the disk usage of files, which is below their length if they are sparse. A file with two names counts
    once."""
    nbytes: dict[tuple[int, int], int] = {}
    for path in files:
        with suppress(FileNotFoundError):
            status = path.stat()
            nbytes[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(nbytes.values())


@dataclass
class Removal:
    """Removed files, and the errors of those that remain."""

    count: int = 0
    nbytes: int = 0
    errors: list[tuple[Path, OSError]] = field(default_factory=list)


def remove(cache: Path, files: Iterable[Path]) -> Removal:
    """Remove files, then weights that no model of the cache has.

    Folders stay, because a running server creates its spill files there.
    """
    from cohabit.runtime.lowering.weights import sweep

    removal = Removal()
    for path in sorted(files):
        try:
            nbytes = disk_bytes([path]) if path.stat().st_nlink == 1 else 0
            path.unlink()
        except FileNotFoundError:  # a server has replaced or removed it
            continue
        except OSError as error:
            removal.errors.append((path, error))
        else:
            removal.count += 1
            removal.nbytes += nbytes
    try:
        removal.nbytes += sweep(cache / "weights")
    except OSError as error:
        removal.errors.append((cache / "weights" / pieces.FOLDER, error))
    return removal
