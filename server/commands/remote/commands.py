"""`cohabit models`, `load`, `unload`, `stats` and `top`: commands that query a running server."""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from cohabit.server.commands.remote import tables
from cohabit.server.commands.remote.client import RemoteServer, read_token
from cohabit.server.commands.remote.top import Snapshot, snapshot, view
from cohabit.server.config.setting import parsed
from cohabit.server.config.values import seconds
from cohabit.server.errors import RemoteError

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class RemoteCommand:
    name: str
    help: str
    run: Callable[[argparse.Namespace, Console], int]
    add: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    """Declares the flags that only this command has."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        self.add(parser)
        parser.add_argument(
            "--url", default="http://127.0.0.1:8000", help="the server's HTTP port (default: %(default)s)"
        )
        parser.add_argument(
            "--token-file", type=Path, metavar="FILE", help="file whose first token is sent to the server"
        )
        parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _models(options: argparse.Namespace, out: Console) -> int:
    server = _server(options)
    index = server.index()
    if options.json:
        return _print_json(index)
    out.print(tables.models(index, server.metrics()))
    return 0


def _load(options: argparse.Namespace, out: Console) -> int:
    for model in options.models:
        with out.status(f"loading {model}"):
            _server(options).load(model)
        _done(options, out, "loaded", model)
    return 0


def _unload(options: argparse.Namespace, out: Console) -> int:
    server = _server(options)
    known = {entry["name"] for entry in server.index()}
    if unknown := [model for model in options.models if model not in known]:
        raise RemoteError(f"{server.url} has no model '{unknown[0]}'; its models are {', '.join(sorted(known))}")
    for model in options.models:
        server.unload(model)
        _done(options, out, "unloaded", model)
    return 0


def _stats(options: argparse.Namespace, out: Console) -> int:
    found = _server(options).statistics(options.model)
    if options.json:
        return _print_json(found)
    out.print(tables.statistics(found))
    return 0


def _top(options: argparse.Namespace, out: Console) -> int:
    """Show a live view on a terminal until interrupted; elsewhere print one snapshot."""
    server = _server(options)
    snapshots = _snapshots(server, parsed("--interval", options.interval, seconds))
    if options.json:
        return _print_json(next(snapshots))
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


def _server(options: argparse.Namespace) -> RemoteServer:
    token = None if options.token_file is None else read_token(options.token_file)
    return RemoteServer(options.url, token, _TIMEOUT_S)


def _done(options: argparse.Namespace, out: Console, what: str, model: str) -> None:
    if options.json:
        _print_json({what: model})
    else:
        out.print(f"{what} {model}", markup=False)


def _print_json(value: Any) -> int:
    print(msgspec.json.encode(value).decode())
    return 0


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="NAME", help="models of its repository")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help="a model (default: all)")


def _add_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", default="2", metavar="SECONDS", help="time between two readings (default: %(default)s)"
    )


COMMANDS = (
    RemoteCommand("models", "list the models of a running server and why some are not served", _models),
    RemoteCommand("load", "load models into a running server", _load, _add_models),
    RemoteCommand("unload", "unload models from a running server", _unload, _add_models),
    RemoteCommand("stats", "print request statistics of a running server's models", _stats, _add_model),
    RemoteCommand("top", "watch the request rates, latencies and memory of a running server", _top, _add_interval),
)
