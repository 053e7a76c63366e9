"""The flags of `cohabit plan`, `show` and `compare-plans`, read once into frozen objects."""

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from server.config.config import ServeConfig
from server.config.setting import parsed
from server.config.sizes import MemorySize, parse_memory
from server.config.sources import add_flag, config_of, selected
from server.config.values import batches, integer, positive
from server.errors import ConfigError

SEARCHER_NAMES = "best, streaming, genetic, particle_swarm, greedy, dynprog, interval, on_demand"
"""For help texts, which should not take the second that importing the planner does."""

_MEASURING = ("device", "store", "link_bandwidth", "cache", "threads", "scripted")
"""Settings of `serve` that say how a model is measured."""
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_PLAN_EXAMPLES = """examples:
  cohabit plan models/resnet50 --memory 64MiB
  cohabit plan models/resnet50 --memory 25%,50%,75% --batch 1,16 --output plans
  cohabit plan models/bert --memory 32MiB --search genetic --time-limit 30s --workers 4
  cohabit plan --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

A size may be a share of the model's parameters. Each batch size is planned on its own; when `cohabit serve` plans
several batch sizes of a model, they share their residents.
"""
_SHOW_EXAMPLES = """examples:
  cohabit show plans/resnet50-b1-64MiB-best.plan.json
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --html plan.html
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --open

The graph and the profile are looked for beside the plan, by the fingerprints that the plan names.
"""
_COMPARE_EXAMPLES = """examples:
  cohabit compare-plans models/resnet50 --memory 64MiB
  cohabit compare-plans models/resnet50 --memory 25% --searchers best,genetic,greedy --time-limit 30s
  cohabit compare-plans --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

`best` and `streaming` split the memory into a partition and a workspace, as serving does; the papers' searchers plan
it as one budget.
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to plan: a model, or a graph and a profile that came from one."""

    model: Path | None
    graph: Path | None
    profile: Path | None
    batches: tuple[int, ...] | None
    """None for 1, or for what the graph has."""
    config: ServeConfig
    """How to measure a model. Only the flags about the device count."""


@dataclass(frozen=True, slots=True)
class Memory:
    """A budget as it was typed, which is also what files are named by."""

    text: str
    size: MemorySize


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to search, and with what."""

    seconds: float | None
    evaluations: int | None
    seed: int
    workers: int


@dataclass(frozen=True, slots=True)
class PlanOptions:
    subject: Subject
    memories: tuple[Memory, ...]
    searcher: str
    single: bool
    """Whether even the searchers that serving uses plan the memory as one budget."""
    effort: Effort
    output: Path


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    subject: Subject


@dataclass(frozen=True, slots=True)
class CompareOptions:
    subject: Subject
    memory: Memory
    searchers: tuple[str, ...] | None
    """None for all there are."""
    single: bool
    effort: Effort
    output: Path | None


@dataclass(frozen=True, slots=True)
class ShowOptions:
    plan: Path
    graph: Path | None
    profile: Path | None
    html: Path | None
    """`-` is the standard output."""
    open_it: bool


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _PLAN_EXAMPLES
    _add_subject(parser, "N,N,...", "batch sizes to plan, each on its own (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE,...",
        help="device memory for the model, or several to plan for: 64MiB, 82MB, or 25%% of its parameters",
    )
    parser.add_argument("--search", default="best", metavar="NAME", help=f"{SEARCHER_NAMES} (default: %(default)s)")
    _add_single(parser)
    _add_effort(parser, None)
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("plans"),
        metavar="DIR",
        help="folder for the plans, graphs and profiles (default: ./%(default)s)",
    )


def add_show_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _SHOW_EXAMPLES
    parser.add_argument("plan", type=Path, metavar="PLAN", help="plan file, as `cohabit plan` writes it")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="the plan's graph (default: found beside it)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="its profile (default: found beside it)")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page to look at in a browser; - for standard output"
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _COMPARE_EXAMPLES
    _add_subject(parser, "N", "batch size (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE",
        help="device memory for the model: 64MiB, 82MB, or 25%% of its parameters",
    )
    parser.add_argument("--searchers", metavar="NAME,...", help=f"some of {SEARCHER_NAMES} (default: all)")
    _add_single(parser)
    _add_effort(parser, "10s")
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the plans, the graph and the profile here")


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    _add_subject(parser, "N,N,...", "batch sizes to measure (default: 1)")


def profile_options(options: argparse.Namespace) -> ProfileOptions:
    """Check every flag. Raises ConfigError, which names the flag."""
    return ProfileOptions(_subject(options))


def plan_options(options: argparse.Namespace) -> PlanOptions:
    """Check every flag. Raises ConfigError, which names the flag."""
    return PlanOptions(
        subject=_subject(options),
        memories=tuple(dict.fromkeys(parsed("--memory", text, _memory) for text in options.memory.split(","))),
        searcher=options.search,
        single=options.single,
        effort=_effort(options),
        output=options.output,
    )


def compare_options(options: argparse.Namespace) -> CompareOptions:
    """Check every flag. Raises ConfigError, which names the flag."""
    subject = _subject(options)
    if subject.batches is not None and len(subject.batches) > 1:
        raise ConfigError(f"--batch: {len(subject.batches)} batch sizes; searchers are compared at one")
    names = tuple(dict.fromkeys(n.strip() for n in options.searchers.split(","))) if options.searchers else None
    return CompareOptions(
        subject=subject,
        memory=parsed("--memory", options.memory, _memory),
        searchers=names,
        single=options.single,
        effort=_effort(options),
        output=options.output,
    )


def show_options(options: argparse.Namespace) -> ShowOptions:
    """Check every flag. Raises ConfigError, which names the flag."""
    if options.open and options.html == Path("-"):
        raise ConfigError("--open: a page on standard output cannot be opened; give --html a file")
    return ShowOptions(options.plan, options.graph, options.profile, options.html, options.open)


def _add_subject(parser: argparse.ArgumentParser, batch_metavar: str, batch_help: str) -> None:
    parser.add_argument(
        "model", nargs="?", type=Path, metavar="MODEL", help="a model's folder in a repository, or a .pt2 file"
    )
    parser.add_argument("--batch", metavar=batch_metavar, help=batch_help)
    measured = parser.add_argument_group("without the model")
    measured.add_argument("--graph", type=Path, metavar="FILE", help="graph that an earlier plan was made from")
    measured.add_argument("--profile", type=Path, metavar="FILE", help="profile of that graph")
    device = parser.add_argument_group("the device that the model is measured on")
    for setting in selected(_MEASURING):
        add_flag(device, setting)


def _add_single(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--single",
        action="store_true",
        help="plan the memory as one budget with every searcher; otherwise `best` and `streaming` split it into a"
        " partition and a workspace, as serving does",
    )


def _add_effort(parser: argparse.ArgumentParser, time_limit: str | None) -> None:
    group = parser.add_argument_group("how long to search")
    default = "the searcher's own choice" if time_limit is None else f"{time_limit} for each searcher"
    group.add_argument(
        "--time-limit", default=time_limit, metavar="TIME", help=f"10s, 2m, 500ms (default: {default})"
    )
    group.add_argument("--evaluations", metavar="N", help="candidates to judge at most")
    group.add_argument("--seed", default="0", metavar="N", help="of the search (default: %(default)s)")
    group.add_argument(
        "--workers",
        default=str(len(os.sched_getaffinity(0))),
        metavar="N",
        help="threads, or processes, that judge candidates; the plan is the same (default: one per CPU, %(default)s)",
    )


def _subject(options: argparse.Namespace) -> Subject:
    pair = options.graph is not None and options.profile is not None
    if options.model is None and not pair:
        raise ConfigError("give a MODEL, or both --graph and --profile")
    if options.model is not None and (options.graph is not None or options.profile is not None):
        raise ConfigError("--graph and --profile are there to plan without a model; leave out MODEL or them")
    sizes = _optional("--batch", options.batch, batches)
    given = {key: vars(options)[key] for key in _MEASURING if key in vars(options)}
    config = config_of({"repository": str(options.model or "."), "memory": "1B", **given})
    config = replace(config, batch_sizes=sizes or (1,))
    return Subject(options.model, options.graph, options.profile, sizes, config)


def _effort(options: argparse.Namespace) -> Effort:
    return Effort(
        seconds=_optional("--time-limit", options.time_limit, _duration),
        evaluations=_optional("--evaluations", options.evaluations, integer(1, 10**9 - 1)),
        seed=parsed("--seed", options.seed, integer(0, 10**9 - 1)),
        workers=parsed("--workers", options.workers, integer(1, 256)),
    )


def _memory(text: str) -> Memory:
    return Memory(text.strip(), parse_memory(text))


def _optional(flag: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    return None if text is None else parsed(flag, text, parse)


def _duration(text: str) -> float:
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :] or "s"
    if unit not in _SECONDS:
        raise ValueError(f"'{text}' is not a time; write it like 10s, 2m or 500ms")
    return positive(number, "a time; write it like 10s, 2m or 500ms") * _SECONDS[unit]
