"""Spills of a plan: which activations leave memory, when each is in memory, and which op's result it is.

An activation is in memory from the op that makes it, or from a swap-in, to its drop: an *interval*.
"""

from dataclasses import dataclass, field

import torch
from torch.utils import _pytree as pytree

from planner.graph import Graph
from planner.plan import Compute, Drop, Plan, SwapIn, SwapOut
from runtime.errors import UnsupportedPlan
from runtime.lowering.trace import Instruction, Trace


@dataclass(frozen=True, slots=True)
class SpillInterval:
    """One time in memory. `last_use` counts compute steps of the plan from 0."""

    last_use: int
    swap_outs: int
    is_last: bool
    """No swap-in follows."""


@dataclass(frozen=True, slots=True)
class Spill:
    """One activation that a plan swaps out."""

    tensor: int
    nbytes: int
    maker: int
    """The compute step that makes it, counted from 0."""
    slot: int
    """The frame's slot for that op's result."""
    leaf: int
    """Which tensor of that result has the activation's storage."""
    intervals: tuple[SpillInterval, ...]

    def last_use_before(self, computes: int) -> int:
        """Return the last compute step below `computes` that uses the activation."""
        return max(i.last_use for i in self.intervals if i.last_use < computes)


@dataclass(slots=True)
class _OpenInterval:
    last_use: int | None = None
    swap_outs: int = 0


@dataclass(slots=True)
class _Found:
    maker: int
    op: int
    intervals: list[_OpenInterval] = field(default_factory=lambda: [_OpenInterval()])


def spills_of(graph: Graph, trace: Trace, plan: Plan) -> tuple[Spill, ...]:
    """Return the spills of a checked plan, by tensor. Raises UnsupportedPlan for what cannot leave memory."""
    leaving = {
        s.tensor
        for s in plan.steps
        if isinstance(s, SwapIn | SwapOut) and graph.tensors[s.tensor].kind != "parameter"
    }
    for tensor in sorted(leaving):
        if graph.tensors[tensor].kind != "activation":
            raise UnsupportedPlan(
                f"{graph.name}: the plan swaps {graph.tensors[tensor].name} out, which is an"
                f" {graph.tensors[tensor].kind}: its bytes are the request's own. Plan with inputs that stay"
            )
    if not leaving:
        return ()
    found = _intervals(graph, plan, leaving)
    makers = {i.op: i for i in trace.instructions if i.op is not None}
    return tuple(_spill(graph, trace, tensor, found[tensor], makers[found[tensor].op]) for tensor in sorted(found))


def _intervals(graph: Graph, plan: Plan, leaving: set[int]) -> dict[int, _Found]:
    found: dict[int, _Found] = {}
    computes = 0
    for step in plan.steps:
        match step:
            case Compute():
                op = graph.ops[step.op]
                found |= {t: _Found(computes, step.op) for t in leaving.intersection(op.writes)}
                for t in leaving.intersection((*op.reads, *op.writes)):
                    found[t].intervals[-1].last_use = computes
                computes += 1
            case SwapOut(tensor):
                found[tensor].intervals[-1].swap_outs += 1
            case SwapIn(tensor) if tensor in leaving:
                found[tensor].intervals.append(_OpenInterval())
            case SwapIn() | Drop():
                pass
    for tensor in leaving.intersection(graph.outputs):
        found[tensor].intervals[-1].last_use = computes - 1  # until the last op has ended
    return found


def _spill(graph: Graph, trace: Trace, tensor: int, found: _Found, maker: Instruction) -> Spill:
    what = graph.tensors[tensor]
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((maker.args, maker.kwargs))):
        raise UnsupportedPlan(
            f"{graph.name}: the plan swaps {what.name} out, whose op reads a constant of the program and may have made"
            " a view of it; plan with this activation in memory"
        )
    intervals: list[SpillInterval] = []
    for n, interval in enumerate(found.intervals):
        if interval.last_use is None:
            raise UnsupportedPlan(
                f"{graph.name}: the plan brings {what.name} back and drops it before any op has read it"
            )
        intervals.append(SpillInterval(interval.last_use, interval.swap_outs, n + 1 == len(found.intervals)))
    return Spill(
        tensor=tensor,
        nbytes=what.nbytes,
        maker=found.maker,
        slot=maker.out,
        leaf=trace.ops[found.op].results[graph.ops[found.op].writes.index(tensor)],
        intervals=tuple(intervals),
    )
