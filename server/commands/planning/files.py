"""Files of plans, graphs and profiles: names them, and finds a plan's graph and profile."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import cohabit.planner.graph
import cohabit.planner.plan
import cohabit.planner.profile
from cohabit.planner.cache_file import replacing
from cohabit.planner.errors import CohabitError, FingerprintMismatch, FormatError
from cohabit.planner.graph import Graph
from cohabit.planner.plan import Plan
from cohabit.planner.profile import Profile
from cohabit.server.errors import ConfigError

_T = TypeVar("_T", Graph, Profile)
_Decoded = TypeVar("_Decoded", Plan, Graph, Profile)

_PLAN, _GRAPH, _PROFILE = ".plan.json", ".graph.json", ".profile.json"
_KINDS: dict[str, Callable[[bytes], object]] = {
    "plan": cohabit.planner.plan.decode,
    "graph": cohabit.planner.graph.decode,
    "profile": cohabit.planner.profile.decode,
}
_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


def read_plan(path: Path) -> Plan:
    """Read a plan. Raises FormatError or ConfigError, naming the file."""
    return _read(path, cohabit.planner.plan.decode)


def read_graph(path: Path) -> Graph:
    """Read a graph. Raises FormatError, InvalidGraph or ConfigError, naming the file."""
    return _read(path, cohabit.planner.graph.decode)


def read_profile(path: Path, graph: Graph) -> Profile:
    """Read the profile of a graph. Raises FormatError or ConfigError, naming the file."""
    profile = _read(path, cohabit.planner.profile.decode)
    if profile.graph != graph.fingerprint:
        raise FormatError(f"{path}: {FingerprintMismatch('profile', graph.fingerprint, profile.graph)}")
    if (count := len(profile.op_seconds)) != len(graph.ops):
        raise FormatError(f"{path}: it has the times of {count} ops, the graph has {len(graph.ops)}")
    return profile


def write_graph(folder: Path, graph: Graph) -> Path:
    return write_file(folder / f"{_stem(graph)}{_GRAPH}", cohabit.planner.graph.encode(graph))


def write_profile(folder: Path, graph: Graph, profile: Profile) -> Path:
    return write_file(folder / f"{_stem(graph)}{_PROFILE}", cohabit.planner.profile.encode(profile))


def write_plan(folder: Path, graph: Graph, plan: Plan, memory: str, searcher: str) -> Path:
    """Write a plan. The file name has the budget as typed, and the seed if it is not 0."""
    assert plan.provenance is not None
    seed = f"-seed{plan.provenance.seed}" if plan.provenance.seed else ""
    name = f"{_stem(graph)}-{_plain(memory.replace('%', 'pct'))}-{searcher}{seed}{_PLAN}"
    return write_file(folder / name, cohabit.planner.plan.encode(plan))


def write_file(path: Path, raw: bytes) -> Path:
    """Write a file atomically. Raises ConfigError if that is impossible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o666) as fd, os.fdopen(os.dup(fd), "wb") as file:
            file.write(raw)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _stem(graph: Graph) -> str:
    return f"{_plain(graph.name) or 'model'}-b{graph.bucket}"


def _plain(text: str) -> str:
    return _UNUSUAL.sub("_", text)


def _read(path: Path, decode: Callable[[bytes], _Decoded]) -> _Decoded:
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except CohabitError as error:
        _refuse_other_kind(path)
        raise FormatError(f"{path}: {error}") from error


def _refuse_other_kind(path: Path) -> None:
    """Raise ConfigError if a file is a plan, graph or profile in place of another kind."""
    kinds = []
    for kind, decode in _KINDS.items():
        with suppress(CohabitError):
            decode(path.read_bytes())
            kinds.append(kind)
    if not kinds:
        return
    raise ConfigError(
        f"{path} is a {kinds[0]}; `cohabit show` draws NAME{_PLAN}, --graph takes NAME{_GRAPH}, --profile"
        f" NAME{_PROFILE}"
    )


def find(what: str, fingerprint: str, plan: Path, decode: Callable[[bytes], _T]) -> _T:
    """Return a plan's graph or profile from files near the plan's. Raises ConfigError if none matches."""
    candidates = list(_candidates(what, plan))
    for path in candidates:
        with suppress(OSError, CohabitError):
            found = decode(path.read_bytes())
            if found.fingerprint == fingerprint:
                return found
    raise ConfigError(
        f"{plan}: none of the {len(candidates)} files near it is the {what} it was made for, {fingerprint[:12]};"
        f" an edited {what} is another one. Give the right one with --{what} FILE"
    )


def _candidates(what: str, plan: Path) -> Iterator[Path]:
    """Yield files with the usual name, then those of a library's folder, then other JSON in the plan's folder."""
    folder = plan.resolve().parent
    named = sorted(folder.glob(f"*.{what}.json"))
    yield from named
    yield from sorted((folder.parent / f"{what}s").glob("*.json"))
    yield from sorted(set(folder.glob("*.json")).difference(named, folder.glob(f"*{_PLAN}")))
