"""Flags of `loadgen` and its commands. Importing this module imports neither numpy nor a client."""

import argparse
import math
from pathlib import Path
from typing import Any

from cohabit.loadgen.load import Load

DEFAULT_PERCENTILE = 99.0
_LAYOUTS = ["partitioned", "resident", "time_shared"]
DEFAULT_MODELS = 16
DEFAULT_MEMORY = "25%"

_EPILOG = """commands:
  loadgen prepare REPO      write a repository of models (prepare --list shows them)
  loadgen compare           measure several layouts on the same models and the same requests
  loadgen report A.json     draw runs as one HTML page, and compare them

examples:
  loadgen --models 16 --rate 300                    start a server, measure it, stop it
  loadgen --url 127.0.0.1:8000 --rate 300 --output run.json
  loadgen --url grpc://127.0.0.1:8001 --model minilm=3,ranker_00=1
  loadgen --url 127.0.0.1:8000 --find-rate --slo-ms 50
  loadgen --url 127.0.0.1:8000 --model chat --rate 0.5 --texts 64,128

exit status: 0 every request was answered, and the SLO met if one was given; 1 otherwise; 2 wrong command line;
3 invalid run, because requests were sent late; 130 interrupted run
"""


def run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen",
        usage="loadgen [options] | loadgen prepare REPO | loadgen compare [options] | loadgen report A.json",
        description="Send requests to a KServe v2 / Triton server at times drawn beforehand (open loop), and report"
        " latencies from the intended send times. Without --url, start a Cohabit server for the length of the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_load(parser)
    rates = parser.add_argument_group("several rates")
    rates.add_argument(
        "--sweep", type=_rates, default=None, metavar="PER_S,...", help="measure one rate after the other"
    )
    rates.add_argument(
        "--find-rate", action="store_true", help="find the highest rate that meets the SLO, beginning at --rate"
    )
    server = _add_server(parser)
    server.add_argument(
        "--url", metavar="URL", help="a running server: HOST:PORT, or with http, https, grpc, grpcs://"
    )
    server.add_argument(
        "--layout", metavar="NAME", help="--layout of a server started here (default: the server's)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        "--json",
        type=Path,
        metavar="FILE",
        help="also write the report, or those of all rates, as JSON",
    )
    return parser


def compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen compare",
        description="Serve the same models with one layout after the other, send each the same requests, and write"
        " OUTPUT/LAYOUT.json and OUTPUT/compare.html. The layout resident has memory for all weights.",
    )
    parser.add_argument(
        "--layouts", type=_names, default=_LAYOUTS, metavar="NAME,...", help=f"(default: {','.join(_LAYOUTS)})"
    )
    parser.add_argument(
        "--sweep", type=_rates, default=[100.0, 200.0, 300.0], metavar="PER_S,...",
        help="requests per second, all models together (default: 100,200,300)",
    )  # fmt: skip
    _add_load(parser)
    _add_server(parser)
    parser.add_argument(
        "--output", dest="output_folder", type=Path, default=Path("loadgen-compare"), metavar="FOLDER",
        help="folder for the results (default: %(default)s)",
    )  # fmt: skip
    parser.set_defaults(url=None, layout=None, output=None, find_rate=False)
    return parser


def report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen report",
        description="Show runs that --output has written, as tables, or as a page. Further files are"
        " compared with the first, at the rates that both have.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
    default = Load()

    def add(group: argparse._ActionsContainer, flag: str, field: str, kind: Any, metavar: str, text: str) -> None:
        value = getattr(default, field)
        note = f" (default: {value:g})" if isinstance(value, int | float) else ""
        group.add_argument(flag, dest=field, type=kind, default=value, metavar=metavar, help=text + note)

    # Each flag's `dest` is a field of `Load`, which has its default. First: models and arrivals.
    load = parser.add_argument_group("load")
    text = f"use the first N ready models by name (default: all; without --url {DEFAULT_MODELS})"
    add(load, "--models", "model_count", _count, "N", text)
    load.add_argument(
        "--model", dest="weights", type=_weights, action=_Together, default=default.weights,
        metavar="NAME[=WEIGHT],...", help="use these models; repeatable",
    )  # fmt: skip
    add(load, "--zipf", "zipf", _not_negative, "S", "weigh the k-th model by 1/k**S; 0 is uniform")
    add(load, "--rate", "rate_per_s", _positive, "PER_S", "requests per second, all models together")
    add(load, "--duration", "duration_s", _positive, "S", "measured seconds")
    add(load, "--warmup", "warmup_s", _not_negative, "S", "seconds of load before the measurement")
    add(load, "--batch", "batch", _batch, "N[,N...]", "rows of a request; of several sizes, one is drawn for each")
    add(load, "--seed", "seed", int, "N", "seed of arrival times, choice of models and inputs")
    add(
        load,
        "--cv",
        "cv",
        _not_negative,
        "CV",
        "coefficient of variation of the gaps: 1 is Poisson, 0 constant, else gamma",
    )
    add(
        load,
        "--bursts",
        "bursts_s",
        _bursts,
        "ON_S,OFF_S",
        "alternate ON_S seconds with requests and OFF_S seconds without",
    )
    text = "replay requests: columns time (s), model; for texts prompt_tokens, output_tokens"
    add(load, "--trace", "trace", str, "FILE.csv", text)
    add(load, "--concurrency", "concurrency", _count, "N", "closed loop of N clients, instead of a rate")
    add(load, "--processes", "processes", _count, "N", "sender processes")
    # Contents of requests, and checks of answers
    text = "requests: .npz, .jsonl, or a folder with one per model, such as a repository with sample.json"
    add(load, "--inputs", "inputs", str, "PATH", text)
    text = "for models that generate texts: tokens of each prompt, tokens to generate"
    add(load, "--texts", "texts", _text_size, "PROMPT,OUTPUT", text)
    load.add_argument(
        "--shared-memory",
        choices=("system",),
        default=None,
        help="pass inputs in shared memory of this machine, registered with the server; outputs are sent",
    )
    load.add_argument(
        "--verify",
        nargs="?",
        choices=("bits", "close"),
        const="bits",
        metavar="bits|close",
        help="count answers that differ between identical requests (bits; close: by more than rounding), or from the"
        " outputs in --inputs",
    )
    # The SLO's two defaults depend on each other: `cli._load_of` sets them.
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--slo-ms",
        dest="slo_s",
        type=lambda text: _positive(text) / 1e3,
        default=None,
        metavar="MS",
        help="SLO for the latency at --slo-percentile; without it, goodput counts answers within"
        f" {default.slo_s * 1e3:g} ms",
    )
    limits.add_argument(
        "--slo-percentile",
        type=_percentage,
        default=None,
        metavar="PERCENT",
        help=f"percentage of requests to answer within --slo-ms (default: {DEFAULT_PERCENTILE:g})",
    )
    add(limits, "--timeout", "timeout_s", _positive, "S", "seconds until a request fails")
    text = "maximum number of requests in flight; requests beyond it are reported as not sent"
    add(limits, "--max-in-flight", "max_in_flight", _count, "N", text)


def _add_server(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    server = parser.add_argument_group("server")
    token = "bearer token to send: the file's first line that is neither empty nor a comment"
    server.add_argument("--token-file", type=Path, metavar="FILE", help=token)
    server.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="certificate authorities (PEM) that may have signed the server's certificate",
    )
    server.add_argument(
        "--repository",
        type=Path,
        metavar="REPO",
        help="repository to serve without --url (default: models written to the user's cache)",
    )
    server.add_argument(
        "--memory",
        metavar="SIZE",
        help=f"memory of that server: 82MiB, 25%% of the weights (default: {DEFAULT_MEMORY}%)",
    )
    server.add_argument(
        "--server", default="cohabit", metavar="COMMAND", help="command that starts it (default: %(default)s)"
    )
    server.add_argument(
        "--patience",
        type=_positive,
        default=600.0,
        metavar="S",
        help="seconds to wait for the server to become ready (default: %(default)g)",
    )
    return server


def prepare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen prepare",
        description="Write models as REPO/NAME/1/model.pt2. Models that are complete are kept.",
    )
    parser.add_argument("repository", nargs="?", type=Path, metavar="REPO", help="folder to write to")
    parser.add_argument(
        "--models",
        type=_count,
        metavar="N",
        help=f"number of models (default: one per --zoo name, or {DEFAULT_MODELS})",
    )
    parser.add_argument(
        "--zoo",
        type=_names,
        default=[],
        metavar="NAME,...",
        help="what to build in turn (default: rankers and a minilm)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="build complete models again")
    parser.add_argument("--list", action="store_true", help="list the models that can be built")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _batch(text: str) -> int | tuple[int, ...]:
    sizes = tuple(_count(size) for size in text.split(","))
    return sizes[0] if len(sizes) == 1 else sizes


def _rates(text: str) -> list[float]:
    return [_positive(rate) for rate in text.split(",")]


def _bursts(text: str) -> tuple[float, float]:
    spans = _rates(text)
    if len(spans) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two spans of seconds, ON_S,OFF_S")
    return spans[0], spans[1]


def _text_size(text: str) -> tuple[int, int]:
    sizes = [_count(size) for size in text.split(",")]
    if len(sizes) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two numbers of tokens, PROMPT,OUTPUT")
    return sizes[0], sizes[1]


def _percentage(text: str) -> float:
    value = _positive(text)
    if value > 100:
        raise argparse.ArgumentTypeError(f"{text!r} is above 100")
    return value


def _positive(text: str) -> float:
    value = _not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _not_negative(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is below 0")
    return value


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return names


class _Together(argparse.Action):
    """Joins the models of repeated flags, so that none is silently dropped."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        known = getattr(namespace, self.dest)
        if twice := sorted(known.keys() & values.keys()):
            raise argparse.ArgumentError(self, f"{twice[0]} is there twice")
        setattr(namespace, self.dest, {**known, **values})


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in _names(text):
        name, equals, weight = item.partition("=")
        if name in weights:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        weights[name] = _positive(weight) if equals else 1.0
    return weights
