"""Stretches of calls as one call outside of Python's interpreter, by TorchScript's, which runs them as they stand.

What Python costs between two ops is small alone, and large beside a busy thread: every op gives Python up and has to
wait until it gets it back. Here nothing is optimised, so that bits and memory are those of the calls: no graph pass
joins ops or changes their order, parameters are arguments (as constants, their bytes would be looked at when they are
not there yet), and a value that dies in a stretch is held by TorchScript alone, which lets go of it with its last
reader.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from runtime.binding import Call
from runtime.blueprint import Blueprint
from runtime.slots import Frame
from runtime.stretches import stretches
from runtime.writing import Known, UnscriptableError, Writer, not_tensors_of

FEWEST_CALLS = 3
"""Below this, what goes in and out costs more than Python does."""

_OPERATORS_OWN_WORDS = "\nRuntimeError: "


@dataclass(frozen=True, slots=True)
class Script:
    """One stretch, compiled: the same wherever the model lies."""

    steps: range
    """The compute steps that it stands for."""
    function: Callable[[Any, Any], tuple[Any, ...]]
    known: tuple[Known, ...]
    entering: tuple[int, ...]
    """Slots that it reads."""
    dying: tuple[int, ...]
    """Those of them that nobody reads again."""
    leaving: tuple[int, ...]
    """Slots that it leaves in the frame."""


@dataclass(frozen=True, slots=True)
class Scripts:
    """What was compiled for a blueprint."""

    blueprint: Blueprint
    scripts: tuple[Script, ...]


def compiled(blueprint: Blueprint) -> Scripts:
    """Compile every stretch that is worth it, as far as its calls can be written for TorchScript. Any thread."""
    found = (_written(blueprint, steps) for steps in _writable(blueprint))
    return Scripts(blueprint, tuple(script for script in found if script is not None))


def bind_script(script: Script, known: Sequence[torch.Tensor]) -> Call:
    """A call of a stretch whose known tensors have their places."""
    function, entering, dying, leaving = script.function, script.entering, script.dying, script.leaving
    values, constants = _tensor_list(), _tensor_list()
    constants.extend(list(known))

    def call(frame: Frame) -> None:
        values.extend([frame[slot] for slot in entering])
        for slot in dying:
            frame[slot] = None
        for slot, result in zip(leaving, _run(function, values, constants), strict=True):
            frame[slot] = result

    return call


def _run(function: Callable[[Any, Any], tuple[Any, ...]], values: Any, constants: Any) -> tuple[Any, ...]:
    """Run a graph as it was written. What an operator raises comes as RuntimeError in its own words."""
    optimizes = torch._C._get_graph_executor_optimize()  # the calling thread's own
    torch._C._set_graph_executor_optimize(False)
    try:
        return function(values, constants)
    except RuntimeError as error:
        raise RuntimeError(str(error).partition(_OPERATORS_OWN_WORDS)[2].strip() or str(error)) from None
    finally:
        torch._C._set_graph_executor_optimize(optimizes)
        values.clear()


def _tensor_list() -> Any:
    """An empty list that Python and TorchScript share."""
    values = torch._C.ScriptList([torch.empty(0)])
    values.clear()
    return values


def _writable(blueprint: Blueprint) -> list[range]:
    """The stretches without the steps of which one call is left to Python."""
    not_tensors, found = not_tensors_of(blueprint), []
    for stretch in stretches(blueprint):
        first, writer = stretch.start, Writer(not_tensors)
        for n in stretch:
            if _is_written(writer, blueprint, n):
                continue
            found.append(range(first, n))
            first, writer = n, Writer(not_tensors)
            if not _is_written(writer, blueprint, n):
                first, writer = n + 1, Writer(not_tensors)
        found.append(range(first, stretch.stop))
    return found


def _is_written(writer: "Writer", blueprint: Blueprint, step: int) -> bool:
    try:
        for call in blueprint.computes[step].calls:
            writer.write(call)
    except UnscriptableError:
        return False
    return True


def _written(blueprint: Blueprint, steps: range) -> Script | None:
    """Compile these steps, if that is worth it."""
    calls = [call for n in steps for call in blueprint.computes[n].calls]
    if len(calls) < FEWEST_CALLS:
        return None
    writer = Writer(not_tensors_of(blueprint))
    for call in calls:
        writer.write(call)
    if not writer.entering:  # nothing by which it could be compiled without being run
        return None
    freed = {slot for call in calls for slot in call.frees}
    leaving = tuple(call.form.out for call in calls if call.form.out not in freed)
    function = writer.function(leaving)
    with suppress(RuntimeError):  # it is compiled, and refuses the empty list before any op
        _run(function, _tensor_list(), _tensor_list())
    return Script(
        steps=steps,
        function=function,
        known=tuple(writer.known),
        entering=tuple(writer.entering),
        dying=tuple(slot for slot in writer.entering if slot in freed),
        leaving=leaving,
    )
