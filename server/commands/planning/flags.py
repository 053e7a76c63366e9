"""Flags of the planning commands: the model, how it is measured, and the search effort."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohabit.server.config.config import BY_KEY
from cohabit.server.config.machine import available_cpus
from cohabit.server.config.sizes import MemorySize, parse_memory
from cohabit.server.config.sources import add_flag, typed
from cohabit.server.config.values import integer, positive

MEASURING = ("device", "store", "link_bandwidth", "cache", "threads", "shape_buckets", "weights")
"""Settings of `serve` that affect how a model is measured."""
MODEL_HELP = "a model's folder in a repository, or a .pt2 file"

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A memory size and its text, which becomes part of file names."""

    text: str
    size: MemorySize


def add_subject(
    parser: argparse.ArgumentParser, batch_metavar: str, batch_type: Callable[[str], Any], batch_help: str
) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--batch-sizes", type=batch_type, metavar=batch_metavar, help=batch_help)
    measured = parser.add_argument_group("instead of MODEL")
    measured.add_argument("--graph", type=Path, metavar="FILE", help="graph that `cohabit plan` wrote")
    measured.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile of that graph",
    )
    add_measuring(parser)


def add_measuring(parser: argparse.ArgumentParser, *more: str) -> None:
    group = parser.add_argument_group("measuring")
    for key in (*MEASURING, *more):
        add_flag(group, BY_KEY[key])


def add_effort(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search effort")
    group.add_argument(
        "--time-limit",
        type=typed(_duration),
        metavar="TIME",
        help="10s, 2m, 500ms (default: chosen by the searcher)",
    )
    group.add_argument(
        "--evaluations",
        type=typed(integer(1, 10**9 - 1)),
        metavar="N",
        help="maximum number of candidates to evaluate",
    )
    group.add_argument(
        "--seed",
        type=typed(integer(0, 10**9 - 1)),
        default=0,
        metavar="N",
        help="seed of the search (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        type=typed(integer(1, 256)),
        default=available_cpus(),
        metavar="N",
        help="threads that evaluate candidates; the plan does not depend on it (default: one per CPU)",
    )


def budget(text: str) -> MemoryBudget:
    return MemoryBudget(text.strip(), parse_memory(text))


def budgets(text: str) -> tuple[MemoryBudget, ...]:
    return tuple(dict.fromkeys(budget(part) for part in text.split(",")))


def _duration(text: str) -> float:
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :] or "s"
    if unit not in _SECONDS:
        raise ValueError(f"'{text}' is not a time; write it like 10s, 2m or 500ms")
    return positive(number, "a time; write it like 10s, 2m or 500ms") * _SECONDS[unit]
