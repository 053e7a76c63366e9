"""The command line: `cohabit serve`, the commands that plan, and those that ask a running server."""

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from planner.errors import CohabitError, UnknownSearcher
from server.config.config import ServeConfig
from server.config.sources import add_flags, as_toml, read_settings
from server.errors import ConfigError, RepositoryError
from server.tools.options import add_compare_flags, add_plan_flags, add_profile_flags, add_show_flags
from server.tools.remote.commands import COMMANDS, Command
from server.tools.remote.commands import add_flags as add_remote_flags

if TYPE_CHECKING:
    from rich.status import Status

    from server.serve import OnProgress, Server

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

_WIDE = 150
"""Columns where there is no terminal that says how many it has."""

_PROGRESS_LINE_S = 1.5

_EXAMPLES = """examples:
  cohabit serve ./models --memory 8GiB
  cohabit serve ./models --memory 25% --store file --link-bandwidth 400MB/s
  cohabit serve ./models --memory 8GiB --model-rate resnet50=40 --model-rate bert=5
  cohabit serve --config cohabit.toml --print-config
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 after a clean stop, 1 for a failure, 2 for an impossible command line."""
    code = _run(argv)
    if argv is None and any(thread.daemon and thread.is_alive() for thread in threading.enumerate()):
        # A load cut short, or a device that hangs: its thread cannot be ended and must not outlive us.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    errors = Console(stderr=True, highlight=False)
    try:
        return int(options.run(options, errors))
    except CohabitError as error:
        errors.print(f"cohabit: {error}", markup=False, soft_wrap=True)
        return EXIT_USAGE if isinstance(error, ConfigError | RepositoryError | UnknownSearcher) else EXIT_FAILED
    except KeyboardInterrupt:
        errors.print("cohabit: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough; what is left of it must not fail again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run_serve(options: argparse.Namespace, errors: Console) -> int:
    effective = read_settings(options, os.environ)
    if options.print_config:
        print(as_toml(effective), end="")
        return 0
    return _serve(effective.config, errors)


def _run_plan(options: argparse.Namespace, errors: Console) -> int:
    from server.tools import plan as making
    from server.tools.options import plan_options

    return making.run(plan_options(options), _stdout(), errors)


def _run_show(options: argparse.Namespace, errors: Console) -> int:
    from server.tools import show as showing
    from server.tools.options import show_options

    return showing.run(show_options(options), _stdout(), errors)


def _run_compare(options: argparse.Namespace, errors: Console) -> int:
    from server.tools import compare as comparing
    from server.tools.options import compare_options

    return comparing.run(compare_options(options), _stdout(), errors)


def _run_profile(options: argparse.Namespace, errors: Console) -> int:
    from server.tools import profile as profiling
    from server.tools.options import profile_options

    return profiling.run(profile_options(options), _stdout(), errors)


def _stdout() -> Console:
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, emoji=False, width=None if terminal else _WIDE)


async def serve_until_stopped(config: ServeConfig, console: Console) -> int:
    """Listen, load, and serve until SIGTERM or SIGINT; returns the exit status."""
    from server.serve import Server

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(config)
    if config.token_files or config.control_token_files:
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(server.reread_tokens()))
    clean = False
    try:
        await server.start()
        _announce(server)
        with console.status("loading") as status:
            loading = asyncio.create_task(server.load(_shown_by(status, console)))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            _report(server, loading.result(), console)
            await stopped
            console.print("stopping: answering the requests in flight")
        else:
            loading.cancel()
    finally:
        clean = await server.stop()
    return 0 if clean else EXIT_FAILED


def _shown_by(status: "Status", console: Console) -> "OnProgress":
    """Show the newest stage on a terminal; elsewhere write a line every few seconds."""
    written_s = time.monotonic()

    def show(model: str, stage: str) -> None:
        nonlocal written_s
        status.update(Text(f"{model}: {stage}"))
        if not console.is_terminal and time.monotonic() - written_s > _PROGRESS_LINE_S:
            written_s = time.monotonic()
            console.print(f"loading: {model}: {stage}", markup=False, soft_wrap=True)

    return show


def _serve(config: ServeConfig, console: Console) -> int:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # other processes are spawned, never forked
    import uvloop

    from server.log import configure_logging

    configure_logging(config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve_until_stopped(config, console))


def _announce(server: "Server") -> None:
    print(f"http: {server.http_url}")
    print(f"metrics: {server.metrics_url}")
    print(f"grpc: {server.grpc_address or 'off'}", flush=True)


def _report(server: "Server", memory_map: str, console: Console) -> None:
    if memory_map:
        console.print(memory_map, markup=False, soft_wrap=True)
    entries = list(server.client.catalog)
    count, total = sum(entry.info is not None for entry in entries), len(entries)
    console.print(f"ready: {count} of {total} models at {server.http_url}", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cohabit", description="Serve many models from one device whose memory cannot hold them all."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        usage="cohabit serve REPOSITORY --memory SIZE [options]",
        help="serve a model repository to KServe v2 and Triton clients",
        description="Serve the models of a repository to KServe v2 and Triton clients.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(serve)
    serve.set_defaults(run=_run_serve)
    _add(
        commands.add_parser(
            "plan",
            help="plan how a model runs in some memory, and write the plans to files",
            description="Plan how a model runs in some memory: what stays, what is copied when, and which bytes it"
            " goes to. Writes plans, graphs and profiles as JSON files.",
        ),
        add_plan_flags,
        _run_plan,
    )
    _add(
        commands.add_parser(
            "show",
            help="check a plan, and draw it in the terminal or on an HTML page",
            description="Check a plan and draw it: lanes and memory over time, stalls, what is copied. With --html"
            " as one page that needs nothing else.",
        ),
        add_show_flags,
        _run_show,
    )
    _add(
        commands.add_parser(
            "compare-plans",
            help="compare the searchers on one model, batch size and memory",
            description="Run every searcher on one model, batch size and memory, one after the other.",
        ),
        add_compare_flags,
        _run_compare,
    )
    _add(
        commands.add_parser(
            "profile",
            help="measure what a model costs on a device, and the device's link",
            description="Measure a model on a device: time per op, the link both ways, and what copies and ops cost"
            " one another. What is measured is kept, and used by the other commands.",
        ),
        add_profile_flags,
        _run_profile,
    )
    for command in COMMANDS:
        _add_remote(commands, command)
    return parser


def _add_remote(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: Command) -> None:
    parser = commands.add_parser(command.name, help=command.help, description=f"{command.help.capitalize()}.")
    command.add(parser)
    add_remote_flags(parser)
    parser.set_defaults(run=lambda options, errors: command.run(options, _stdout()))


def _add(
    parser: argparse.ArgumentParser,
    add: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace, Console], int],
) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add(parser)
    parser.set_defaults(run=run)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from server.protocol.descriptions import product_version

        print(f"cohabit {product_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
