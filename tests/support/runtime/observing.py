"""What a run does: programs with a call before each op, or without overlap; memory inside and outside of an arena."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.binding.calls import Call
from cohabit.runtime.binding.draft import ComputeStep
from cohabit.runtime.binding.program import Program
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import DeviceArena


def observed(program: Program, observe: Callable[[int, Frame], None]) -> Program:
    """The program op by op, with a call before each op: the op's index in the plan, and the frame."""
    computes = tuple(replace(c, calls=(partial(observe, c.step), *c.calls)) for c in program.computes)
    return replace(program, computes=computes)


def note_held(held: dict[int, int], program: Program, arena: range) -> Program:
    """The program, which notes before each op the bytes that inputs and activations hold."""

    def note(step: int, frame: Frame) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(frame) if isinstance(leaf, torch.Tensor)]
        storages = [t.untyped_storage() for t in tensors if t.data_ptr() not in arena]
        held[step] = sum({s._cdata: s.nbytes() for s in storages}.values())

    return observed(program, note)


def addresses(arena: DeviceArena[Any]) -> range:
    """The addresses of a CPU arena's bytes."""
    first = int(arena.bytes(0, 0).ctypes.data)
    return range(first, first + arena.nbytes)


def on_one_thread(program: Program) -> Program:
    """The same steps in the plan's order on the compute lane, without overlap."""
    copies = {s.step: s for s in (*program.swap_ins, *program.swap_outs)}
    computes = {c.step: c for c in program.computes}
    waiting: list[Call] = []
    steps: list[ComputeStep] = []
    for step in sorted({**copies, **computes}):
        if step in copies:
            waiting.append(lambda frame, copy=copies[step].copy: copy())
        else:
            calls = (*waiting, *computes[step].calls)
            steps.append(replace(computes[step], calls=calls, swap_ins_before=0, swap_outs_before=0))
            waiting = []
    return replace(program, computes=tuple(steps), swap_ins=(), swap_outs=(), epilogue=0)
