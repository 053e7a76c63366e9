"""What a run does: programs with a call before each op, or without overlap; memory inside and outside of an arena."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.binding.draft import SwapStep
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


def serialised(program: Program) -> Program:
    """The same program without overlap: each step waits for all copies that can have ended by then."""
    counts = [_issuable(program, computes) for computes in range(len(program.computes))]
    computes = tuple(
        replace(step, swap_ins_before=max(step.swap_ins_before, ins), swap_outs_before=outs)
        for step, (ins, outs) in zip(program.computes, counts, strict=True)
    )
    return replace(program, computes=computes)


def _issuable(program: Program, computes: int) -> tuple[int, int]:
    """How many swap-ins and swap-outs may have ended once so many compute steps have."""
    ins = outs = 0
    while True:
        before = ins, outs
        while ins < len(program.swap_ins) and _may_start(program.swap_ins[ins], computes, outs):
            ins += 1
        while outs < len(program.swap_outs) and _may_start(program.swap_outs[outs], computes, ins):
            outs += 1
        if before == (ins, outs):
            return before


def _may_start(step: SwapStep, computes: int, others: int) -> bool:
    return step.computes_before <= computes and step.others_before <= others
