"""The command line: parses it, runs one of `server.commands`, and turns errors into messages and exit statuses."""

import argparse
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from rich.console import Console

from cohabit.planner.errors import CohabitError
from cohabit.planner.parts import Part, PartRegistry
from cohabit.server.commands import EXIT_FAILED, EXIT_INTERRUPTED, exit_status
from cohabit.server.errors import did_you_mean

_CORE = {
    "serve": "serve a model repository to KServe v2 and Triton clients",
    "check": "say whether a model can be served, in how much memory, and why not",
    "plan": "plan how a model runs in some memory, and write the plans to files",
    "export-bundle": "prepare a repository for one memory size, to be served on another machine",
    "show": "check a plan and draw it in the terminal or as an HTML page",
    "profile": "measure a model's ops on a device, and the device's link",
    "cache": "list and remove what the cache has of each model, or have a model measured again",
    "models": "list the models of a running server and why some are not served",
    "load": "load models into a running server",
    "unload": "unload models from a running server",
    "stats": "print request statistics of a running server's models",
    "completion": "print a script with which a shell completes commands and flags",
}
COMMANDS = PartRegistry(
    "cohabit.commands",
    {name: Part(f"cohabit.server.commands.{name.replace('-', '_')}", about) for name, about in _CORE.items()},
)
"""Modules with `add_flags(parser)` and `run(options, out, errors)`."""
_WIDE = 150
"""Columns of output that is not a terminal."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 after a clean stop, 1 for a failure, 2 for a wrong command line, 130 if interrupted."""
    if argv is None:  # this process is the command's own
        os.environ["PYTHONSAFEPATH"] = "1"  # child processes do not import from their working directory
    code = _run(argv)
    if argv is None and any(thread.daemon and thread.is_alive() for thread in threading.enumerate()):
        # Threads of an interrupted load or a hung device cannot be stopped; do not wait for them.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    given = sys.argv[1:] if argv is None else argv
    options = _parser(COMMANDS.own if given and given[0] in COMMANDS.own else COMMANDS.all).parse_args(given)
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


def _parser(known: Mapping[str, Part]) -> argparse.ArgumentParser:
    parser = _SuggestingParser(
        prog="cohabit", description="Serve many models from one device whose memory cannot hold them all."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_CommandParser)
    for name, part in known.items():
        commands.add_parser(name, help=part.about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(whole_parser=_whole_parser)
    return parser


def _whole_parser() -> argparse.ArgumentParser:
    """Return the parser with the flags of every command. Imports all their modules."""
    parser = _parser(COMMANDS.all)
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in commands.choices.values():
        command.declare_flags()
    return parser


_INVALID_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)", re.DOTALL)


class _SuggestingParser(argparse.ArgumentParser):
    """Adds the most similar command, choice or flag to an error."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        if (wrong := _INVALID_CHOICE.search(message)) is not None:
            return did_you_mean(wrong[1], re.findall(r"[^\s',]+", wrong[2]))
        known = list(_flags(self))
        given = self._given[: self._given.index("--")] if "--" in self._given else self._given
        flags = dict.fromkeys(text.partition("=")[0] for text in given if text.startswith("--"))
        unknown = [flag for flag in flags if not any(name.startswith(flag) for name in known)]  # or abbreviated
        return "".join(did_you_mean(flag, known) for flag in unknown)


def _flags(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _flags(command)


class _CommandParser(_SuggestingParser):
    """The parser of one command. The command's module is imported, and declares the flags, only when it is given."""

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(**{"parser_class": _SuggestingParser, **options})

    def declare_flags(self) -> None:
        command = COMMANDS[self.prog.rpartition(" ")[2]]
        command.add_flags(self)
        self.set_defaults(run=command.run)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.declare_flags()
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # reported here, because the parent parser does not know this command's flags
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from cohabit.server.protocol.descriptions import product_version

        print(f"cohabit {product_version()}")
        parser.exit()


if __name__ == "__main__":
    sys.exit(main())
