"""`cohabit unload`: unloads models from a running server."""

import argparse

import msgspec
from rich.console import Console

from cohabit.server.commands.remote.client import add_server_flags, server_of
from cohabit.server.errors import RemoteError, did_you_mean


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Unload models from a running server; their memory is free when their lines appear."
    parser.add_argument("models", nargs="+", metavar="NAME", help="models of its repository")
    add_server_flags(parser)


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Raises RemoteError for an unknown model, before any is unloaded."""
    server = server_of(options)
    known = {entry["name"] for entry in server.index()}
    if unknown := [model for model in options.models if model not in known]:
        hint = did_you_mean(unknown[0], known)
        raise RemoteError(
            f"{server.url} has no model '{unknown[0]}'; its models are {', '.join(sorted(known))}{hint}"
        )
    for model in options.models:
        server.unload(model)
        if options.json:
            print(msgspec.json.encode({"unloaded": model}).decode())
        else:
            out.print(f"unloaded {model}", markup=False)
    return 0
