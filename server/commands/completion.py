"""`cohabit completion`: prints a script with which a shell completes commands, flags and their choices."""

import argparse
from pathlib import Path

from rich.console import Console

from cohabit.server.errors import ConfigError

_PATHS = ("DIR", "FILE", "PATH", "REPOSITORY")
"""Metavars of flags and arguments that are files or folders."""
_EXAMPLES = """examples:
  cohabit completion bash > ~/.local/share/bash-completion/completions/cohabit
  cohabit completion zsh > "${fpath[1]}/_cohabit"
  cohabit completion fish > ~/.config/fish/completions/cohabit.fish
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print a script with which a shell completes commands, flags and their choices."
    parser.epilog = _EXAMPLES
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(options: argparse.Namespace, out: Console, errors: Console) -> int:
    """Print the script. Raises ConfigError if shtab, which writes it, is not installed."""
    try:
        import shtab
    except ModuleNotFoundError as error:
        raise ConfigError("completion needs the package shtab; pip install 'cohabit[completion]'") from error
    parser = options.whole_parser()
    _complete_paths(parser, shtab.FILE)
    print(shtab.complete(parser, options.shell))
    return 0


def _complete_paths(parser: argparse.ArgumentParser, files: dict[str, str]) -> None:
    """Mark paths for shtab, in a parser and in those of its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files)
        elif action.type is Path or action.metavar in _PATHS:
            action.complete = files  # type: ignore[attr-defined]
