"""Modules made by a user's function, with the weights of an optional checkpoint; functions of tensors themselves."""

import importlib
import inspect
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cohabit.server.errors import ConfigError, ImportFailed
from cohabit.server.importing.declared_input import DeclaredInput, largest_size
from cohabit.server.importing.subject import Subject, declared, reason_of, with_examples
from cohabit.server.script import function_of_script

_MOST_KEYS = 3
_GLOBAL = re.compile(r"GLOBAL ([\w.]{1,100})", re.ASCII)
"""What a refused pickle would import, in torch's text."""


def from_factory(
    factory: str,
    inputs: Sequence[DeclaredInput],
    checkpoint: Path | None = None,
    key: str | None = None,
    most: int | None = None,
) -> Subject:
    """Call `module:function`, load a checkpoint into the returned module, and find its inputs.

    A function with required arguments is what is imported, as a step of an ensemble may be: these are its inputs.

    `key` leads to the state_dict in the checkpoint. Inputs are the declared ones, with dynamic dimensions other than
    the batch limited to `most`; or else the module's attribute `example_inputs`, tensors by name. Raises ImportFailed.
    """
    module = _made_by(factory)
    if checkpoint is not None:
        _load(module, checkpoint, key)
    if inputs:
        return declared(module, inputs, largest_size(inputs, most), has_declared_sizes=True)
    examples = getattr(module, "example_inputs", None)
    if not isinstance(examples, Mapping) or not examples:
        raise ImportFailed(
            f"{factory}: its inputs are not known; declare each with --input NAME:TYPE:DIMS, such as"
            " image:FP32:-1,3,224,224, or let the function set `example_inputs` of the module: a dictionary of tensors"
        )
    return with_examples(module, examples)


def _made_by(factory: str) -> nn.Module:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = _function(factory)
        if _takes_arguments(function):
            made: Any = nn.Module()
            made.forward = function
        else:
            made = function()
    except ConfigError:
        raise
    except Exception as error:
        raise ImportFailed(f"{factory}: {type(error).__name__}: {reason_of(error)}") from error
    if isinstance(made, torch.jit.ScriptModule):
        raise ImportFailed(
            f"{factory} returns a TorchScript module, which is not supported; let it return the torch.nn.Module that"
            " was scripted or traced"
        )
    if not isinstance(made, nn.Module):
        raise ImportFailed(f"{factory} returns a {type(made).__name__}; let it return a torch.nn.Module")
    return made


def _takes_arguments(function: Callable[..., Any]) -> bool:
    if not inspect.isfunction(function):  # a class is called without arguments
        return False
    named = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is inspect.Parameter.empty and p.kind in named for p in parameters)


def _function(factory: str) -> Callable[..., Any]:
    """Return the object named by MODULE:FUNCTION or SCRIPT.py:FUNCTION. User code may raise any exception."""
    name, _, function = factory.rpartition(":")
    if name.endswith(".py"):
        return function_of_script(factory)
    found: Callable[..., Any] = attrgetter(function)(importlib.import_module(name))
    return found


def _load(module: nn.Module, path: Path, key: str | None) -> None:
    """Load a state_dict, from safetensors or from a pickle with nothing but tensors."""
    state = _safetensors(path) if path.suffix == ".safetensors" else _unpickled(path)
    if key is not None:
        state = _at(path, state, key)
    wrong = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if wrong and key is None and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    elif wrong:
        nested = [name for name, value in state.items() if isinstance(value, Mapping)]
        way_out = (
            f"name the one that is, of {', '.join(nested)}, with --key" if nested else "save module.state_dict()"
        )
        raise ImportFailed(
            f"{path.name} is not a state_dict: its key {wrong[0]} is a {type(state[wrong[0]]).__name__}, not a tensor;"
            f" {way_out}"
        )
    own = module.state_dict()
    loaded = {tensor.data_ptr() for key, tensor in own.items() if key in state}  # tied weights are stored once
    problems = [f"{key} is missing" for key in own if key not in state and own[key].data_ptr() not in loaded]
    problems += [f"the module has no {key}" for key in state if key not in own]
    problems += [
        f"{key} has shape {list(state[key].shape)}, the module's {list(own[key].shape)}"
        for key in own
        if key in state and state[key].shape != own[key].shape
    ]
    if problems:
        more = f", and {len(problems) - _MOST_KEYS} more" if len(problems) > _MOST_KEYS else ""
        raise ImportFailed(f"{path.name} does not fit the module: {'; '.join(problems[:_MOST_KEYS])}{more}")
    module.load_state_dict(state, strict=False)


def _at(path: Path, state: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping under a key, or under several joined by dots."""
    rest, found = key, state
    while rest:
        name = next((name for name in found if rest == name or rest.startswith(f"{name}.")), None)
        inner = None if name is None else found[name]
        if name is None or not isinstance(inner, Mapping):
            there = [str(name) for name, value in found.items() if isinstance(value, Mapping)]
            raise ImportFailed(
                f"{path.name}: --key {key}: nothing in it is called {rest} and holds tensors by name; what does, is"
                f" called {', '.join(there) or 'nothing'}"
            )
        rest, found = rest[len(name) + 1 :], inner
    return found


def _safetensors(path: Path) -> Mapping[str, Any]:
    try:
        from safetensors.torch import load_file

        loaded: Mapping[str, Any] = load_file(path)
    except ModuleNotFoundError as error:
        raise ImportFailed(f"{path.name}: needs the package safetensors; pip install safetensors") from error
    except Exception as error:
        raise ImportFailed(f"{path.name} is not a safetensors file: {reason_of(error)}") from error
    return loaded


def _unpickled(path: Path) -> Mapping[str, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = _GLOBAL.search(str(error))
        found = "" if name is None else f" ({name[1]})"
        raise ImportFailed(
            f"{path.name} is a pickle with more than tensors in it, and would run code{found}; save"
            " module.state_dict(), or convert it to safetensors where you trust it"
        ) from error
    except Exception as error:
        if "TorchScript" in str(error):
            raise ImportFailed(
                f"{path.name} is a TorchScript file, not a state_dict; save module.state_dict() where it was made"
            ) from error
        raise ImportFailed(f"{path.name} cannot be read: {reason_of(error)}") from error
    if not isinstance(loaded, Mapping):
        raise ImportFailed(f"{path.name} holds a {type(loaded).__name__}; save module.state_dict()")
    return loaded
