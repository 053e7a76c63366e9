"""`cohabit models`, `load`, `unload` and `stats`: commands that query a running server."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cohabit.server.errors import RemoteError
from cohabit.server.tools.remote import tables
from cohabit.server.tools.remote.client import RemoteServer, read_token

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


COMMANDS = (
    RemoteCommand("models", "list the models of a running server and why some are not served", _models),
    RemoteCommand("load", "load models into a running server", _load, _add_models),
    RemoteCommand("unload", "unload models from a running server", _unload, _add_models),
    RemoteCommand("stats", "print request statistics of a running server's models", _stats, _add_model),
)
