"""Schedules from one choice per gap between uses.

Beaumont et al. (2020), Proposition 1: for given offloads in a given order, it is optimal to do everything as early as
memory allows. Here transfers are in the order of the uses that need them. Starting from the as-late-as-possible
sequence (`planner.schedule.alap`), swap-ins move ahead into the memory that it leaves free."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.alap import AlapSequence, alap, codes, tables
from cohabit.planner.schedule.delayed_drops import delay_drops
from cohabit.planner.schedule.gaps import Choice, Gaps
from cohabit.planner.schedule.serial import least_bytes, serial
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT, Schedule, columns, counted


class ActionSequence(NamedTuple):
    """Actions in order, and the residents at the start and end of an inference. Everything is counted."""

    verb: Ints
    what: Ints
    residents: frozenset[int]


def no_wait(
    gaps: Gaps, memory_bytes: int, choices: Sequence[Choice], ahead_bytes: int | None = None
) -> ActionSequence | None:
    """Return the best sequence with these choices; None if they need more than `memory_bytes`.

    Swap-ins move ahead while at most `ahead_bytes` are in memory, by default `memory_bytes`. Also None if recomputation
    triggers too much further recomputation for any plan to pay (`planner.schedule.alap`).
    """
    if not gaps.graph.ops:
        fits = least_bytes(gaps.graph) <= memory_bytes
        return ActionSequence(*columns(serial(gaps.graph)), frozenset()) if fits else None
    made = alap(tables(gaps), codes(choices))
    if not len(made.held) or made.held.max() > memory_bytes:
        return None
    order = with_earliest_swap_ins(made, tables(gaps).nbytes, memory_bytes if ahead_bytes is None else ahead_bytes)
    residents = (
        g.tensor for g, choice in zip(gaps.all, choices, strict=True) if g.wraps and choice is not Choice.SWAP
    )
    return ActionSequence(made.verb[order], made.what[order], frozenset(residents))


def schedule_of_choices(
    problem: Problem, gaps: Gaps, choices: Sequence[Choice], *, delayed: bool = False
) -> Schedule | None:
    """Return the schedule of these choices; None if they need more than the memory.

    With `delayed`, a swapped-out tensor keeps its bytes until its copy has ended or they are needed
    (`planner.schedule.delayed_drops`).
    """
    memory_bytes = problem.memory.nbytes
    found = no_wait(gaps, memory_bytes, choices)
    if found is None:
        return None
    if delayed and (found.verb == SWAP_OUT).any():
        actions = zip(found.verb.tolist(), found.what.tolist(), strict=True)
        delayed_ones = delay_drops(problem.graph, problem.profile, actions, found.residents, memory_bytes)
        found = ActionSequence(*columns(delayed_ones), found.residents)
    return counted(problem.arrays, found.verb, found.what, found.residents, memory_bytes)


@compiled
def with_earliest_swap_ins(made: AlapSequence, nbytes: Ints, memory_bytes: int) -> Ints:
    """Return the indices of the actions in a new order: swap-ins as early as memory allows, in the same order.

    Each stays after the tensor's last drop, and after the last op if it was there.
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
