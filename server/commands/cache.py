"""`cohabit cache`: lists and removes each model's cached files, and has a model measured again."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from cohabit.planner.errors import format_bytes
from cohabit.server.commands import EXIT_FAILED
from cohabit.server.commands.planning.flags import MODEL_HELP
from cohabit.server.config.config import BY_KEY, cache_of
from cohabit.server.config.sources import add_flag, config_of, given
from cohabit.server.format import make_table, print_table
from cohabit.server.repository.cache import CacheContents, disk_bytes, read_cache, remove

_EXAMPLES = """examples:
  cohabit cache ls
  cohabit cache rm --unused-by models --yes
  cohabit cache remeasure models/resnet50

A running server may use the cache meanwhile. What is removed is missing only at its next start, load or engine
restart, which lowers, measures and plans again what it lacks; the disk space of a weights file is free once no server
has it open. Files that a running server writes later are kept.
"""


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
        contents = read_cache(cache)
    if options.action == "ls":
        return _list(cache, contents, out)
    if options.action == "remeasure":
        return _remeasure(cache, options.model, contents, out, errors)
    doomed = contents.files if options.all else _unused(options.unused_by, contents, errors)
    for archive in sorted(contents.lowered.values(), key=lambda one: one.digits):
        if archive.lowered and archive.lowered <= doomed:
            names = ", ".join(sorted(archive.names)) or "unknown name"
            size = format_bytes(disk_bytes(archive.lowered))
            out.print(f"{names} (archive {archive.digits[:12]}): {size}", soft_wrap=True)
    out.print(f"to be removed: {len(doomed)} files of {cache}, {format_bytes(disk_bytes(doomed))}", soft_wrap=True)
    if not doomed:
        return 0
    if not options.yes and not (sys.stdin.isatty() and out.input("remove them? [y/N] ").strip().lower() == "y"):
        errors.print("cohabit: nothing was removed; confirm with y, or give --yes")
        return EXIT_FAILED
    return _remove(cache, doomed, out, errors)


def _list(cache: Path, contents: CacheContents, out: Console) -> int:
    table = make_table("model", "archive", "lowered", "profiles", "plans", "last use", left=("model", "archive"))
    for archive in sorted(contents.lowered.values(), key=lambda one: (-disk_bytes(one.lowered), one.digits)):
        table.add_row(
            ", ".join(sorted(archive.names)) or "?",
            archive.digits[:12],
            format_bytes(disk_bytes(archive.lowered)),
            str(len(archive.profiles)),
            str(len(archive.plans)),
            time.strftime("%Y-%m-%d", time.localtime(archive.last_use_s)),
        )
    print_table(out, table, total=f"{cache}: {format_bytes(disk_bytes(contents.files))} in all")
    if contents.others:
        size = format_bytes(disk_bytes(contents.others))
        out.print(f"{len(contents.others)} other files, {size}: of all models, or of none listed", soft_wrap=True)
    return 0


def _unused(repository: Path, contents: CacheContents, errors: Console) -> set[Path]:
    def keep(path: Path, error: Exception) -> None:
        errors.print(f"cohabit: {path}: {error}; what was made of it is kept", markup=False, soft_wrap=True)

    return contents.unused_by(repository, keep)


def _remeasure(cache: Path, model: Path, contents: CacheContents, out: Console, errors: Console) -> int:
    from cohabit.server.repository.scan import find

    source = find(model)
    profiles = contents.of_archive(source.path).profiles
    if not profiles:
        out.print(f"the cache has no profiles of {source.name}; the next start measures it", soft_wrap=True)
        return 0
    status = _remove(cache, profiles, out, errors)
    out.print(f"the next start measures {source.name}, and plans it for what it finds", soft_wrap=True)
    return status


def _remove(cache: Path, files: Iterable[Path], out: Console, errors: Console) -> int:
    removal = remove(cache, files)
    for path, error in removal.errors:
        errors.print(f"cohabit: {path} cannot be removed: {error.strerror}", markup=False, soft_wrap=True)
    out.print(f"removed {removal.count} files, {format_bytes(removal.nbytes)}", soft_wrap=True)
    return EXIT_FAILED if removal.errors else 0
