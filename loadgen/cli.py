"""The command line: `loadgen` runs a load, `loadgen prepare` writes a repository of models."""

import argparse
import asyncio
import math
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from rich.console import Console

from cohabit.loadgen.errors import LoadgenError, UsageError
from cohabit.loadgen.load import Load

if TYPE_CHECKING:
    from cohabit.loadgen.client import Credentials
    from cohabit.loadgen.report import Report

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE, EXIT_INVALID, EXIT_INTERRUPTED = 1, 2, 3, 130
DEFAULT_PERCENTILE = 99.0
_LAYOUTS = ["partitioned", "resident", "time_shared"]
DEFAULT_MODELS = 16
DEFAULT_MEMORY = "25%"
WIDTH = 120
"""Columns of output that is not a terminal."""

_EPILOG = """commands:
  loadgen prepare REPO      write a repository of models (prepare --list shows them)
  loadgen compare           measure several layouts on the same models and the same requests
  loadgen report A.json     draw runs as one HTML page, and compare them

examples:
  loadgen --models 16 --rate 300                    start a server, measure it, stop it
  loadgen --url 127.0.0.1:8000 --rate 300 --output run.json
  loadgen --url grpc://127.0.0.1:8001 --model minilm=3,ranker_00=1
  loadgen --url 127.0.0.1:8000 --find-rate --slo-ms 50

exit status: 0 every request was answered and the SLO met, if one was given; 1 not so; 2 the command line is wrong;
3 the run is invalid, since requests were sent late; 130 the run was interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status, as the help explains."""
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
    credentials = _credentials_of(options)
    repository = None if options.url else _repository(options, Console(stderr=True, emoji=False))
    if repository is not None and load.inputs is None and any(repository.glob("*/sample.json")):
        load = msgspec.structs.replace(load, inputs=str(repository))
    reports = _async(lambda: _measure(options, load, credentials, repository))

    from cohabit.loadgen.report import write_reports

    if options.output is not None:
        write_reports(options.output, reports, as_list=bool(options.sweep or options.find_rate))
    if options.find_rate and any(report.meets_slo and not report.generator_was_late for report in reports):
        return EXIT_INTERRUPTED if reports[-1].interrupted else 0
    return max(map(_status, reports))


def _status(report: "Report") -> int:
    if report.interrupted:
        return EXIT_INTERRUPTED
    if report.generator_was_late:
        return EXIT_INVALID
    return 0 if report.all_answered and report.meets_slo else EXIT_FAILED


def _load_of(options: argparse.Namespace) -> Load:
    """Raises UsageError for options that contradict each other."""
    if options.weights and options.zipf:
        raise UsageError("--zipf and --model contradict each other; give weights as --model NAME=WEIGHT,...")
    if options.model_count and options.weights and options.model_count != len(options.weights):
        raise UsageError(f"--models {options.model_count}, but --model names {len(options.weights)}")
    if options.url and (options.repository or options.memory or options.layout):
        raise UsageError("--repository, --memory and --layout are for a server started here; leave out --url")
    if options.output and not options.output.parent.is_dir():
        raise UsageError(f"--output {options.output}: there is no folder {options.output.parent}")
    if options.trace and (options.weights or options.zipf or options.bursts_s or options.concurrency):
        raise UsageError("--trace has times and models; leave out --model, --zipf, --bursts and --concurrency")
    if options.concurrency and (options.bursts_s or options.processes > 1):
        raise UsageError("--concurrency is a closed loop in one process; leave out --bursts and --processes")
    if (options.sweep or options.find_rate) and (options.trace or options.concurrency):
        raise UsageError("--sweep and --find-rate set the rate; leave out --trace and --concurrency")
    if options.sweep and options.find_rate:
        raise UsageError("--sweep and --find-rate contradict each other")
    if options.find_rate and options.slo_s is None:
        raise UsageError("--find-rate needs a latency to keep to: give --slo-ms")
    if options.inputs and not Path(options.inputs).exists():
        raise UsageError(f"--inputs {options.inputs}: there is no such file or folder")
    fields = {name: getattr(options, name) for name in Load.__struct_fields__}
    if options.slo_s is None:
        fields["slo_s"] = Load().slo_s
    elif options.slo_percentile is None:
        fields["slo_percentile"] = DEFAULT_PERCENTILE
    return Load(**fields)


def _credentials_of(options: argparse.Namespace) -> "Credentials":
    from cohabit.loadgen.client import Credentials

    if options.ca is not None and not options.ca.is_file():
        raise UsageError(f"--ca {options.ca}: there is no such file")
    if options.token_file is None:
        return Credentials(ca=options.ca)
    try:
        lines = [line.strip() for line in options.token_file.read_text().splitlines()]
    except OSError as error:
        raise UsageError(f"--token-file {options.token_file}: {error.strerror}") from error
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise UsageError(f"--token-file {options.token_file}: it has no token")
    return Credentials(tokens[0], options.ca)


async def _measure(
    options: argparse.Namespace, load: Load, credentials: "Credentials", repository: Path | None
) -> "list[Report]":
    if repository is None:
        return await _runs(options.url, load, credentials, options)

    from cohabit.loadgen.server_process import running_server, server_command

    memory = options.memory or DEFAULT_MEMORY
    console = Console(stderr=True, emoji=False)
    console.print(f"serving {repository} with --memory {memory}", soft_wrap=True, highlight=False, markup=False)
    command = server_command(options.server, repository, memory, options.layout)
    with console.status("") as status:
        async with running_server(command, options.patience, lambda text: status.update(text)) as url:
            status.stop()
            return await _runs(url, load, credentials, options)


async def _runs(url: str, load: Load, credentials: "Credentials", options: argparse.Namespace) -> "list[Report]":
    """Run the load, at one rate or several, and print each report."""
    from cohabit.loadgen.report import print_report
    from cohabit.loadgen.run import run_load
    from cohabit.loadgen.search import find_rate, sweep

    console = console_for_output()

    async def measure(rate_per_s: float) -> "Report":
        at_rate = msgspec.structs.replace(load, rate_per_s=rate_per_s)
        return await run_load(url, at_rate, credentials, keep_interrupted=True)

    async def measure_and_print(rate_per_s: float) -> "Report":
        report = await measure(rate_per_s)
        print_report(report, console)
        return report

    def show(report: "Report") -> None:
        verdict = "meets the SLO" if report.meets_slo else "misses the SLO"
        if report.generator_was_late:
            verdict = "invalid, the generator was late"
        console.print(
            f"{report.rate_per_s:8.1f}/s: {verdict}, {report.within_slo:.2%} within {report.slo_s * 1e3:g} ms"
        )

    if not options.find_rate:
        return await sweep(measure_and_print, options.sweep or [load.rate_per_s])
    found, reports = await find_rate(measure, load.rate_per_s, show)
    if found is None:
        console.print("no rate was found that meets the SLO")
    else:
        print_report(next(r for r in reports if r.rate_per_s == found and r.meets_slo), console)
        console.print(f"[bold]highest rate that meets the SLO: {found:.1f}/s[/bold]")
    return reports


def console_for_output() -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_sized else WIDTH, emoji=False)


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


def _report(argv: Sequence[str]) -> int:
    from cohabit.loadgen.page import write_page, write_pictures
    from cohabit.loadgen.report import print_report, read_reports

    options = _report_parser().parse_args(argv)
    series = {path.stem: read_reports(path) for path in options.files}
    if len(series) < len(options.files):
        raise UsageError("two files have the same name; their runs are named after it")
    console = console_for_output()
    if options.html is not None:
        write_page(options.html, series)
    if options.png is not None:
        write_pictures(options.png, series)
    if options.html is None and options.png is None:
        for name, reports in series.items():
            for report in reports:
                console.rule(f"{name}, {report.rate_per_s:g}/s")
                print_report(report, console)
    return 0


def _compare(argv: Sequence[str]) -> int:
    from cohabit.loadgen.page import write_page
    from cohabit.loadgen.report import Report, write_reports

    options = _compare_parser().parse_args(argv)
    load, credentials = _load_of(options), _credentials_of(options)
    console = Console(stderr=True, emoji=False)
    repository = _repository(options, console)
    if load.inputs is None and any(repository.glob("*/sample.json")):
        load = msgspec.structs.replace(load, inputs=str(repository))
    options.output_folder.mkdir(parents=True, exist_ok=True)
    series: dict[str, list[Report]] = {}
    for layout in options.layouts:
        console.rule(layout)
        memory = "100%" if layout == "resident" else options.memory
        own = argparse.Namespace(**{**vars(options), "layout": layout, "memory": memory})
        series[layout] = _async(partial(_measure, own, load, credentials, repository))
        write_reports(options.output_folder / f"{layout}.json", series[layout], as_list=True)
        write_page(options.output_folder / "compare.html", series)
        if series[layout][-1].interrupted:
            break
    console.print(f"written: {options.output_folder / 'compare.html'}", soft_wrap=True, markup=False)
    return max(_status(report) for reports in series.values() for report in reports)


_COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {"prepare": _prepare, "report": _report, "compare": _compare}


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


def _compare_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen compare",
        description="Serve the same models with one layout after the other, send each the same requests, and write"
        " OUTPUT/LAYOUT.json and OUTPUT/compare.html. The layout resident has memory for all weights.",
    )
    parser.add_argument(
        "--layouts", type=_names, default=_LAYOUTS, metavar="NAME,...", help=f"(default: {','.join(_LAYOUTS)})"
    )
    parser.add_argument(
        "--rates", dest="sweep", type=_rates, default=[100.0, 200.0, 300.0], metavar="PER_S,...",
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


def _report_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="loadgen report",
        description="Show runs that --output has written, as tables, or as a page or pictures. Further files are"
        " compared with the first, at the rates that both have.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")
    parser.add_argument(
        "--png", type=Path, metavar="FOLDER", help="write the charts as pictures (needs matplotlib)"
    )
    return parser


def _add_load(parser: argparse.ArgumentParser) -> None:
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
    add(load, "--batch", "batch", _batch, "N[,N...]", "rows of a request; several sizes are drawn from")
    add(load, "--seed", "seed", int, "N", "seed of arrival times, choice of models and inputs")
    add(load, "--cv", "cv", _not_negative, "CV", "variation of the gaps: 1 Poisson, 0 constant, else gamma")
    add(load, "--bursts", "bursts_s", _bursts, "ON_S,OFF_S", "requests only in the first of two spans, in turn")
    add(load, "--trace", "trace", str, "FILE.csv", "replay requests: columns time (s) and model")
    add(load, "--concurrency", "concurrency", _count, "N", "closed loop of N clients in the place of a rate")
    add(load, "--processes", "processes", _count, "N", "sender processes")
    text = "requests: .npz, .jsonl, or a folder with one per model, such as a repository with sample.json"
    add(load, "--inputs", "inputs", str, "PATH", text)
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
        help="count answers that differ between identical requests (bits), differ by more than rounding (close), or"
        " are not the outputs in --inputs",
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--slo-ms",
        dest="slo_s",
        type=lambda text: _positive(text) / 1e3,
        default=None,
        metavar="MS",
        help=f"SLO: latency of --slo-percentile; without it, {default.slo_s * 1e3:g} counts for goodput",
    )
    limits.add_argument(
        "--slo-percentile",
        type=_percentage,
        default=None,
        metavar="PERCENT",
        help=f"percentage of requests to answer within --slo-ms (default: {DEFAULT_PERCENTILE:g})",
    )
    add(limits, "--timeout", "timeout_s", _positive, "S", "seconds until a request fails")
    text = "most requests in flight; beyond it they are not sent, and counted so"
    add(limits, "--max-in-flight", "max_in_flight", _count, "N", text)


def _add_server(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    server = parser.add_argument_group("server")
    token = "bearer token to send: the file's first line that is neither empty nor a comment"
    server.add_argument("--token-file", type=Path, metavar="FILE", help=token)
    server.add_argument("--ca", type=Path, metavar="FILE", help="certificates to check the server's with")
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
        help="seconds until it has to be ready (default: %(default)g)",
    )
    return server


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


def _weights(text: str) -> dict[str, float]:
    weights: dict[str, float] = {}
    for item in _names(text):
        name, equals, weight = item.partition("=")
        if name in weights:
            raise argparse.ArgumentTypeError(f"{name} is there twice")
        weights[name] = _positive(weight) if equals else 1.0
    return weights
