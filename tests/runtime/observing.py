"""What a run does: programs with a call before each op, and the addresses of an arena."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import DeviceArena


def observed(program: Program, observe: Callable[[int, Frame], None]) -> Program:
    """The program op by op, with a call before each op: the op's index in the plan, and the frame."""
    computes = tuple(replace(c, calls=(partial(observe, c.step), *c.calls)) for c in program.computes)
    return replace(program, computes=computes)


def addresses(arena: DeviceArena[Any]) -> range:
    """The addresses of a CPU arena's bytes."""
    first = int(arena.bytes(0, 0).ctypes.data)
    return range(first, first + arena.nbytes)
