"""The command line: `cohabit serve`, the commands for models and plans, and those that query a running server."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cohabit.planner.errors import CohabitError
from cohabit.server.commands import flags
from cohabit.server.commands.remote.commands import COMMANDS, RemoteCommand
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sources import add_flags, as_toml, read_settings
from cohabit.server.errors import ConfigError, RepositoryError
from cohabit.server.process_rights import allow_connections, no_new_privileges

if TYPE_CHECKING:
    from rich.status import Status

    from cohabit.server.engine_host import OnProgress
    from cohabit.server.serve import Server

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130

Tell = Callable[..., None]
"""Takes an event's name, its text for people, and its fields for programs; writes one or the other to stderr."""

_log = logging.getLogger("cohabit.cli")

_WIDE = 150
"""Columns of output that is not a terminal."""

_PROGRESS_LINE_S = 1.5

_EXAMPLES = """examples:
  cohabit serve ./models --memory 8GiB
  cohabit serve ./models --memory 25% --store file --link-bandwidth 400MB/s
  cohabit serve ./models --memory 8GiB --model-rate resnet50=40 --model-rate bert=5
  cohabit serve --config cohabit.toml --print-config
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 after a clean stop, 1 for a failure, 2 for a wrong command line."""
    if argv is None:  # this process is the command's own
        os.environ["PYTHONSAFEPATH"] = "1"  # its children import nothing from the folder that they are started in
    code = _run(argv)
    if argv is None and any(thread.daemon and thread.is_alive() for thread in threading.enumerate()):
        # A thread of an interrupted load or a hung device cannot be ended; do not wait for it.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    errors = Console(file=sys.stderr, highlight=False, emoji=False)
    try:
        return int(options.run(options, errors))
    except CohabitError as error:
        from cohabit.server.log import escaped

        for line in f"cohabit: {error}".split("\n"):
            errors.print(escaped(line), markup=False, soft_wrap=True)
        return _status_of(error)
    except KeyboardInterrupt:
        errors.print("cohabit: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed our output; flushing the rest at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _status_of(error: CohabitError) -> int:
    return EXIT_USAGE if isinstance(error, ConfigError | RepositoryError) else EXIT_FAILED


def _run_serve(options: argparse.Namespace, errors: Console) -> int:
    effective = read_settings(options, os.environ)
    if options.print_config:
        print(as_toml(effective), end="")
        return 0
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # other processes are spawned, never forked
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log has bytes of clients in it as they came
    import uvloop

    from cohabit.server.log import configure_logging
    from cohabit.server.resources import refuse_impossible

    no_new_privileges()
    allow_connections()
    configure_logging(effective.config.log_format)
    try:
        refuse_impossible(effective.config, effective.origins)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve_until_stopped(effective.config, errors))
    except CohabitError as error:
        if effective.config.log_format != "json":
            raise
        _log.error("the server has ended", extra={"fields": {"reason": str(error)}})
        return _status_of(error)


def _run_tool(module: str) -> Callable[[argparse.Namespace, Console], int]:
    """Return a command that imports its module, and with it the planner, when it runs."""

    def run(options: argparse.Namespace, errors: Console) -> int:
        return int(import_module(f"cohabit.server.commands.{module}").run(options, _stdout(), errors))

    return run


def _stdout() -> Console:
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, emoji=False, width=None if terminal else _WIDE)


async def serve_until_stopped(config: ServeConfig, console: Console) -> int:
    """Listen, load, and serve until SIGTERM or SIGINT; returns the exit status."""
    from cohabit.server.serve import Server

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(config)
    is_failed = False
    as_json = config.log_format == "json"
    tell: Tell = _as_records if as_json else partial(_as_text, console)
    if config.token_files or config.control_token_files:
        loop.add_signal_handler(signal.SIGHUP, lambda: loop.create_task(server.tokens.reread()))
    try:
        await server.start()
        _announce(server)
        with nullcontext() if as_json else console.status("loading") as status:
            loading = asyncio.create_task(server.load(_progress(status, tell, is_terminal=console.is_terminal)))
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            _report(server, loading.result(), tell)
            failed = asyncio.create_task(server.failed())
            await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
            is_failed = failed.done()
            failed.cancel()
            tell("stopping", "stopping: answering the requests in flight")
        else:
            loading.cancel()
    finally:
        clean = await server.stop()
    return 0 if clean and not is_failed else EXIT_FAILED


def _as_records(event: str, text: str, **fields: object) -> None:
    _log.info(event, extra={"fields": fields})


def _as_text(console: Console, event: str, text: str, **fields: object) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _progress(status: "Status | None", tell: Tell, *, is_terminal: bool) -> "OnProgress":
    """Show the newest stage on a terminal; elsewhere tell it every few seconds."""
    written_s = time.monotonic()

    def show(model: str, stage: str) -> None:
        nonlocal written_s
        if status is not None:
            status.update(Text(f"{model}: {stage}"))
        if not (status and is_terminal) and time.monotonic() - written_s > _PROGRESS_LINE_S:
            written_s = time.monotonic()
            tell("loading", f"loading: {model}: {stage}", model=model, stage=stage)

    return show


def _announce(server: "Server") -> None:
    print(f"http: {server.http_url}")
    print(f"metrics: {server.metrics_url or 'off'}")
    print(f"grpc: {server.grpc_address or 'off'}", flush=True)


def _report(server: "Server", memory_map: str, tell: Tell) -> None:
    if memory_map:
        tell("memory map", memory_map, lines=memory_map.split("\n"))
    entries = list(server.client.catalog)
    count, total = sum(entry.info is not None for entry in entries), len(entries)
    url = server.http_url
    tell("ready", f"ready: {count} of {total} models at {url}", served=count, models=total, url=url)


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
    for name, (module, add, summary, description) in _TOOLS.items():
        tool = commands.add_parser(
            name, help=summary, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add(tool)
        tool.set_defaults(run=_run_tool(module))
    for command in COMMANDS:
        _add_remote(commands, command)
    return parser


def _add_remote(commands: "argparse._SubParsersAction[argparse.ArgumentParser]", command: RemoteCommand) -> None:
    parser = commands.add_parser(command.name, help=command.help, description=f"{command.help.capitalize()}.")
    command.add_flags(parser)
    parser.set_defaults(run=lambda options, errors: command.run(options, _stdout()))


_TOOLS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None], str, str]] = {
    # command: module, flags, summary, description
    "import": (
        "import_model",
        flags.add_import_flags,
        "make a repository entry of a Hugging Face model, a torch.nn.Module or a checkpoint",
        "Export a model with a dynamic batch, compare it with eager PyTorch, and write it to a model repository with\n"
        "its configuration. Importing a model runs its code.",
    ),
    "check": (
        "check",
        flags.add_check_flags,
        "say whether a model can be served, in how much memory, and why not",
        "Say whether a model can be served and in how much memory: its inputs and outputs, the least memory, and what\n"
        "each memory size is predicted to cost in latency.",
    ),
    "plan": (
        "plan",
        flags.add_plan_flags,
        "plan how a model runs in some memory, and write the plans to files",
        "Plan how a model runs in some memory: which parameters stay resident, when the others are copied, and to\n"
        "which addresses. Writes plans, graphs and profiles as JSON files.",
    ),
    "export-bundle": (
        "export_bundle",
        flags.add_bundle_flags,
        "prepare a repository for one memory size, to be served on another machine",
        "Lower, measure and plan every model of a repository for one memory size, and write all that `cohabit serve`\n"
        "needs to a folder. It serves that folder without archives, worker processes or searches.",
    ),
    "show": (
        "show",
        flags.add_show_flags,
        "check a plan and draw it in the terminal or as an HTML page",
        "Check a plan and draw it: lanes and memory over time, stalls and copies.",
    ),
    "compare-plans": (
        "compare_plans",
        flags.add_compare_flags,
        "compare the searchers on one model, batch size and memory size",
        "Run every searcher on one model, batch size and memory size, one after the other.",
    ),
    "tile": (
        "tile",
        flags.add_tile_flags,
        "choose how the arrays of a NumPy program are tiled over workers, and run it",
        "Choose how the arrays of a NumPy program are tiled over workers so that the fewest bytes move between them,\n"
        "and run the program on torch.distributed.",
    ),
    "profile": (
        "profile",
        flags.add_profile_flags,
        "measure a model's ops on a device, and the device's link",
        "Measure a model on a device: time per op, bandwidth of the link in both directions, and how much concurrent\n"
        "copies and ops slow each other down. The cache keeps the measurements for the other commands.",
    ),
}


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cohabit.server.protocol.descriptions import product_version

        print(f"cohabit {product_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
