"""`cohabit load`: loads models into a running server."""

import argparse

import msgspec
from rich.console import Console

from cohabit.server.commands.remote.client import add_server_flags, server_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Load models of the repository into a running server; each is served when its line appears."
    )
    parser.add_argument("models", nargs="+", metavar="NAME", help="models of its repository")
    add_server_flags(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    server = server_of(options)
    for model in options.models:
        with out.status(f"loading {model}"):
            server.load(model)
        if options.json:
            print(msgspec.json.encode({"loaded": model}).decode())
        else:
            out.print(f"loaded {model}", markup=False)
    return 0
