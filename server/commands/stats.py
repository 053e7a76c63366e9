"""`cohabit stats`: prints request statistics of a running server's models."""

import argparse

import msgspec
from rich.console import Console

from cohabit.server.commands.remote import tables
from cohabit.server.commands.remote.client import add_server_flags, server_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print what a running server's models have answered since they were loaded."
    parser.add_argument("model", nargs="?", metavar="NAME", help="a model (default: all)")
    add_server_flags(parser)
    tables.add_watch(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    server = server_of(options)
    if options.watch:
        tables.watch(out, lambda: tables.statistics(server.statistics(options.model)))
    found = server.statistics(options.model)
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        out.print(tables.statistics(found))
    return 0
