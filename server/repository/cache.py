"""Inventory of the cache: the files of each archive, and their removal."""

import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cohabit.planner import cache_file
from cohabit.planner.errors import CohabitError, FormatError
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
    """By the first digits of the fingerprint."""
    others: set[Path]
    """Files that belong to no lowered archive, or to several."""
    fingerprints: dict[Path, str]
    """Fingerprint of the archive at each path when it was read."""

    @property
    def files(self) -> set[Path]:
        return self.others.union(*(archive.files for archive in self.lowered.values()))

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
        return set().union(*(archive.files for digits, archive in self.lowered.items() if digits not in used))

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
    for path in _named(cache / "profiles"):
        origins = _origins_of(path)
        if (owner := _owner(lowered, {origins.graph, *origins.graphs})) is None:
            others.add(path)
        else:
            owner.profiles.add(path)
            owner.graphs |= {profile.graph for profile in origins.profiles}
    for path in _named(cache / "plans"):
        if (owner := _owner(lowered, {_origins_of(path).graph})) is None:
            others.add(path)
        else:
            owner.plans.add(path)
    return CacheContents(lowered, others, fingerprints)


def _named(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.name))


def _origins_of(path: Path) -> _Origins:
    with suppress(FileNotFoundError, FormatError, msgspec.DecodeError):
        return _origins.decode(cache_file.read(path))
    return _Origins()


def _owner(lowered: dict[str, CachedArchive], graphs: set[str]) -> CachedArchive | None:
    """Return the archive of these graphs. A graph names its weights, so it belongs to one archive."""
    return next((archive for archive in lowered.values() if not graphs.isdisjoint(archive.graphs)), None)


def disk_bytes(files: Iterable[Path]) -> int:
    """Return the disk usage of files, which is below their length if they are sparse."""
    total = 0
    for path in files:
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


@dataclass
class Removal:
    """Removed files, and the errors of those that remain."""

    count: int = 0
    nbytes: int = 0
    errors: list[tuple[Path, OSError]] = field(default_factory=list)


def remove(files: Iterable[Path]) -> Removal:
    """Remove files. Their folders stay, because a running server creates its spill files there."""
    removal = Removal()
    for path in sorted(files):
        try:
            nbytes = disk_bytes([path])
            path.unlink()
        except FileNotFoundError:  # a server has replaced or removed it
            continue
        except OSError as error:
            removal.errors.append((path, error))
        else:
            removal.count += 1
            removal.nbytes += nbytes
    return removal
