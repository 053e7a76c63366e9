"""The options of each command. Importing this imports neither numpy nor torch."""

import argparse
import math
from pathlib import Path

_EPILOG = """commands:
  loadgen prepare REPO      write a repository of models (prepare --list shows them)
  loadgen sentences         compare sentences with the served model minilm

examples:
  loadgen --models 16 --rate 300                    start a server, measure it, stop it
  loadgen --url 127.0.0.1:8000 --rate 300 --json run.json
  loadgen --url 127.0.0.1:8000 --model minilm=3,ranker_00=1

exit status: 0 every request was answered, 1 not, 2 the command line is impossible
"""


def run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen",
        description="Send requests to a KServe v2 / Triton server at times drawn beforehand (open loop), and report"
        " latencies from the intended send times. Without --url, start a Cohabit server for the length of the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    load = parser.add_argument_group("load")
    load.add_argument(
        "--models", type=_count, metavar="N", help="use the first N ready models, by name (all; 16 without --url)"
    )
    load.add_argument("--model", type=_weights, default={}, metavar="NAME[=WEIGHT],...", help="use these models")
    load.add_argument(
        "--zipf", type=_not_negative, default=0.0, metavar="S", help="weigh the k-th model by 1/k**S (0: uniform)"
    )
    load.add_argument(
        "--rate",
        type=_positive,
        default=300.0,
        metavar="PER_S",
        help="requests per second, all models together (300)",
    )
    load.add_argument(
        "--duration", type=_positive, default=20.0, metavar="S", help="seconds that are measured (20)"
    )
    load.add_argument("--warmup", type=_not_negative, default=2.0, metavar="S", help="seconds before them (2)")
    load.add_argument("--batch", type=_count, default=1, metavar="N", help="batch of every request (1)")
    load.add_argument("--seed", type=int, default=0, help="of arrivals, choice of models and inputs (0)")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--slo-ms", type=_positive, default=100.0, metavar="MS", help="latency that goodput counts up to (100)"
    )
    limits.add_argument(
        "--timeout", type=_positive, default=30.0, metavar="S", help="give up on a request after this (30)"
    )
    limits.add_argument(
        "--max-in-flight",
        type=_count,
        default=10_000,
        metavar="N",
        help="count requests beyond N unanswered ones as not sent (10000)",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="HOST:PORT", help="a running server")
    server.add_argument(
        "--repository",
        type=Path,
        metavar="REPO",
        help="what to serve without --url (default: models written to the user's cache)",
    )
    server.add_argument(
        "--memory", metavar="SIZE", help="memory for it: 82MiB, or a share of the weights such as 30%% (25%%)"
    )
    server.add_argument("--layout", metavar="NAME", help="how its models share memory (the server's default)")
    server.add_argument("--server", default="cohabit", metavar="COMMAND", help="program to start (cohabit)")
    server.add_argument(
        "--patience", type=_positive, default=600.0, metavar="S", help="seconds for it to get ready (600)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the report there as well (loadgen.report.Report)"
    )
    return parser


def prepare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen prepare",
        description="Write models as REPO/NAME/1/model.pt2. What is there already and complete is kept.",
    )
    parser.add_argument("repository", nargs="?", type=Path, metavar="REPO", help="folder to write to")
    parser.add_argument("--models", type=_count, metavar="N", help="how many (one of each --zoo name, else 16)")
    parser.add_argument(
        "--zoo", type=_names, default=[], metavar="NAME,...", help="build these in turn (rankers and one minilm)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random weights (0)")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    parser.add_argument("--list", action="store_true", help="list the models that can be built")
    return parser


def sentences_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen sentences", description="Send sentences to a served MiniLM and print how alike they are."
    )
    parser.add_argument("sentence", nargs="*", help="two or more sentences (default: three examples)")
    parser.add_argument("--url", default="127.0.0.1:8000", metavar="HOST:PORT", help="the server (127.0.0.1:8000)")
    parser.add_argument("--model", default="minilm", metavar="NAME", help="its sentence embedder (minilm)")
    parser.add_argument("--timeout", type=_positive, default=30.0, metavar="S", help="seconds to wait (30)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in _names(text):
        name, equals, weight = item.partition("=")
        if name in weights:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        weights[name] = _positive(weight) if equals else 1.0
    return weights
