"""`cohabit serve`: serves a model repository to KServe v2 and Triton clients."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cohabit.planner.errors import CohabitError, format_bytes
from cohabit.server.commands import EXIT_FAILED, exit_status
from cohabit.server.config import sources
from cohabit.server.config.config import ServeConfig
from cohabit.server.repository.scan import require_repository
from cohabit.server.rights import no_new_privileges, raise_open_file_limit

if TYPE_CHECKING:
    from rich.status import Status

    from cohabit.server.serve import Server

Tell = Callable[..., None]
"""Takes an event's name, its text for people, and its fields for programs; writes the text or the fields to stderr."""

_log = logging.getLogger("cohabit.cli")

_PROGRESS_LINE_S = 1.5

_EXAMPLES = """examples:
  cohabit serve ./models --memory 8GiB
  cohabit serve ./models --memory 25% --store file --link-bandwidth 400MB/s
  cohabit serve ./models --memory 8GiB --rates resnet50=40 --rates bert=5
  cohabit serve --config cohabit.toml --print-config
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare every setting as a flag."""
    parser.usage = "cohabit serve REPOSITORY [--memory SIZE] [options]"
    parser.description = "Serve the models of a repository to KServe v2 and Triton clients."
    parser.epilog = _EXAMPLES
    sources.add_flags(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Serve until SIGTERM, SIGINT, or SIGHUP without token files; returns the exit status.

    Raises CohabitError if the server cannot start; a JSON log gets it instead.
    """
    from cohabit.server.config.machine import memory_left, refuse_impossible

    effective = sources.read_settings(options, os.environ, memory_left)
    if options.print_config:
        print(sources.as_toml(effective), end="")
        return 0
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # other processes are spawned, never forked
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log contains unescaped bytes from clients
    import uvloop

    from cohabit.server.log import configure_logging

    # While a thread writes the metrics of a thousand models, requests wait for the interpreter lock this long.
    sys.setswitchinterval(0.5e-3)
    no_new_privileges()
    raise_open_file_limit()
    configure_logging(effective.config.log_format)
    if effective.takes_memory_left:
        _tell_memory(effective, _teller(effective.config, errors))
    try:
        if effective.config.bundle is None:
            require_repository(effective.config.repository)
        refuse_impossible(effective.config, effective.origins)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve_until_stopped(effective.config, errors))
    except CohabitError as error:
        if effective.config.log_format != "json":
            raise
        _log.error("the server has ended", extra={"fields": {"reason": str(error)}})
        return exit_status(error)


async def serve_until_stopped(config: ServeConfig, console: Console) -> int:
    """Listen, load, and serve until a signal ends it. SIGHUP rereads token files, if any. Returns the exit status."""
    from cohabit.server.serve import Server

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    server = Server(config)
    is_failed = False
    as_json = config.log_format == "json"
    tell = _teller(config, console)
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
            await _report(server, loading.result(), tell)
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


def _teller(config: ServeConfig, console: Console) -> Tell:
    return _as_records if config.log_format == "json" else partial(_as_text, console)


def _tell_memory(effective: sources.ResolvedConfig, tell: Tell) -> None:
    """Report the memory size that is used by default, and its origin."""
    nbytes, origin = effective.config.process_memory_bytes, effective.origins["process_memory"]
    assert nbytes is not None
    text = f"memory: {format_bytes(nbytes)} for the whole server, {origin}; --memory and --process-memory give less"
    tell("memory", text, process_memory_bytes=nbytes, origin=origin)


def _as_records(event: str, text: str, **fields: object) -> None:
    _log.info(event, extra={"fields": fields})


def _as_text(console: Console, event: str, text: str, **fields: object) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _progress(status: "Status | None", tell: Tell, *, is_terminal: bool) -> Callable[[str, str], None]:
    """Show the newest stage on a terminal; elsewhere, report it once per _PROGRESS_LINE_S at most."""
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


async def _report(server: "Server", memory_map: str, tell: Tell) -> None:
    entries = list(server.client.catalog)
    if memory_map:
        device = (await server.client.report()).device
        tell(
            "memory map",
            memory_map,
            workspace_bytes=device.workspace_bytes,
            partition_bytes=device.partition_bytes,
            free_bytes=device.free_bytes,
            placed=[
                {"model": entry.name, "version": entry.version, **entry.footprint.fields}
                for entry in entries
                if entry.is_ready
            ],
        )
    count, total = sum(entry.info is not None for entry in entries), len(entries)
    url = server.http_url
    tell("ready", f"ready: {count} of {total} models at {url}", served=count, models=total, url=url)
