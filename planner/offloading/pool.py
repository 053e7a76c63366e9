"""Pools for activations in fewer bytes than their peak: some are offloaded between two of their uses.

Parameters have their own bytes and are left out here. Offloading is decided per gap between two uses; the result is a
sequence of actions over the graph without its parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec.structs import replace

from cohabit.planner.graph import Graph
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.alap import AlapSequence, Codes, alap, tables
from cohabit.planner.schedule.gaps import Choice, Gap, Gaps
from cohabit.planner.schedule.no_wait import delay_drops, no_wait
from cohabit.planner.schedule.table import COMPUTE, SWAP_IN, SWAP_OUT, Action

Rank = Callable[["_OffloadCost"], tuple[float, ...]]
"""Sort key of gaps: among those that would help, the lowest is offloaded first."""


@dataclass(frozen=True, slots=True)
class _OffloadCost:
    """Cost of offloading an activation during a gap."""

    nbytes: int
    slack_s: float
    """Time between the two uses minus that of both copies."""
    copies_s: float


RANKS: Final[tuple[Rank, ...]] = (
    lambda t: (t.slack_s < 0, -t.nbytes if t.slack_s >= 0 else -t.slack_s),
    lambda t: (-t.slack_s,),
    lambda t: (t.copies_s / max(t.nbytes, 1), -t.slack_s),
)
"""Prefer large activations with hidden copies; the longest idle; the least link time per byte."""


def without_parameters(graph: Graph) -> Graph:
    """Return the graph with parameters of zero bytes that are never read."""
    tensors = tuple(replace(t, nbytes=0) if t.kind == "parameter" else t for t in graph.tensors)
    held = frozenset(i for i, t in enumerate(tensors) if t.kind != "parameter")
    ops = tuple(replace(op, reads=tuple(i for i in op.reads if i in held)) for op in graph.ops)
    return replace(graph, tensors=tensors, ops=ops, outputs=tuple(i for i in graph.outputs if i in held))


class ActivationPools:
    """Pools for one graph, with ops in the graph's order."""

    def __init__(self, graph: Graph, profile: Profile) -> None:
        self.graph = without_parameters(graph)
        self._profile = profile
        self._gaps = Gaps(self.graph)
        self.movable = [i for i, gap in enumerate(self._gaps.all) if gap.is_offloadable(self.graph)]
        """Indices of gaps during which an activation can be offloaded."""

    def least_bytes(self) -> int:
        """Return the size of the smallest pool: every activation is offloaded in every gap."""
        if not self.graph.ops:
            return sum(self.graph.tensors[i].aligned_bytes for i in self.graph.inputs)
        return int(alap(tables(self._gaps), self._choices(self.movable)).held.max(initial=0))

    def within(self, pool_bytes: int, rank: Rank) -> tuple[Action, ...] | None:
        """Return the actions of a pool of at most `pool_bytes` with few offloads; None if no pool is that small."""
        choices = self._choices_within(pool_bytes, rank)
        if choices is None:
            return None
        if not self.graph.ops:
            return ()
        # Swap-ins are early and drops late as far as the pool allows.
        found = no_wait(self._gaps, pool_bytes, choices)
        assert found is not None, "nothing is computed again"
        actions = list(zip(found.verb.tolist(), found.what.tolist(), strict=True))
        if any(verb == SWAP_OUT for verb, _ in actions):
            actions = delay_drops(self.graph, self._profile, actions, (), pool_bytes)
        return tuple(actions)

    def _choices(self, moved: Sequence[int]) -> Codes:
        choices = np.full(len(self._gaps.all), Choice.KEEP, np.int8)
        choices[list(moved)] = Choice.SWAP
        return choices

    def _choices_within(self, nbytes: int, rank: Rank) -> Codes | None:
        """Offload gaps over the fullest moment until every moment fits; None if that is impossible."""
        moved: list[int] = []
        gaps = self._gaps.all
        left = sorted(self.movable, key=lambda i: rank(self._offload_cost(gaps[i])))
        while True:
            choices = self._choices(moved)
            made = alap(tables(self._gaps), choices)
            fullest = int(made.held.argmax()) if len(made.held) else 0
            if not len(made.held) or made.held[fullest] <= nbytes:
                return choices
            position = _position(made, fullest)
            helping = next((i for i in left if gaps[i].last_use < position < gaps[i].next_use), None)
            if helping is None:
                return None
            left.remove(helping)
            moved.append(helping)

    def _offload_cost(self, gap: Gap) -> _OffloadCost:
        tensor, profile = self.graph.tensors[gap.tensor], self._profile
        nbytes = tensor.nbytes
        copies_s = profile.swap_out.seconds(nbytes) + profile.swap_in_seconds(tensor)
        between_s = sum(profile.op_seconds[gap.last_use + 1 : gap.next_use])
        return _OffloadCost(nbytes, between_s - copies_s, copies_s)


def _position(made: AlapSequence, action: int) -> int:
    """Return the op of an action: a swap-in belongs to the next op, any other action to the last one."""
    computes = int(np.count_nonzero(made.verb[: action + 1] == COMPUTE))
    return computes if made.verb[action] == SWAP_IN else computes - 1
