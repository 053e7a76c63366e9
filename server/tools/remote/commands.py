"""The commands against a running server, from flags to what is printed."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from server.config.setting import parsed
from server.config.values import seconds
from server.errors import RemoteError
from server.tools.remote import tables
from server.tools.remote.client import Remote, read_token
from server.tools.remote.rows import Snapshot, snapshot
from server.tools.remote.samples import Samples

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """One command: what help says, which flags it has besides those of all, and what it does."""

    name: str
    help: str
    run: Callable[[argparse.Namespace, Console], int]
    add: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what every command needs to find a server."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server's HTTP port (default: %(default)s)"
    )
    parser.add_argument("--metrics-url", help="its metrics port (default: port 8002 of the same host)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="whose first token is shown to the server")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def _models(options: argparse.Namespace, out: Console) -> int:
    remote = _remote(options)
    index = remote.index()
    if options.json:
        return _print_json(index)
    out.print(tables.models(index, _metrics_if_any(remote)))
    return 0


def _load(options: argparse.Namespace, out: Console) -> int:
    for model in options.models:
        with out.status(f"loading {model}"):
            _remote(options).load(model)
        _done(options, out, "loaded", model)
    return 0


def _unload(options: argparse.Namespace, out: Console) -> int:
    for model in options.models:
        _remote(options).unload(model)
        _done(options, out, "unloaded", model)
    return 0


def _stats(options: argparse.Namespace, out: Console) -> int:
    found = _remote(options).statistics(options.model)
    if options.json:
        return _print_json(found)
    out.print(tables.statistics(found))
    return 0


def _top(options: argparse.Namespace, out: Console) -> int:
    """Show a live view until interrupted; one snapshot where nobody watches."""
    remote = _remote(options)
    interval_s = parsed("--interval", options.interval, seconds)
    watcher = _Watcher(remote, interval_s)
    if options.json:
        return _print_json(watcher.next())
    if not out.is_terminal:
        out.print(tables.top(watcher.next(), remote.url))
        return 0
    with Live(console=out, screen=True, auto_refresh=False) as live:
        try:
            while True:
                live.update(tables.top(watcher.next(), remote.url), refresh=True)
        except KeyboardInterrupt:
            return 0


class _Watcher:
    """Reads the metrics again and again."""

    def __init__(self, remote: Remote, interval_s: float) -> None:
        self._remote = remote
        self._interval_s = interval_s
        self._before = remote.metrics()
        self._read_s = time.monotonic()

    def next(self) -> Snapshot:
        """Wait for the next reading, and compare it with the one before."""
        time.sleep(max(self._read_s + self._interval_s - time.monotonic(), 0.0))
        now, now_s = self._remote.metrics(), time.monotonic()
        shown = snapshot(self._before, now, now_s - self._read_s)
        self._before, self._read_s = now, now_s
        return shown


def _remote(options: argparse.Namespace) -> Remote:
    token = None if options.token_file is None else read_token(options.token_file)
    return Remote(options.url, options.metrics_url, token, _TIMEOUT_S)


def _metrics_if_any(remote: Remote) -> Samples | None:
    try:
        return remote.metrics()
    except RemoteError:
        return None


def _done(options: argparse.Namespace, out: Console, what: str, model: str) -> None:
    if options.json:
        _print_json({what: model})
    else:
        out.print(f"{what} {model}", markup=False)


def _print_json(value: Any) -> int:
    print(msgspec.json.encode(value).decode())
    return 0


def _add_models(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="NAME")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="NAME", help="one model only")


def _add_interval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval", default="2", metavar="S", help="seconds between two readings (default: %(default)s)"
    )


COMMANDS = (
    Command("models", "list the models of a running server, and why one is not served", _models),
    Command("load", "load models into a running server", _load, _add_models),
    Command("unload", "unload models from a running server", _unload, _add_models),
    Command("stats", "show what a running server's models have done", _stats, _add_model),
    Command("top", "watch a running server", _top, _add_interval),
)
