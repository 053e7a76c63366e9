"""From a fate per gap to a sequence of actions, and to a plan.

Beaumont et al. (2020), Proposition 1: once it is decided what to offload, and in which order, it is best to do
everything as early as memory allows. Here transfers are in the order of the uses that they are for: starting from the
as-late-as-possible sequence (`planner.sequence.alap`), swap-ins move ahead into the memory that it leaves free."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.plan import Plan
from cohabit.planner.problem import Problem
from cohabit.planner.sequence.alap import COMPUTE, DROP, SWAP_IN, AlapSequence, alap, codes, tables
from cohabit.planner.sequence.delayed_drops import delay_drops
from cohabit.planner.sequence.gaps import Fate, Gaps
from cohabit.planner.sequence.sequence import Action, ActionKind, lay_out_within, plan_of
from cohabit.planner.sequence.serial import least_bytes, serial

Decided = tuple[list[Action], frozenset[int]]
"""A sequence, and the residents that it starts and ends with."""

KINDS: Final = tuple(ActionKind)
"""By number."""
SHARES: Final = (1.0, 0.97, 0.94, 0.9, 0.85, 0.8, 0.7, 0.6)
"""Of the memory, what swap-ins may use; the rest is for fragmentation."""


def no_wait(gaps: Gaps, memory_bytes: int, fates: Sequence[Fate], ahead_bytes: int | None = None) -> Decided | None:
    """The best sequence with these fates; None if they need more than `memory_bytes`, alignment counted.

    Swap-ins go ahead as long as there are at most `ahead_bytes` in memory, by default all of it. None also where
    recomputation triggers so much recomputation that no plan would be worth it (`planner.sequence.alap`).
    """
    if not gaps.graph.ops:
        return (serial(gaps.graph), frozenset()) if least_bytes(gaps.graph) <= memory_bytes else None
    made = alap(tables(gaps), codes(fates))
    if not len(made.held) or made.held.max() > memory_bytes:
        return None
    order = hastened(made, tables(gaps).nbytes, memory_bytes if ahead_bytes is None else ahead_bytes)
    steps = zip(made.verb[order].tolist(), made.what[order].tolist(), strict=True)
    actions = [Action(KINDS[verb], what) for verb, what in steps]
    residents = (g.tensor for g, fate in zip(gaps.all, fates, strict=True) if g.wraps and fate is not Fate.SWAP)
    return actions, frozenset(residents)


def fit(
    problem: Problem,
    gaps: Gaps,
    fates: Sequence[Fate],
    shares: Sequence[float] = SHARES,
    *,
    delayed: bool = False,
    nodes: int = 0,
) -> Plan | None:
    """The plan with the largest share of the memory for swap-ins that can be placed; None if there is none.

    With `delayed`, what is swapped out keeps its bytes until it has left or they are needed
    (`departures`): plans wait less, but are harder to place. Many ops make layouts slow, so that without one
    for the swap-ins at their latest no other is tried. `nodes` are those of `placement.place`.
    """
    graph, profile, memory_bytes = problem.graph, problem.profile, problem.memory_bytes
    if delayed:
        late_ones = no_wait(gaps, memory_bytes, fates, 0)
        if late_ones is None or lay_out_within(graph, *late_ones, memory_bytes, nodes) is None:
            return None
    before: list[Action] | None = None
    for share in shares:
        room_bytes = int(share * memory_bytes)
        decided = no_wait(gaps, memory_bytes, fates, room_bytes)
        if decided is None:
            return None
        actions, residents = decided
        if delayed and any(action.verb is ActionKind.SWAP_OUT for action in actions):
            actions = delay_drops(graph, profile, actions, residents, room_bytes)
        if actions == before:
            continue
        plan = plan_of(problem, actions, residents, nodes)
        if plan is not None:
            return plan
        before = actions
    return None


@compiled
def hastened(made: AlapSequence, nbytes: Ints, memory_bytes: int) -> Ints:
    """Indices of the actions in a new order: swap-ins stand as early as memory allows, in the same order.

    They stand after the tensor's last drop, and after the last op if they were there.
    """
    count = len(made.verb)
    held = made.held.copy()
    left = np.zeros(len(nbytes), np.int64)
    ops, done = (made.verb == COMPUTE).sum(), 0
    order, length = np.empty(count, np.int64), 0
    moved, place, moves = np.empty(count, np.int64), np.empty(count, np.int64), 0
    front = 0
    for i in range(count):
        if made.verb[i] == COMPUTE:
            done += 1
        elif made.verb[i] == DROP:
            left[made.what[i]] = i + 1
        elif made.verb[i] == SWAP_IN:
            at, low, size = i, i, nbytes[made.what[i]]
            if done < ops:
                low = max(front, left[made.what[i]])
            while at > low and held[at - 1] + size <= memory_bytes:
                at -= 1
                held[at] += size
            moved[moves], place[moves], front = i, at, at
            moves += 1
    move = 0
    for i in range(count):
        while move < moves and place[move] <= i:
            order[length] = moved[move]
            move += 1
            length += 1
        if made.verb[i] != SWAP_IN:
            order[length] = i
            length += 1
    return order
