"""`cohabit cache`: lists and removes each model's cached files, and has a model measured again."""

import argparse
import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console

from cohabit.planner import cache_file
from cohabit.planner.errors import CohabitError, FormatError, format_bytes
from cohabit.server.commands import EXIT_FAILED
from cohabit.server.commands.planning.subject import MODEL_HELP
from cohabit.server.config.config import BY_KEY, cache_of
from cohabit.server.config.sources import add_flag, config_of, given
from cohabit.server.errors import RepositoryError
from cohabit.server.format import make_table, print_table

_EXAMPLES = """examples:
  cohabit cache ls
  cohabit cache rm --unused-by models --yes
  cohabit cache remeasure models/resnet50

A running server may use the cache meanwhile. What is removed is missing only at its next start, load or engine
restart, which lowers, measures and plans again what it lacks; the disk space of a weights file is free once no server
has it open. Files that a running server writes later are kept.
"""
_NAME = re.compile(r"(cuda-)?[0-9a-f]{32,64}(\.division)?\.json", re.ASCII)
"""File names of profiles and plans. Others, such as those of a folder given by mistake, are not touched."""
_PREFIX_DIGITS = 32
"""Number of digits of an archive's fingerprint at the start of names in the cache."""


class _Origins(msgspec.Struct, frozen=True):
    """The graphs of a cached profile, measurement or plan. Other fields are not read."""

    graph: str = ""
    graphs: tuple[str, ...] = ()
    """Graphs as lowered. Those of a GPU measurement's profiles have measured scratch instead."""
    profiles: tuple["_Origins", ...] = ()


_origins = msgspec.json.Decoder(_Origins)


@dataclass
class _Holding:
    """Cached files of one archive."""

    names: set[str] = field(default_factory=set)
    lowered: set[Path] = field(default_factory=set)
    graphs: set[str] = field(default_factory=set)
    profiles: set[Path] = field(default_factory=set)
    plans: set[Path] = field(default_factory=set)
    notes: set[Path] = field(default_factory=set)

    @property
    def files(self) -> set[Path]:
        return self.lowered | self.profiles | self.plans | self.notes

    def title(self, archive: str) -> str:
        return f"{', '.join(sorted(self.names)) or 'unknown name'} (archive {archive[:12]})"


@dataclass
class _CacheContents:
    """Holdings by the first digits of the archive's fingerprint, and files that belong to no lowered model."""

    holdings: dict[str, _Holding]
    others: set[Path]
    archives: dict[Path, str]
    """Fingerprint of the archive at each path when it was read."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "List what the cache has of each model, remove it, or have a model measured again."
    parser.epilog = _EXAMPLES
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("ls", help="list the lowered archives, with their size and last use")
    removal = actions.add_parser("rm", help="remove unused cache entries, or all")
    chosen = removal.add_mutually_exclusive_group(required=True)
    chosen.add_argument(
        "--unused-by",
        type=Path,
        metavar="REPOSITORY",
        help="remove entries of archives that are not in this repository in any version",
    )
    chosen.add_argument("--all", action="store_true", help="remove every lowered model, profile and plan")
    removal.add_argument("--yes", action="store_true", help="remove without asking")
    again = actions.add_parser(
        "remeasure", help="delete a model's profiles of all devices, so that the next start measures it again"
    )
    again.add_argument("model", type=Path, metavar="MODEL", help=MODEL_HELP)
    for action in (listing, removal, again):
        add_flag(action, BY_KEY["cache"])


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Raises CohabitError."""
    config = config_of({"repository": ".", "memory": "1B", **given(options, ("cache",))})
    cache = cache_of(config)
    with errors.status("reading the cache"):
        contents = _read(cache)
    if options.action == "ls":
        return _list(cache, contents, out)
    if options.action == "remeasure":
        return _remeasure(options.model, contents, out, errors)
    doomed = _everything(contents) if options.all else _unused(options.unused_by, contents, errors)
    for archive, holding in sorted(contents.holdings.items()):
        if holding.lowered and holding.lowered <= doomed:
            out.print(f"{holding.title(archive)}: {format_bytes(_bytes(holding.lowered))}", soft_wrap=True)
    what = f"{len(doomed)} files of {cache}, {format_bytes(_bytes(doomed))}"
    out.print(f"to be removed: {what}", soft_wrap=True)
    if not doomed:
        return 0
    if not options.yes and not (sys.stdin.isatty() and out.input("remove them? [y/N] ").strip().lower() == "y"):
        errors.print("cohabit: nothing was removed; confirm with y, or give --yes")
        return EXIT_FAILED
    return _remove(doomed, out, errors)


def _read(cache: Path) -> _CacheContents:
    from cohabit.runtime.lowering.archive_file import noted_archives, notes_of  # torch takes a second to import
    from cohabit.runtime.lowering.lower import folders_of, graphs_of

    holdings: dict[str, _Holding] = {}
    for folder, archive in folders_of(cache / "weights").items():
        files = {path for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
        if files:  # `rm` leaves empty folders
            holding = holdings.setdefault(archive, _Holding())
            holding.lowered |= files
            holding.graphs |= graphs_of(folder)
    others: set[Path] = set()
    archives: dict[Path, str] = {}
    for note, (path, archive) in noted_archives(notes_of(cache / "weights")).items():
        archives[path] = archive
        if (known := holdings.get(archive[:_PREFIX_DIGITS])) is None:
            others.add(note)
        else:
            known.notes.add(note)
            known.names.add(path.parent.parent.name if path.parent.name.isdecimal() else path.stem)
    for path in _named(cache / "profiles"):
        origins = _origins_of(path)
        if (owner := _owner(holdings, {origins.graph, *origins.graphs})) is None:
            others.add(path)
        else:
            owner.profiles.add(path)
            owner.graphs |= {profile.graph for profile in origins.profiles}
    for path in _named(cache / "plans"):
        if (owner := _owner(holdings, {_origins_of(path).graph})) is None:
            others.add(path)
        else:
            owner.plans.add(path)
    return _CacheContents(holdings, others, archives)


def _named(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.json") if _NAME.fullmatch(path.name))


def _origins_of(path: Path) -> _Origins:
    with suppress(FileNotFoundError, FormatError, msgspec.DecodeError):
        return _origins.decode(cache_file.read(path))
    return _Origins()


def _owner(holdings: dict[str, _Holding], graphs: set[str]) -> _Holding | None:
    """Return the holding of these graphs' archive. A graph names its weights, so it belongs to one archive."""
    return next((holding for holding in holdings.values() if not graphs.isdisjoint(holding.graphs)), None)


def _list(cache: Path, contents: _CacheContents, out: Console) -> int:
    table = make_table(
        *("model", "archive", "lowered", "profiles", "plans", "last use"),
        left=("model", "archive"),
    )
    for archive, holding in sorted(contents.holdings.items(), key=lambda item: -_bytes(item[1].lowered)):
        table.add_row(
            ", ".join(sorted(holding.names)) or "?",
            archive[:12],
            format_bytes(_bytes(holding.lowered)),
            str(len(holding.profiles)),
            str(len(holding.plans)),
            _last_use(holding.lowered),
        )
    print_table(out, table, total=f"{cache}: {format_bytes(_bytes(_everything(contents)))} in all")
    if contents.others:
        size = format_bytes(_bytes(contents.others))
        out.print(
            f"{len(contents.others)} other files, {size}: of several models, or of none listed", soft_wrap=True
        )
    return 0


def _last_use(files: Iterable[Path]) -> str:
    """Return a date, not a time: most file systems record reads once a day at most, and some never."""
    times = [0.0]
    for path in files:
        with suppress(FileNotFoundError):
            status = path.stat()
            read_s = status.st_atime if path.suffix == ".bin" else 0.0  # this command itself reads the others
            times.append(max(status.st_mtime, read_s))
    return time.strftime("%Y-%m-%d", time.localtime(max(times)))


def _unused(repository: Path, contents: _CacheContents, errors: Console) -> set[Path]:
    """Return the files of archives that are not in a repository. Raises RepositoryError."""
    used = {archive[:_PREFIX_DIGITS] for archive in _archives_of(repository, contents, errors)}
    unused = [holding.files for archive, holding in contents.holdings.items() if archive not in used]
    return set().union(*unused)


def _archives_of(repository: Path, contents: _CacheContents, errors: Console) -> set[str]:
    """Return the fingerprints of the archives of all versions in a repository. Raises RepositoryError."""
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
            if path not in contents.archives:
                raise RepositoryError(
                    f"{path}: {error}; what was made of it is not known, so nothing is removed. Repair or remove it"
                ) from error
            errors.print(f"cohabit: {path}: {error}; what was made of it is kept", markup=False, soft_wrap=True)
            found.add(contents.archives[path])
    return found


def _remeasure(model: Path, contents: _CacheContents, out: Console, errors: Console) -> int:
    from cohabit.runtime.lowering.archive_file import fingerprint
    from cohabit.server.repository.scan import find

    source = find(model)
    holding = contents.holdings.get(fingerprint(source.path)[:_PREFIX_DIGITS], _Holding())
    if not holding.profiles:
        out.print(f"the cache has no profiles of {source.name}; the next start measures it", soft_wrap=True)
        return 0
    status = _remove(holding.profiles, out, errors)
    out.print(f"the next start measures {source.name}, and plans it for what it finds", soft_wrap=True)
    return status


def _everything(contents: _CacheContents) -> set[Path]:
    return contents.others.union(*(holding.files for holding in contents.holdings.values()))


def _bytes(files: Iterable[Path]) -> int:
    """Return the disk usage of files, which is below their length if they are sparse."""
    total = 0
    for path in files:
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def _remove(files: set[Path], out: Console, errors: Console) -> int:
    """Remove files. Their folders stay, because a running server creates its spill files there."""
    removed = 0
    removed_bytes = 0
    failed = False
    for path in sorted(files):
        try:
            nbytes = _bytes([path])
            path.unlink()
        except FileNotFoundError:  # a server has replaced or removed it
            continue
        except OSError as error:
            errors.print(f"cohabit: {path} cannot be removed: {error.strerror}", markup=False, soft_wrap=True)
            failed = True
        else:
            removed += 1
            removed_bytes += nbytes
    out.print(f"removed {removed} files, {format_bytes(removed_bytes)}", soft_wrap=True)
    return EXIT_FAILED if failed else 0
