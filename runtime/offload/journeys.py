"""Journeys: which activations a plan lets leave memory, who needs them between two departures, and where they are made.

A *stay* begins with the op that makes the activation, or with a swap-in, and ends with its drop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from planner.graph import Graph
from planner.plan import Compute, Drop, Plan, SwapIn, SwapOut
from runtime.errors import UnsupportedPlan
from runtime.lowering.specialize import Instruction, Trace


@dataclass(frozen=True, slots=True)
class Stay:
    """One time in memory. `last_use` counts compute steps of the plan from 0."""

    last_use: int
    swap_outs: int
    is_last: bool
    """Nothing brings the activation back."""


@dataclass(frozen=True, slots=True)
class Journey:
    """One activation that a plan swaps out, in the order of the plan's steps."""

    tensor: int
    nbytes: int
    made_by: int
    """The compute step, counted from 0."""
    slot: int
    """Where its maker's result goes in the frame,"""
    leaf: int
    """and which of the tensors there has the activation's storage."""
    stays: tuple[Stay, ...]
    is_output: bool

    def used_before(self, computes: int) -> int:
        """The last compute step that uses the activation among the first so many."""
        return max(s.last_use for s in self.stays if s.last_use < computes)


@dataclass(slots=True)
class _Open:
    """A stay that has not ended yet."""

    last_use: int | None = None
    swap_outs: int = 0


@dataclass(slots=True)
class _Found:
    made_by: int
    op: int
    stays: list[_Open] = field(default_factory=lambda: [_Open()])


def journeys(graph: Graph, trace: Trace, plan: Plan) -> tuple[Journey, ...]:
    """Every journey of a checked plan, by tensor. Raises UnsupportedPlan for what cannot leave."""
    leaving = {
        s.tensor
        for s in plan.steps
        if isinstance(s, SwapIn | SwapOut) and graph.tensors[s.tensor].kind != "parameter"
    }
    if not leaving:
        return ()
    for tensor in sorted(leaving):
        if graph.tensors[tensor].kind != "activation":
            raise UnsupportedPlan(
                f"{graph.name}: the plan swaps {graph.tensors[tensor].name} out, which is an"
                f" {graph.tensors[tensor].kind}: its bytes are the request's own. Plan with inputs that stay"
            )
    found = _stays(graph, plan, leaving)
    makers = {i.op: i for i in trace.instructions if i.op is not None}
    return tuple(
        _journey(graph, trace, tensor, found[tensor], makers[found[tensor].op]) for tensor in sorted(found)
    )


def _stays(graph: Graph, plan: Plan, leaving: set[int]) -> dict[int, _Found]:
    found: dict[int, _Found] = {}
    computes = 0
    for step in plan.steps:
        match step:
            case Compute():
                op = graph.ops[step.op]
                found |= {t: _Found(computes, step.op) for t in leaving.intersection(op.writes)}
                for t in leaving.intersection((*op.reads, *op.writes)):
                    found[t].stays[-1].last_use = computes
                computes += 1
            case SwapOut(tensor):
                found[tensor].stays[-1].swap_outs += 1
            case SwapIn(tensor) if tensor in leaving:
                found[tensor].stays.append(_Open())
            case SwapIn() | Drop():
                pass
    for tensor in leaving.intersection(graph.outputs):
        stay = found[tensor].stays[-1]
        stay.last_use = computes - 1  # until the last op has ended
    return found


def _journey(graph: Graph, trace: Trace, tensor: int, found: _Found, maker: Instruction) -> Journey:
    what = graph.tensors[tensor]
    if any(isinstance(leaf, torch.Tensor) for leaf in _leaves((maker.args, maker.kwargs))):
        raise UnsupportedPlan(
            f"{graph.name}: the plan swaps {what.name} out, whose op reads a constant of the program and may have made"
            " a view of it; plan with this activation in memory"
        )
    stays: list[Stay] = []
    for n, stay in enumerate(found.stays):
        if stay.last_use is None:
            raise UnsupportedPlan(
                f"{graph.name}: the plan brings {what.name} back and drops it before any op has read it"
            )
        stays.append(Stay(stay.last_use, stay.swap_outs, n + 1 == len(found.stays)))
    return Journey(
        tensor=tensor,
        nbytes=what.nbytes,
        made_by=found.made_by,
        slot=maker.out,
        leaf=trace.ops[found.op].results[graph.ops[found.op].writes.index(tensor)],
        stays=tuple(stays),
        is_output=tensor in graph.outputs,
    )


def _leaves(tree: object) -> Sequence[object]:
    leaves: Sequence[object] = torch.utils._pytree.tree_leaves(tree)
    return leaves
