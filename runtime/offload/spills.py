"""Spills of a plan: which activations leave memory, when each is in memory, and which op's result it is.

An activation is in memory from the op that makes it, or from a swap-in, to its drop: an *interval*.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from cohabit.planner.graph import Graph
from cohabit.planner.lifetimes import LiveRange, live_ranges
from cohabit.planner.plan import Compute, Plan, SwapIn, SwapOut
from cohabit.runtime.errors import UnsupportedPlan
from cohabit.runtime.lowering.trace import Trace


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
    lives: dict[int, list[LiveRange]] = {tensor: [] for tensor in sorted(leaving)}
    for live in live_ranges(graph, plan):
        if live.tensor in lives:
            lives[live.tensor].append(live)
    computes = [index for index, step in enumerate(plan.steps) if isinstance(step, Compute)]
    number = {index: n for n, index in enumerate(computes)}
    return tuple(_spill(graph, trace, plan, tensor, own, number) for tensor, own in lives.items())


def _spill(
    graph: Graph, trace: Trace, plan: Plan, tensor: int, lives: Sequence[LiveRange], number: Mapping[int, int]
) -> Spill:
    """Return one spill. `number` counts compute steps, by their index in the plan."""
    what = graph.tensors[tensor]
    made = plan.steps[lives[0].start]
    assert isinstance(made, Compute), "an activation is in memory once its op has made it"
    maker = next(i for i in trace.instructions if i.op == made.op)
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((maker.args, maker.kwargs))):
        raise UnsupportedPlan(
            f"{graph.name}: the plan swaps {what.name} out, whose op reads a constant of the program and may have made"
            " a view of it; plan with this activation in memory"
        )
    intervals: list[SpillInterval] = []
    for live in lives:
        uses, is_last = [number[i] for i in live.uses if i in number], live is lives[-1]
        swap_outs = len(live.uses) - len(uses)
        if is_last and tensor in graph.outputs:
            uses.append(len(number) - 1)  # until the last op has ended
        if not uses:
            raise UnsupportedPlan(
                f"{graph.name}: the plan brings {what.name} back and drops it before any op has read it"
            )
        intervals.append(SpillInterval(uses[-1], swap_outs, is_last))
    return Spill(
        tensor=tensor,
        nbytes=what.nbytes,
        maker=number[lives[0].start],
        slot=maker.out,
        leaf=trace.ops[made.op].results[graph.ops[made.op].writes.index(tensor)],
        intervals=tuple(intervals),
    )
