"""A function of a Python file, given as SCRIPT.py:FUNCTION. Importing this module does not import torch."""

import importlib.util
import sys
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

from cohabit.server.errors import ConfigError


def require_script(program: str) -> Path:
    """Return the file of SCRIPT:FUNCTION. Raises ConfigError if there is none."""
    path = Path(program.rpartition(":")[0])
    if not path.is_file():
        raise ConfigError(f"{program}: there is no file {str(path)!r}; write SCRIPT.py:FUNCTION")
    return path


def function_of_script(program: str) -> Callable[..., Any]:
    """Run a script, and return the function named in SCRIPT:FUNCTION. Raises ConfigError.

    As with `python SCRIPT`, it may import modules from its own folder.
    """
    path = require_script(program)
    text, _, name = program.rpartition(":")
    spec = importlib.util.spec_from_file_location("script", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{program}: {text} is not a Python file; write SCRIPT.py:FUNCTION")
    sys.path.insert(0, str(path.parent.resolve()))
    module = sys.modules["script"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        function: Callable[..., Any] = attrgetter(name)(module)
    except AttributeError:
        raise ConfigError(f"{program}: {text} defines no function {name!r}") from None
    if not callable(function):
        raise ConfigError(f"{program}: {name} of {text} is a {type(function).__name__}, not a function")
    return function
