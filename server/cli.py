"""The command line: parses it, runs one of `server.commands`, and turns errors into messages and exit statuses."""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from rich.console import Console

from cohabit.planner.errors import CohabitError
from cohabit.server.commands import EXIT_FAILED, EXIT_INTERRUPTED, exit_status

COMMANDS = {
    "serve": "serve a model repository to KServe v2 and Triton clients",
    "scale": "serve a repository with several engines, on one or more machines, which Ray Serve places",
    "import": "make a repository entry of a Hugging Face model, a torch.nn.Module or a checkpoint",
    "check": "say whether a model can be served, in how much memory, and why not",
    "plan": "plan how a model runs in some memory, and write the plans to files",
    "fit": "say which models fit into how much memory, and how long clients would wait",
    "export-bundle": "prepare a repository for one memory size, to be served on another machine",
    "show": "check a plan and draw it in the terminal or as an HTML page",
    "compare-plans": "compare the searchers on one model, batch size and memory size",
    "train": "train the model of a script in less memory than its step needs",
    "tile": "choose how the arrays of a NumPy program are tiled over workers, and run it",
    "profile": "measure a model's ops on a device, and the device's link",
    "models": "list the models of a running server and why some are not served",
    "load": "load models into a running server",
    "unload": "unload models from a running server",
    "stats": "print request statistics of a running server's models",
}
_MODULES = {"import": "import_model"}  # `import` is a keyword
_WIDE = 150
"""Columns of output that is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 after a clean stop, 1 for a failure, 2 for a wrong command line."""
    if argv is None:  # this process is the command's own
        os.environ["PYTHONSAFEPATH"] = "1"  # its children import nothing from the folder that they are started in
    code = _run(argv)
    if argv is None and any(thread.daemon and thread.is_alive() for thread in threading.enumerate()):
        # A thread of an interrupted load or a hung device cannot be ended; do not wait for it.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    options = _parser().parse_args(argv)
    errors = Console(file=sys.stderr, highlight=False, emoji=False)
    try:
        return int(options.run(options, _stdout(), errors))
    except CohabitError as error:
        from cohabit.server.log import escaped

        for line in f"cohabit: {error}".split("\n"):
            errors.print(escaped(line), markup=False, soft_wrap=True)
        return exit_status(error)
    except KeyboardInterrupt:
        errors.print("cohabit: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader closed our output; flushing the rest at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _stdout() -> Console:
    terminal = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, markup=False, emoji=False, width=None if terminal else _WIDE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cohabit", description="Serve many models from one device whose memory cannot hold them all."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, summary in COMMANDS.items():
        module = _MODULES.get(name, name.replace("-", "_"))
        commands.add_parser(name, help=summary, module=module, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser


class _CommandParser(argparse.ArgumentParser):
    """The parser of one command, whose module is imported, and declares its flags, when the command is given."""

    def __init__(self, *args: Any, module: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self._module = module

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        command = import_module(f"cohabit.server.commands.{self._module}")
        command.add_flags(self)
        self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cohabit.server.protocol.descriptions import product_version

        print(f"cohabit {product_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
