"""Gaps between a tensor's uses, and what to do with it in each: keep, swap, recompute or restore it.

A searcher gives every gap a choice; `planner.schedule.no_wait` makes a sequence and a schedule of them:

    Gaps(graph)                                   .all: tuple[Gap, ...], .uses
    no_wait(gaps, memory_bytes, choices)          -> ActionSequence | None where they need more memory
    schedule_of_choices(problem, gaps, choices)   -> Schedule | None where they need more memory

`choices[i]` is for `gaps.all[i]` and one of its `.choices`. Ops run in the graph's order, and positions are op ids. An
output is used by the last op: it must be in memory when that op ends."""

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
    """It stays in memory. Over the end of the inference: it is a resident."""
    SWAP = 1
    """It leaves after the last use, swapped out if the host store has no copy, and is swapped in for the next."""
    RECOMPUTE = 2
    """It is dropped, and its op runs again right before the next use."""
    RESTORE = 3
    """Over the end of the inference: a resident that leaves after the last use and returns after the last op."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions in which a tensor is not used though it is needed later; there is at least one between the uses.

    `wraps`: a parameter's or state's way from its last use over the end of the inference to its first use of the
    next one, which is `next_use`; it may hold no position. Only gaps of inputs start at START.
    """

    tensor: int
    last_use: int
    next_use: int
    wraps: bool
    choices: tuple[Choice, ...]
    """Those that are possible. A wrapping gap cannot be recomputed, and only a wrapping gap can be restored."""

    def is_offloadable(self, graph: Graph) -> bool:
        """Whether an activation that takes memory could leave it during this gap."""
        tensor = graph.tensors[self.tensor]
        return tensor.kind == "activation" and tensor.nbytes > 0


class Gaps:
    """All gaps of a graph, by tensor and time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.uses: tuple[tuple[int, ...], ...] = self._find_uses()
        """Positions of each tensor's uses, its writing included; an input's delivery is none."""

    @cached_property
    def all(self) -> tuple[Gap, ...]:
        return tuple(gap for t in range(len(self.graph.tensors)) for gap in self._of(t))

    @cached_property
    def producer(self) -> dict[int, int]:
        """Position of the op that writes each activation."""
        return {t: k for k, op in enumerate(self.graph.ops) for t in op.writes}

    @cached_property
    def repeatable_until(self) -> tuple[int, ...]:
        """Position of an op up to which each op may run again, before it: the first to change what the op touched.

        START for an op that changes something itself.
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
        """Whether an activation can be computed again: from what is needed anyway, or can be computed again too."""
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
