"""What the planner's benchmarks share: captured graphs as JSON files, and searches in processes."""

import argparse
import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.planner.capture import Captured
from benchmarks.record import parser_of
from cohabit.planner.warm import warm

T = TypeVar("T")

ROOT = Path(__file__).parent.parent.parent
_OURS = ("capture", "inception", "models", "nasnet", "recurrent", "training")
_REWRITES = ("in_place", "precision", "recurrent", "slicing")
_SOURCES = (
    *(f"benchmarks/planner/{name}.py" for name in _OURS),
    "runtime/lowering/rewrite.py",
    *(f"runtime/lowering/rewrites/{name}.py" for name in _REWRITES),
    "runtime/lowering/weights.py",
)
"""What decides how a captured graph looks."""
DEFAULT_CACHE = Path.home() / ".cache" / "cohabit" / "benchmarks"


def graph_parser_of(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return `parser_of`'s parser with a folder for captured graphs."""
    parser = parser_of(module, about, has_folder=False)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="captured graphs (default: %(default)s)")
    return parser


def in_processes(run: Callable[..., T], jobs: Sequence[tuple[Any, ...]], processes: int) -> list[T]:
    """Return what a function makes of each job, in processes that load the compiled loops before the first."""
    with ProcessPoolExecutor(processes, get_context("spawn"), warm) as pool:
        futures = [pool.submit(run, *job) for job in jobs]
        return [future.result() for future in track(futures, "searching", console=Console(stderr=True))]


def cached(key: str, cache: Path | None, make: Callable[[], Captured]) -> Captured:
    """What `make` returned when this key was first asked for; None as the cache makes it again.

    A file made by other sources than those that are here, or by another torch, counts as not there.
    """
    if cache is None:
        return make()
    path = cache / f"{key}-{_stamp()}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Captured)
    except (FileNotFoundError, msgspec.DecodeError):
        found = make()
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(msgspec.json.encode(found))
        unfinished.replace(path)
    return found


def _stamp() -> str:
    """Short hash of the sources and of torch's version."""
    state = hashlib.sha256(torch.__version__.encode())
    for name in _SOURCES:
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()[:12]
