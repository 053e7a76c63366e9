"""The flags of the commands in `server.tools`. Importing this imports neither the planner nor torch."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cohabit.server.config.config import BY_KEY
from cohabit.server.config.sizes import MemorySize, parse_memory
from cohabit.server.config.sources import add_flag
from cohabit.server.config.values import LARGEST_BATCH, batches, integer, positive
from cohabit.server.importing.declared_input import parse_input
from cohabit.server.resources import available_cpus
from cohabit.server.tools.boards import BOARDS

SEARCHERS = (
    "best",
    "streaming",
    "offloading",
    "genetic",
    "particle_swarm",
    "greedy",
    "dynprog",
    "interval",
    "on_demand",
)
BASELINES = (
    "vdnn_all",
    "vdnn_conv",
    "superneurons",
    "tflms",
    "autoswap",
    "capuchin",
    "sqrt_checkpointing",
    "chain_checkpointing",
)
"""Earlier systems to compare with."""
TILING_SEARCHES = ("exact", "greedy", "recursive", "row", "column", "worst", "brute-force")
MEASURING = ("device", "store", "link_bandwidth", "cache", "threads", "shape_buckets")
"""Settings of `serve` that say how a model is measured."""
IMPORTING = ("cache", "threads")
"""Those of an import."""

BUNDLING = (
    *("cache", "threads", "search", "batch_sizes", "shape_buckets", "compute_lanes", "model_rate"),
    "pack_weights",
)
"""Those of a bundle."""

_MODEL_HELP = "a model's folder in a repository, or a .pt2 file"
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

_PLAN_EXAMPLES = """examples:
  cohabit plan models/resnet50 --memory 64MiB
  cohabit plan models/resnet50 --memory 25%,50%,75% --batch-sizes 1,16 --output plans
  cohabit plan models/bert --memory 32MiB --search genetic --time-limit 30s --workers 4
  cohabit plan models/bert --devices 4
  cohabit plan --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

Each batch size is planned on its own. When `cohabit serve` plans several batch sizes of a model, their plans keep
the same parameters resident.
"""
_SHOW_EXAMPLES = """examples:
  cohabit show plans/resnet50-b1-64MiB-best.plan.json
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --html plan.html
  cohabit show plans/resnet50-b1-64MiB-best.plan.json --open

The graph and the profile are found in the plan's folder by the fingerprints in the plan.
"""
_COMPARE_EXAMPLES = """examples:
  cohabit compare-plans models/resnet50 --memory 64MiB
  cohabit compare-plans models/resnet50 --memory 25% --searchers best,genetic,greedy --time-limit 30s
  cohabit compare-plans --graph resnet50-b1.graph.json --profile resnet50-b1.profile.json --memory 64MiB

`best`, `streaming`, `offloading` and `genetic` split the memory into a partition and a workspace, as serving does.
The other searchers plan it as one budget.
"""
_TILE_EXAMPLES = """examples:
  cohabit tile examples/tiling_regression.py:program --workers 4
  cohabit tile examples/tiling_regression.py:program --workers 4 --run --svg tiling.svg
  torchrun --nproc-per-node 4 -m cohabit.server.cli tile script.py:program --workers 4

FUNCTION takes nothing, makes its arrays with `cohabit.planner.tiling.newarray`, computes with NumPy's functions and
returns arrays. The script is run.
"""
_BUNDLE_EXAMPLES = """examples:
  cohabit export-bundle models --memory 64MiB -o bundle && cohabit serve bundle
  cohabit export-bundle models --memory 25% --profile pi5-sd --no-pack-weights --batch-sizes 1 -o bundle

Weights are packed for this processor and this version of torch. --no-pack-weights makes a bundle for other processors.
"""
_CHECK_EXAMPLES = """examples:
  cohabit check models/resnet50
  cohabit check models/resnet50 --memory 64MiB,25%
  cohabit check model.pt2 --json

The model is lowered and measured as `cohabit serve` does it at its first start, which finds the results in the
cache. Exit status: 0 if the model can be served, and in every memory size of --memory; 1 if not.
"""
_IMPORT_EXAMPLES = """examples:
  cohabit import ~/bert-base-uncased
  cohabit import ~/vit-base --repository models --name classifier
  cohabit import mypackage.models:make_ranker --input features:FP32:-1,256 --input categories:INT64:-1,4
  cohabit import ranker.safetensors --factory mypackage.models:make_ranker

Importing runs code: that of MODULE and of what it imports, or of the installed transformers. Code in a model
directory is never run, and pickles may hold tensors only. Import what you would run.
"""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """A memory size and its text, which becomes part of file names."""

    text: str
    size: MemorySize


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _PLAN_EXAMPLES
    _add_subject(parser, "N,N,...", _type(batches), "batch sizes to plan (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        default=(),
        type=_type(_budgets),
        metavar="SIZE,...",
        help="device memory for the model, or several to plan for: 64MiB, 82MB, or 25%% of its weights",
    )
    parser.add_argument(
        "--devices",
        type=_type(integer(2, 1024)),
        metavar="N",
        help="instead, say how the weights of a model of linear layers would be split over so many devices, each with"
        " --memory for weights (default: an even share and a tenth)",
    )
    parser.add_argument(
        "--search",
        default="best",
        choices=(*SEARCHERS, *BASELINES),
        metavar="NAME",
        help=f"how to search: {', '.join(SEARCHERS)}; best, streaming, offloading and genetic plan a partition and a"
        " workspace, as serving does, the others one budget. Baselines to compare with, for one budget:"
        f" {', '.join(BASELINES)} (default: %(default)s)",
    )
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
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a file that `cohabit plan` wrote")
    parser.add_argument("--graph", type=Path, metavar="FILE", help="its graph (default: found in the same folder)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="its profile (default: likewise)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page; - for standard output")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _COMPARE_EXAMPLES
    one_batch = integer(1, LARGEST_BATCH)
    _add_subject(parser, "N", _type(lambda text: (one_batch(text),)), "batch size (default: 1, or the graph's)")
    parser.add_argument(
        "--memory",
        required=True,
        type=_type(_budget),
        metavar="SIZE",
        help="device memory for the model: 64MiB, 82MB, or 25%% of its weights",
    )
    parser.add_argument(
        "--searchers",
        type=_type(_searchers),
        default=SEARCHERS,
        metavar="NAME,...",
        help=f"some of {', '.join(SEARCHERS)} (default: all)",
    )
    _add_effort(parser, "10s")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="write the plans, the graph and the profile here"
    )


def add_tile_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _TILE_EXAMPLES
    parser.add_argument(
        "program", metavar="SCRIPT:FUNCTION", help="a Python file and the function that builds the program"
    )
    parser.add_argument(
        "--workers", type=_type(integer(1, 4096)), default=4, metavar="N", help="processes (default: %(default)s)"
    )
    parser.add_argument(
        "--search", default="exact", choices=TILING_SEARCHES, help="how to choose tilings (default: %(default)s)"
    )
    parser.add_argument(
        "--copies",
        type=_type(parse_memory),
        metavar="SIZE",
        help="memory per worker for copies of arrays: 64MiB, or a share of its part of the inputs (default: 10%%)",
    )
    parser.add_argument(
        "--run",
        dest="execute",
        action="store_true",
        help="run the program in processes of this machine; torchrun's run it always",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture")


def add_profile_flags(parser: argparse.ArgumentParser) -> None:
    _add_subject(parser, "N,N,...", _type(batches), "batch sizes to measure (default: 1)")


def add_bundle_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _BUNDLE_EXAMPLES
    parser.add_argument("repository", metavar="REPOSITORY", help="folder of NAME/VERSION/model.pt2")
    parser.add_argument(
        "--memory",
        required=True,
        metavar="SIZE",
        help="device memory for all models, as of `cohabit serve`: 64MiB, 82MB, or 25%% of the sum of their weights",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="new folder for the bundle")
    parser.add_argument(
        "--profile",
        choices=BOARDS,
        metavar="BOARD",
        help=f"plan for a board's store and cores: {', '.join(BOARDS)} (default: this machine)",
    )
    store = BY_KEY["store"]
    parser.add_argument(
        "--store", choices=store.choices, default="file", help=f"{store.help} (default: %(default)s)"
    )
    for key in BUNDLING:
        add_flag(parser, BY_KEY[key])


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _CHECK_EXAMPLES
    parser.add_argument("model", type=Path, metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        "--memory",
        type=_type(_budgets),
        default=(),
        metavar="SIZE,...",
        help="device memory to check: 64MiB, 82MB, or 25%% of its weights (default: the least, and some shares)",
    )
    parser.add_argument("--json", action="store_true", help="write JSON")
    _add_measuring(parser, "batch_sizes")


def add_import_flags(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _IMPORT_EXAMPLES
    parser.add_argument(
        "path",
        metavar="PATH",
        help="a Hugging Face model directory (config.json and safetensors), MODULE:FUNCTION that returns a"
        " torch.nn.Module, or a checkpoint of --factory",
    )
    parser.add_argument(
        "--factory",
        metavar="MODULE:FUNCTION",
        help="function that returns the module into which a checkpoint is loaded: safetensors, or a state_dict of"
        " torch.save",
    )
    parser.add_argument(
        "--input",
        dest="inputs",
        type=_type(parse_input),
        action="append",
        default=[],
        metavar="NAME:TYPE:DIMS",
        help="input of the module, such as image:FP32:-1,3,224,224, where -1 is the batch; repeatable (default: the"
        " module's `example_inputs`, or what the Hugging Face model takes)",
    )
    parser.add_argument(
        "--sequence-length",
        type=_type(integer(1, 1 << 20)),
        metavar="N",
        help="export a text model for sequences of N tokens only",
    )
    parser.add_argument(
        "--max-batch",
        type=_type(integer(1, LARGEST_BATCH)),
        default=8,
        metavar="N",
        help="largest batch size; 1 exports a fixed batch (default: %(default)s)",
    )
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("models"),
        metavar="DIR",
        help="the model repository (default: ./%(default)s)",
    )
    parser.add_argument("--name", metavar="NAME", help="the entry's name (default: from PATH)")
    for key in IMPORTING:
        add_flag(parser, BY_KEY[key])


def _add_subject(
    parser: argparse.ArgumentParser, batch_metavar: str, batch_type: Callable[[str], Any], batch_help: str
) -> None:
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--batch-sizes", type=batch_type, metavar=batch_metavar, help=batch_help)
    measured = parser.add_argument_group("instead of MODEL")
    measured.add_argument("--graph", type=Path, metavar="FILE", help="graph that `cohabit plan` wrote")
    measured.add_argument(
        "--profile",
        type=lambda text: BOARDS.get(text) or Path(text),
        metavar="FILE|BOARD",
        help=f"profile of that graph; or, with MODEL, the board to predict for: {', '.join(BOARDS)}",
    )
    _add_measuring(parser)


def _add_measuring(parser: argparse.ArgumentParser, *more: str) -> None:
    group = parser.add_argument_group("measuring")
    for key in (*MEASURING, *more):
        add_flag(group, BY_KEY[key])


def _add_effort(parser: argparse.ArgumentParser, time_limit: str | None) -> None:
    parser.add_argument(
        "--single",
        action="store_true",
        help="plan the memory as one budget with `best` and `genetic`, too, which by default split it into a partition"
        " and a workspace, as serving does",
    )
    group = parser.add_argument_group("search effort")
    default = "chosen by the searcher" if time_limit is None else f"{time_limit} for each searcher"
    group.add_argument(
        "--time-limit",
        type=_type(_duration),
        default=time_limit,
        metavar="TIME",
        help=f"10s, 2m, 500ms (default: {default})",
    )
    group.add_argument(
        "--evaluations", type=_type(integer(1, 10**9 - 1)), metavar="N", help="most candidates to evaluate"
    )
    group.add_argument(
        "--seed",
        type=_type(integer(0, 10**9 - 1)),
        default=0,
        metavar="N",
        help="seed of the search (default: %(default)s)",
    )
    group.add_argument(
        "--workers",
        type=_type(integer(1, 256)),
        default=available_cpus(),
        metavar="N",
        help="threads that evaluate candidates; the plan does not depend on it (default: one per CPU)",
    )


def _type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type for argparse that reports the message of a ValueError."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return convert


def _budget(text: str) -> MemoryBudget:
    return MemoryBudget(text.strip(), parse_memory(text))


def _budgets(text: str) -> tuple[MemoryBudget, ...]:
    return tuple(dict.fromkeys(_budget(part) for part in text.split(",")))


def _searchers(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in SEARCHERS:
            raise ValueError(f"no searcher is called {name}; there are {', '.join(SEARCHERS)}")
    return names


def _duration(text: str) -> float:
    number = text.strip().rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text.strip()[len(number) :] or "s"
    if unit not in _SECONDS:
        raise ValueError(f"'{text}' is not a time; write it like 10s, 2m or 500ms")
    return positive(number, "a time; write it like 10s, 2m or 500ms") * _SECONDS[unit]
