"""The command line: `loadgen` runs a load, `loadgen prepare` writes a repository of models."""

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from cohabit.loadgen.errors import LoadgenError, UsageError
from cohabit.loadgen.load import Load

if TYPE_CHECKING:
    from cohabit.loadgen.report import Report

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
DEFAULT_MODELS = 16
DEFAULT_MEMORY = "25%"
WIDTH = 120
"""Columns of output that is not a terminal."""

_EPILOG = """commands:
  loadgen prepare REPO      write a repository of models (prepare --list shows them)

examples:
  loadgen --models 16 --rate 300                    start a server, measure it, stop it
  loadgen --url 127.0.0.1:8000 --rate 300 --json run.json
  loadgen --url 127.0.0.1:8000 --model minilm=3,ranker_00=1

exit status: 0 every request was answered, 1 some were not, 2 the command line is wrong
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 if every request was answered, 1 if not, 2 for a wrong command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _COMMANDS.get(arguments[0]) if arguments else None
    errors = Console(stderr=True, emoji=False)
    try:
        return command(arguments[1:]) if command else _run(arguments)
    except LoadgenError as error:
        errors.print(f"loadgen: {error}", markup=False, highlight=False, soft_wrap=True)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        errors.print("loadgen: interrupted")
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # argparse
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE


def _run(argv: Sequence[str]) -> int:
    options = _run_parser().parse_args(argv)
    load = _load_of(options)
    repository = None if options.url else _repository(options, Console(stderr=True, emoji=False))
    report = _async(lambda: _measure(options, load, repository))

    import msgspec

    from cohabit.loadgen.report import print_report

    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    print_report(report, Console(width=None if is_sized else WIDTH, emoji=False))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if report.all_answered else EXIT_FAILED


def _load_of(options: argparse.Namespace) -> Load:
    """Raises UsageError for options that contradict each other."""
    if options.weights and options.zipf:
        raise UsageError("--zipf and --model contradict each other; give weights as --model NAME=WEIGHT,...")
    if options.model_count and options.weights and options.model_count != len(options.weights):
        raise UsageError(f"--models {options.model_count}, but --model names {len(options.weights)}")
    if options.url and (options.repository or options.memory or options.layout):
        raise UsageError("--repository, --memory and --layout are for a server started here; leave out --url")
    if options.json and not options.json.parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {options.json.parent}")
    return Load(**{name: getattr(options, name) for name in Load.__struct_fields__})


async def _measure(options: argparse.Namespace, load: Load, repository: Path | None) -> "Report":
    from cohabit.loadgen.run import run_load

    if repository is None:
        return await run_load(options.url, load)

    from cohabit.loadgen.server_process import running_server, server_command

    memory = options.memory or DEFAULT_MEMORY
    console = Console(stderr=True, emoji=False)
    console.print(f"serving {repository} with --memory {memory}", soft_wrap=True, highlight=False, markup=False)
    command = server_command(options.server, repository, memory, options.layout)
    with console.status("") as status:
        async with running_server(command, options.patience, lambda text: status.update(text)) as url:
            status.stop()
            return await run_load(url, load)


def _repository(options: argparse.Namespace, console: Console) -> Path:
    """Return the repository to serve; without --repository, write one to the user's cache."""
    if options.repository is not None:
        if not any(options.repository.glob("*/*/model.pt2")):
            raise UsageError(f"--repository {options.repository}: no NAME/VERSION/model.pt2 in it")
        return Path(options.repository)
    from cohabit.loadgen.repository import prepare_visibly, recipes

    count = options.model_count or DEFAULT_MODELS
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    repository = cache / "cohabit" / f"loadgen-{count}-seed{options.seed}"
    prepare_visibly(repository, recipes(count, seed=options.seed), force=False, console=console)
    return repository


def _prepare(argv: Sequence[str]) -> int:
    from cohabit.loadgen.repository import prepare_visibly, print_repository, print_zoo, recipes

    parser = _prepare_parser()
    options = parser.parse_args(argv)
    if options.list:
        print_zoo(Console(emoji=False))
        return 0
    if options.repository is None:
        parser.error("give the folder to write, or --list")
    chosen = recipes(options.models or len(options.zoo) or DEFAULT_MODELS, options.zoo, options.seed)
    prepared = prepare_visibly(options.repository, chosen, options.force, Console(stderr=True, emoji=False))
    print_repository(options.repository, prepared, Console(emoji=False))
    return 0


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"prepare": _prepare}


def _async(make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine; SIGTERM cancels it as Ctrl-C does, so that a server started here is stopped."""
    import uvloop

    async def with_sigterm() -> _T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await make()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_sigterm())


def _run_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen",
        usage="loadgen [options] | loadgen prepare REPO",
        description="Send requests to a KServe v2 / Triton server at times drawn beforehand (open loop), and report"
        " latencies from the intended send times. Without --url, start a Cohabit server for the length of the run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Load()

    def add(group: argparse._ActionsContainer, flag: str, field: str, kind: Any, metavar: str, text: str) -> None:
        value = getattr(default, field)
        note = f" (default: {value:g})" if isinstance(value, int | float) else ""
        group.add_argument(flag, dest=field, type=kind, default=value, metavar=metavar, help=text + note)

    load = parser.add_argument_group("load")
    text = f"use the first N ready models by name (default: all; without --url {DEFAULT_MODELS})"
    add(load, "--models", "model_count", _count, "N", text)
    add(load, "--model", "weights", _weights, "NAME[=WEIGHT],...", "use these models")
    add(load, "--zipf", "zipf", _not_negative, "S", "weigh the k-th model by 1/k**S; 0 is uniform")
    add(load, "--rate", "rate_per_s", _positive, "PER_S", "requests per second, all models together")
    add(load, "--duration", "duration_s", _positive, "S", "measured seconds")
    add(load, "--warmup", "warmup_s", _not_negative, "S", "seconds of load before the measurement")
    add(load, "--batch", "batch", _count, "N", "batch size of every request")
    add(load, "--seed", "seed", int, "N", "seed of arrival times, choice of models and inputs")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--slo-ms",
        dest="slo_s",
        type=lambda text: _positive(text) / 1e3,
        default=default.slo_s,
        metavar="MS",
        help=f"highest latency that counts as goodput (default: {default.slo_s * 1e3:g})",
    )
    add(limits, "--timeout", "timeout_s", _positive, "S", "seconds until a request fails")
    text = "unanswered requests above which further ones count as not sent"
    add(limits, "--max-in-flight", "max_in_flight", _count, "N", text)
    server = parser.add_argument_group("server")
    server.add_argument("--url", metavar="HOST:PORT", help="a running server")
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
    server.add_argument("--layout", metavar="NAME", help="its --layout (default: the server's)")
    server.add_argument(
        "--server", default="cohabit", metavar="COMMAND", help="command that starts it (default: %(default)s)"
    )
    server.add_argument(
        "--patience",
        type=_positive,
        default=600.0,
        metavar="S",
        help="seconds until it has to be ready (default: %(default)g)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    return parser


def _prepare_parser() -> argparse.ArgumentParser:
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


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in _names(text):
        name, equals, weight = item.partition("=")
        if name in weights:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        weights[name] = _positive(weight) if equals else 1.0
    return weights
