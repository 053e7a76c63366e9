"""Stretches of calls as one call outside of Python's interpreter, by TorchScript's, which runs them as they stand.

What Python costs between two ops is small alone, and large beside a busy thread: every op gives Python up and has to
wait until it gets it back. Here nothing is optimised, so that bits and memory are those of the calls: no graph pass
joins ops or changes their order, parameters are arguments (as constants, their bytes would be looked at when they are
not there yet), and a value that dies in a stretch is held by TorchScript alone, which lets go of it with its last
reader.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from runtime.binding.blueprint import Blueprint, CallDraft
from runtime.binding.calls import Call, Form
from runtime.binding.slots import Frame, Slot
from runtime.cpu.writing import Known, NotTensors, UnscriptableError, Writer, not_tensors_of

FEWEST_CALLS = 5
"""Below this, what goes in and out costs more than Python does."""

_OPERATORS_OWN_WORDS = "\nRuntimeError: "
_REFUSAL = "elements in a list but found 0"
"""In TorchScript's words for an empty list of values, which is refused before any op runs."""

_log = logging.getLogger("cohabit.runtime")


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


@cache
def unavailable() -> str | None:
    """Why this torch runs no stretches, or None if it does: what they stand on is private, and may differ elsewhere."""
    try:
        writer = Writer(NotTensors(frozenset(), frozenset()))
        writer.write(
            CallDraft(Form(torch.ops.aten.neg.default, (Slot(0),), {}, 1, ((0, 0),), (), False, None), (), ())
        )
        function, values = _compiled(writer, [1]), _tensor_list()
        values.append(torch.ones(1))
        (result,) = _run(function, values, _tensor_list())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if torch.equal(result, -torch.ones(1)) else f"the opposite of 1 is {result.item()}"


def compiled(name: str, blueprint: Blueprint, stretches: Iterable[range]) -> Scripts:
    """Compile every stretch that is worth it, as far as its calls can be written for TorchScript. Any thread.

    Where that fails the model has none, which the log says.
    """
    try:
        scripts = tuple(script for steps in stretches for script in _scripts(blueprint, steps))
    except Exception as error:
        fields = {"model": name, "batch": blueprint.trace.batch, "error": f"{type(error).__name__}: {error}"}
        _log.warning("a model runs op by op, because its stretches cannot be compiled", extra={"fields": fields})
        scripts = ()
    return Scripts(blueprint, scripts)


def bind_script(
    script: Script, static: Callable[[int], torch.Tensor], table: Callable[[str], torch.Tensor]
) -> Call:
    """A call of a stretch, with the blueprint's statics where they are now, and the store's tables."""
    function, entering, dying, leaving = script.function, script.entering, script.dying, script.leaving
    values, constants = _tensor_list(), _tensor_list()
    constants.extend([_known(known, static, table) for known in script.known])

    def call(frame: Frame) -> None:
        values.extend([frame[slot] for slot in entering])
        for slot in dying:
            frame[slot] = None
        for slot, result in zip(leaving, _run(function, values, constants), strict=True):
            frame[slot] = result

    return call


def _known(
    known: Known, static: Callable[[int], torch.Tensor], table: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    if known.static is not None:
        return static(known.static)
    if known.table is not None:
        return table(known.table)
    assert known.constant is not None
    return known.constant


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


def _scripts(blueprint: Blueprint, steps: range) -> Iterator[Script]:
    """A stretch, or what is left of it without the steps of which one call is left to Python."""
    not_tensors, first = not_tensors_of(blueprint), steps.start
    while first < steps.stop:
        writer, behind = Writer(not_tensors), first
        while behind < steps.stop and _is_written(writer, blueprint, behind):
            behind += 1
        if behind == first:
            first += 1
            continue
        if behind < steps.stop:  # the step that cannot be written has left parts of it in the graph
            writer = Writer(not_tensors)
            for n in range(first, behind):
                _is_written(writer, blueprint, n)
        script = _script(writer, blueprint, range(first, behind))
        if script is not None:
            yield script
        first = behind


def _is_written(writer: Writer, blueprint: Blueprint, step: int) -> bool:
    try:
        for call in blueprint.computes[step].calls:
            writer.write(call)
    except UnscriptableError:
        return False
    return True


def _script(writer: Writer, blueprint: Blueprint, steps: range) -> Script | None:
    """Compile what was written of these steps, if that is worth it."""
    calls = [call for n in steps for call in blueprint.computes[n].calls]
    if len(calls) < FEWEST_CALLS or not writer.entering:  # nothing by which it could be compiled without being run
        return None
    freed = {slot for call in calls for slot in call.frees}
    leaving = tuple(call.form.out for call in calls if call.form.out not in freed)
    return Script(
        steps=steps,
        function=_compiled(writer, leaving),
        known=tuple(writer.known),
        entering=tuple(writer.entering),
        dying=tuple(slot for slot in writer.entering if slot in freed),
        leaving=leaving,
    )


def _compiled(writer: Writer, leaving: Sequence[int]) -> Callable[[Any, Any], tuple[Any, ...]]:
    """The function of what was written, which its first call compiles. Raises RuntimeError if that fails."""
    function = writer.function(leaving)
    try:
        _run(function, _tensor_list(), _tensor_list())
    except RuntimeError as error:
        if _REFUSAL not in str(error):
            raise
    return function
