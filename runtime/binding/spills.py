"""Determines which tensors leave memory in a plan, and when each is in memory.

A tensor is in memory from the op that creates it, or from a swap-in, until its drop: an *interval*.
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
    """One interval in memory. Compute steps of the plan are counted from 0."""

    last_use: int
    """The last compute step that uses it; -1 if none does."""
    swap_outs: int
    frees_storage: bool
    """Whether its last user empties its storage, because a swap-in follows. Otherwise the tensor stays, or its storage
    is freed with the last reference."""

    @property
    def users(self) -> int:
        """Number of users that finish before the storage is emptied: the last op that uses it, and its swap-outs."""
        return (self.last_use >= 0) + self.swap_outs


@dataclass(frozen=True, slots=True)
class Spill:
    """A swapped activation, whose storage is resized while a program runs."""

    tensor: int
    nbytes: int
    maker: int
    """The compute step that creates it."""
    slot: int
    """Slot of the result that has the tensor's storage."""
    leaf: int
    """Index of the tensor in that result."""
    intervals: tuple[SpillInterval, ...]


def spills_of(graph: Graph, trace: Trace, plan: Plan) -> tuple[Spill, ...]:
    """Return the spills of a checked plan, by tensor. Raises UnsupportedPlan for tensors that cannot leave memory."""
    leaving = plan.pooled.union(step.tensor for step in plan.steps if isinstance(step, SwapOut))
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
    """Return one spill. `number` maps indices in the plan to compute steps."""
    what = graph.tensors[tensor]
    slot, leaf = _place(graph, trace, tensor)
    intervals: list[SpillInterval] = []
    for n, live in enumerate(lives):
        uses = [number[i] for i in live.uses if i in number]
        swap_outs = len(live.uses) - len(uses)
        is_dropped = live.end < len(plan.steps)
        following = plan.steps[lives[n + 1].start] if n + 1 < len(lives) else None
        returns = isinstance(following, SwapIn)
        if not is_dropped and tensor in graph.outputs:
            uses.append(len(number) - 1)  # until the last op has ended
        if not live.uses and is_dropped:
            raise UnsupportedPlan(
                f"{graph.name}: the plan holds {what.name} and drops it before any op has read it"
            )
        intervals.append(
            SpillInterval(
                last_use=max(uses, default=-1),
                swap_outs=swap_outs,
                frees_storage=is_dropped and returns,
            )
        )
    return Spill(tensor, what.nbytes, number[lives[0].start], slot, leaf, tuple(intervals))


def _place(graph: Graph, trace: Trace, tensor: int) -> tuple[int, int]:
    """Return the slot whose value has a tensor's storage, and the tensor's index in that value."""
    if graph.tensors[tensor].kind == "input":
        raise UnsupportedPlan(
            f"{graph.name}: the plan swaps out input {graph.tensors[tensor].name}; plan with inputs in memory"
        )
    op = next(k for k, op in enumerate(graph.ops) if tensor in op.writes)
    maker = next(i for i in trace.instructions if i.op == op)
    if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((maker.args, maker.kwargs))):
        raise UnsupportedPlan(
            f"{graph.name}: the plan swaps {graph.tensors[tensor].name} out, whose op reads a constant of the program"
            " and may have made a view of it; plan with this activation in memory"
        )
    return maker.out, trace.ops[op].results[graph.ops[op].writes.index(tensor)]
