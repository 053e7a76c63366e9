"""Gaps between a tensor's uses, and the choice for each: keep, swap, recompute or restore.

A searcher makes a choice for every gap; `planner.schedule.no_wait` turns choices into a sequence and a schedule:

    Gaps(graph)                                   .all: tuple[Gap, ...], .uses
    no_wait(gaps, memory_bytes, choices)          -> ActionSequence | None if they need more memory
    schedule_of_choices(problem, gaps, choices)   -> Schedule | None if they need more memory

`choices[i]` is for `gaps.all[i]` and one of its `.choices`. Ops run in the graph's order, and positions are op ids.
Outputs count as used by the last op: they must be in memory when it ends."""

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import Final

from cohabit.planner.graph import Graph

START: Final = -1
"""Position of the start of the inference."""


class Choice(IntEnum):
    """What happens to a tensor in a gap."""

    KEEP = 0
    """It stays in memory. Over the end of the inference, it is a resident."""
    SWAP = 1
    """It leaves after the last use, with a swap-out if the host store has no copy, and is swapped in for the next."""
    RECOMPUTE = 2
    """It is dropped; its op runs again right before the next use."""
    RESTORE = 3
    """Over the end of the inference only: a resident leaves after its last use and returns after the last op."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The positions, one or more, between two successive uses of a tensor.

    A gap that `wraps` runs from the last use of a parameter or state, over the end of the inference, to its first use
    (`next_use`) in the next inference. It may be empty. Only gaps of inputs start at START.
    """

    tensor: int
    last_use: int
    next_use: int
    wraps: bool
    choices: tuple[Choice, ...]
    """Possible choices. Wrapping gaps never allow RECOMPUTE; only they allow RESTORE."""

    def is_offloadable(self, graph: Graph) -> bool:
        """Whether the tensor is an activation that takes memory."""
        tensor = graph.tensors[self.tensor]
        return tensor.kind == "activation" and tensor.nbytes > 0


class Gaps:
    """All gaps of a graph, ordered by tensor and time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses: tuple[tuple[int, ...], ...] = self._find_uses()
        """Positions of each tensor's uses. An activation's write is a use; the arrival of an input is not."""

    @cached_property
    def all(self) -> tuple[Gap, ...]:
        return tuple(gap for t in range(len(self.graph.tensors)) for gap in self._of(t))

    @cached_property
    def producer(self) -> dict[int, int]:
        """Position of the op that writes each activation."""
        return {t: k for k, op in enumerate(self.graph.ops) for t in op.writes}

    @cached_property
    def repeatable_until(self) -> tuple[int, ...]:
        """Per op, the position before which it may run again: that of the first op that changes one of its tensors.

        START for an op that itself changes tensors in place.
        """
        ops = self.graph.ops
        changed_at = dict.fromkeys((t for op in ops for t in op.mutates), len(ops))
        until = [len(ops)] * len(ops)
        for p in reversed(range(len(ops))):
            op = ops[p]
            until[p] = min((changed_at.get(t, len(ops)) for t in (*op.reads, *op.writes)), default=len(ops))
            if op.mutates:
                until[p] = START
                changed_at |= dict.fromkeys(op.mutates, p)
        return tuple(until)

    def _find_uses(self) -> tuple[tuple[int, ...], ...]:
        uses: list[list[int]] = [[] for _ in self.graph.tensors]
        for position, needed in enumerate(self.graph.needed):
            for t in needed:
                uses[t].append(position)
        return tuple(map(tuple, uses))

    def _of(self, t: int) -> list[Gap]:
        kind, uses = self.graph.tensors[t].kind, self.uses[t]
        if not uses:
            return []
        starts = (START, *uses) if kind == "input" else uses
        pairs = [(a, b) for a, b in pairwise(starts) if b > a + 1]
        found = [Gap(t, a, b, False, self._choices(t, b)) for a, b in pairs]
        if kind in ("parameter", "state"):
            choices = (Choice.KEEP, Choice.SWAP, Choice.RESTORE)
            stays = kind == "state" and t in self.graph.outputs
            found.append(Gap(t, uses[-1], uses[0], True, choices[:2] if stays else choices))
        return found

    def _choices(self, t: int, next_use: int) -> tuple[Choice, ...]:
        if self.graph.tensors[t].kind == "activation" and self._can_repeat(t, next_use):
            return (Choice.KEEP, Choice.SWAP, Choice.RECOMPUTE)
        return (Choice.KEEP, Choice.SWAP)

    def _can_repeat(self, t: int, position: int) -> bool:
        """Whether an activation can be recomputed from weights, tensors still in use, and other recomputable ones."""
        found, stack = {t}, [t]
        while stack:
            k = self.producer[stack.pop()]
            if self.repeatable_until[k] < position:
                return False
            for r in self.graph.ops[k].reads:
                kind = self.graph.tensors[r].kind
                if r in found or kind in ("parameter", "state") or self.uses[r][-1] >= position:
                    continue
                if kind == "input":
                    return False
                found.add(r)
                stack.append(r)
        return True
