"""`cohabit models`: lists the models of a running server and why some are not served."""

import argparse

import msgspec
from rich.console import Console, Group
from rich.text import Text

from cohabit.server.activations import workspace_words
from cohabit.server.commands.remote import tables
from cohabit.server.commands.remote.client import RemoteServer, add_server_flags, server_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models of a running server, their memory, and why some are not served."
    add_server_flags(parser)
    tables.add_watch(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    server = server_of(options)
    if options.watch:
        tables.watch(out, lambda: _shown(server))
    index = server.index()
    if options.json:
        print(msgspec.json.encode(index).decode())
    else:
        out.print(_shown(server, index), soft_wrap=True)
    return 0


def _shown(server: RemoteServer, index: list[dict[str, str]] | None = None) -> Group:
    metrics = server.metrics()
    words = workspace_words(metrics.activations)
    said = [Text(f"of a workspace, {words}")] if words else []
    said += tables.provisional(metrics.versions, metrics.plans)
    return Group(tables.models(server.index() if index is None else index, metrics.versions, metrics.plans), *said)
