"""Command line: `loadgen` runs a load, `loadgen prepare` writes a repository of models."""

import argparse
import asyncio
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
from cohabit.loadgen.flags import (
    DEFAULT_MEMORY,
    DEFAULT_MODELS,
    DEFAULT_PERCENTILE,
    compare_parser,
    prepare_parser,
    report_parser,
    run_parser,
)
from cohabit.loadgen.load import Load

if TYPE_CHECKING:
    from cohabit.loadgen.client import Credentials
    from cohabit.loadgen.report import Report

_T = TypeVar("_T")

EXIT_FAILED, EXIT_USAGE, EXIT_INVALID, EXIT_INTERRUPTED = 1, 2, 3, 130
WIDTH = 120
"""Columns of output to anything but a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns its exit status; the help lists them."""
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
    options = run_parser().parse_args(argv)
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
    """Return the load of the options. Raises UsageError for contradictory options."""
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
    """Run the load at one rate or several, and print the reports."""
    from cohabit.loadgen.report import print_report, runs_table, verdict
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
        console.print(
            f"{report.rate_per_s:8.1f}/s: {verdict(report)}, {report.within_slo:.2%} within {report.slo_s * 1e3:g} ms"
        )

    if not options.find_rate:  # one rate, or a sweep: every run has its report printed
        swept = await sweep(measure_and_print, options.sweep or [load.rate_per_s])
        if len(swept) > 1:
            console.print(runs_table(swept))
        return swept
    found = await find_rate(measure, load.rate_per_s, show)  # a search prints only the best run's report
    if found.rate_per_s is not None:
        print_report(next(r for r in found.reports if r.rate_per_s == found.rate_per_s), console)
    rate = "none" if found.rate_per_s is None else f"{found.rate_per_s:.1f}/s"
    what = (
        "highest rate that meets the SLO" if found.stopped is None else "highest rate that was seen to meet the SLO"
    )
    console.print(f"[bold]{what}: {rate}[/bold]", highlight=False)
    if found.stopped is not None:
        console.print(f"[yellow]the search has stopped:[/yellow] {found.stopped}", highlight=False)
    return found.reports


def console_for_output() -> Console:
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if is_sized else WIDTH, emoji=False)


def _repository(options: argparse.Namespace, console: Console) -> Path:
    """Return the repository to serve. Without --repository, writes one to the user's cache."""
    if options.repository is not None:
        if not any(options.repository.glob("*/*/model.pt2")):
            raise UsageError(f"--repository {options.repository}: no NAME/VERSION/model.pt2 in it")
        return Path(options.repository)
    from cohabit.loadgen.zoo.repository import prepare_visibly, recipes

    count = options.model_count or DEFAULT_MODELS
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    repository = cache / "cohabit" / f"loadgen-{count}-seed{options.seed}"
    prepare_visibly(repository, recipes(count, seed=options.seed), force=False, console=console)
    return repository


def _prepare(argv: Sequence[str]) -> int:
    from cohabit.loadgen.zoo.repository import prepare_visibly, print_repository, print_zoo, recipes

    parser = prepare_parser()
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
    from cohabit.loadgen.drawing.page import write_page
    from cohabit.loadgen.report import print_report, read_reports

    options = report_parser().parse_args(argv)
    series = {path.stem: read_reports(path) for path in options.files}
    if len(series) < len(options.files):
        raise UsageError("two files have the same name; their runs are named after it")
    console = console_for_output()
    if options.html is not None:
        write_page(options.html, series)
    else:
        for name, reports in series.items():
            for report in reports:
                console.rule(f"{name}, {report.rate_per_s:g}/s")
                print_report(report, console)
    return 0


def _compare(argv: Sequence[str]) -> int:
    from cohabit.loadgen.drawing.page import write_page
    from cohabit.loadgen.report import Report, write_reports

    options = compare_parser().parse_args(argv)
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
    """Run a coroutine. SIGTERM cancels it like Ctrl-C, so that a server started here is stopped."""
    import uvloop

    async def with_sigterm() -> _T:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        return await make()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(with_sigterm())
