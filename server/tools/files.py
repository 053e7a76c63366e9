"""Plan, graph and profile files: what they are called, and how the ones that belong together are found."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import planner.graph
import planner.plan
import planner.profile
from planner.errors import CohabitError, FingerprintMismatch, FormatError
from planner.graph import Graph
from planner.plan import Plan
from planner.profile import Profile
from server.errors import ConfigError

_T = TypeVar("_T", Graph, Profile)

_UNUSUAL = re.compile(r"[^A-Za-z0-9._-]+")


def read_plan(path: Path) -> Plan:
    """Raises FormatError or ConfigError, naming the file."""
    return _decoded(path, planner.plan.decode)


def read_graph(path: Path) -> Graph:
    """Raises FormatError, InvalidGraph or ConfigError, naming the file."""
    return _decoded(path, planner.graph.decode)


def read_profile(path: Path, graph: Graph) -> Profile:
    """Read the profile of a graph. Raises FormatError or ConfigError, naming the file."""
    profile = _decoded(path, planner.profile.decode)
    if profile.graph != graph.fingerprint:
        raise FormatError(f"{path}: {FingerprintMismatch('profile', graph.fingerprint, profile.graph)}")
    if wrong := _nonsense(profile, graph):
        raise FormatError(f"{path}: {wrong}")
    return profile


def read_pair(graph: Path, profile: Path) -> tuple[Graph, Profile]:
    read = read_graph(graph)
    return read, read_profile(profile, read)


def find_graph(plan: Plan, beside: Path) -> Graph:
    """The graph that a plan names, from the files around it. Raises ConfigError if it is not there."""
    return _find("graph", plan.graph, beside, planner.graph.decode)


def find_profile(plan: Plan, beside: Path) -> Profile:
    """The profile that a plan names, from the files around it. Raises ConfigError if it is not there."""
    return _find("profile", plan.profile, beside, planner.profile.decode)


def write_graph(folder: Path, graph: Graph) -> Path:
    return _write(folder / f"{_stem(graph)}.graph.json", planner.graph.encode(graph))


def write_profile(folder: Path, graph: Graph, profile: Profile) -> Path:
    return _write(folder / f"{_stem(graph)}.profile.json", planner.profile.encode(profile))


def write_plan(folder: Path, graph: Graph, plan: Plan, memory: str, searcher: str) -> Path:
    """`memory` is the budget as it was typed; other seeds, and one budget instead of two, show in the name too."""
    assert plan.provenance is not None
    seed = f"-seed{plan.provenance.seed}" if plan.provenance.seed else ""
    name = f"{_stem(graph)}-{_plain(memory.replace('%', 'pct'))}-{searcher}{seed}.plan.json"
    return _write(folder / name, planner.plan.encode(plan))


def write_text(path: Path, text: str) -> Path:
    return _write(path, text.encode())


def _stem(graph: Graph) -> str:
    return f"{_plain(graph.name) or 'model'}-b{graph.batch}"


def _plain(text: str) -> str:
    return _UNUSUAL.sub("_", text)


def _write(path: Path, raw: bytes) -> Path:
    """Whole or not at all, like every file here. Raises ConfigError if that is impossible."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_bytes(raw)
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def _decoded(path: Path, decode: Callable[[bytes], "_Decoded"]) -> "_Decoded":
    try:
        return decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except CohabitError as error:
        raise FormatError(f"{path}: {error}") from error


_Decoded = TypeVar("_Decoded", Plan, Graph, Profile)


def _find(what: str, fingerprint: str, beside: Path, decode: Callable[[bytes], _T]) -> _T:
    looked_at = 0
    for path in _candidates(what, beside):
        looked_at += 1
        try:
            found = decode(path.read_bytes())
        except (OSError, CohabitError):
            continue
        if found.fingerprint == fingerprint:
            return found
    raise ConfigError(
        f"{beside}: none of the {looked_at} files beside it is the {what} it was made for, {fingerprint[:12]};"
        f" an edited {what} is another one. Give the right one with --{what} FILE"
    )


def _candidates(what: str, beside: Path) -> Iterator[Path]:
    """Files that may be it, likely ones first: those named so, a library's folder, any other JSON."""
    folder = beside.resolve().parent
    named = sorted(folder.glob(f"*.{what}.json"))
    shelf = sorted((folder.parent / f"{what}s").glob("*.json"))
    rest = sorted(set(folder.glob("*.json")).difference(named, folder.glob("*.plan.json")))
    yield from (*named, *shelf, *rest)


def _nonsense(profile: Profile, graph: Graph) -> str | None:
    """What no measurement can have yielded."""
    if len(profile.op_seconds) != len(graph.ops):
        return f"it has the times of {len(profile.op_seconds)} ops, the graph has {len(graph.ops)}"
    links = (profile.swap_in, profile.swap_out)
    if min((*profile.op_seconds, *(link.latency_s for link in links))) < 0:
        return "a time in it is below 0"
    if min(link.bandwidth_bytes_per_s for link in links) <= 0:
        return "a bandwidth in it is not above 0"
    if min(profile.compute_slowdown, profile.swap_slowdown) < 1:
        return "a slowdown in it is below 1"
    return None
