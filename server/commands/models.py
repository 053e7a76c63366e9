"""`cohabit models`: lists the models of a running server and why some are not served."""

import argparse

import msgspec
from rich.console import Console

from cohabit.server.activations import workspace_words
from cohabit.server.commands.remote import tables
from cohabit.server.commands.remote.client import add_server_flags, server_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the models of a running server, their memory, and why some are not served."
    add_server_flags(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    server = server_of(options)
    index = server.index()
    if options.json:
        print(msgspec.json.encode(index).decode())
    else:
        metrics = server.metrics()
        out.print(tables.models(index, metrics.versions))
        if words := workspace_words(metrics.activations):
            out.print(f"of a workspace, {words}", soft_wrap=True, highlight=False)
    return 0
