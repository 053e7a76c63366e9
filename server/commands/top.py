"""`cohabit top`: watches the request rates, latencies and memory of a running server."""

import argparse
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
from rich.console import Console
from rich.live import Live

from cohabit.server.commands.remote.client import RemoteServer, add_server_flags, server_of
from cohabit.server.commands.remote.top import Snapshot, snapshot, view
from cohabit.server.config.setting import parsed
from cohabit.server.config.values import seconds


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Watch the request rates, latencies and memory of a running server."
    parser.add_argument(
        "--interval", default="2", metavar="SECONDS", help="time between two readings (default: %(default)s)"
    )
    add_server_flags(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Show a live view on a terminal until interrupted; elsewhere print one snapshot."""
    server = server_of(options)
    snapshots = _snapshots(server, parsed("--interval", options.interval, seconds))
    if options.json:
        print(msgspec.json.encode(next(snapshots)).decode())
        return 0
    if not out.is_terminal:
        out.print(view(next(snapshots), server.url))
        return 0
    with Live(console=out, screen=True, auto_refresh=False) as live, suppress(KeyboardInterrupt):
        for shown in snapshots:
            live.update(view(shown, server.url), refresh=True)
    return 0


def _snapshots(server: RemoteServer, interval_s: float) -> Iterator[Snapshot]:
    """Read the metrics at intervals, and compare each reading with the one before."""
    before, read_s = server.metrics(), time.monotonic()
    while True:
        time.sleep(max(read_s + interval_s - time.monotonic(), 0.0))
        now, now_s = server.metrics(), time.monotonic()
        yield snapshot(before, now, now_s - read_s)
        before, read_s = now, now_s
