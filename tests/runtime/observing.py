"""Programs changed so that tests see what a run does: a call before each op, and copies without overlap."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from runtime.binding.program import Program
from runtime.lowering.slots import Frame


def observed(program: Program, observe: Callable[[int, Frame], None]) -> Program:
    """The program op by op, with a call before each op: the op's index in the plan, and the frame."""
    computes = tuple(replace(c, calls=(partial(observe, c.step), *c.calls)) for c in program.computes)
    return replace(program, computes=computes)
