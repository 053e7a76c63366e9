"""Schedules of a pool's swap plan.

A swap-out waits for the tensor's last user (section 4.2, Figure 3). A swap-in, and an op for its results and scratch,
waits until the former holder has left the object (section 4.1). Objects are ranges of a counted pool, so a step waits
for its bytes as well; that is seldom later."""

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.swapadvisor.pool_state import GONE, IN, OUT, RESULT, RUN, SCRATCH, SwapLog
from cohabit.planner.papers.swapadvisor.pool_swaps import plan_swaps
from cohabit.planner.papers.swapadvisor.pools import MemoryPool, OpUses
from cohabit.planner.problem import Problem
from cohabit.planner.schedule.table import (
    COMPUTE,
    DROP,
    NOTHING,
    SWAP_IN,
    SWAP_OUT,
    Schedule,
    with_waits,
)


def schedule_of_pool(
    problem: Problem, uses: OpUses, order: Ints, pool: MemoryPool, threshold: float, double_pass: bool = True
) -> Schedule | None:
    """Plan the swaps of an order in a pool; None if the ops cannot run in it."""
    fits, log, start = plan_swaps(uses, order, pool.class_of_size, pool.counts, threshold, double_pass)
    if not fits:
        return None
    verb, what, after = _rows(uses, log)
    residents = _residents(problem.arrays, start)
    resident_at, offset = np.full(len(residents), NOTHING), np.full(len(verb), NOTHING)
    schedule = with_waits(
        problem.arrays, verb, what, offset, after, residents, resident_at, problem.memory.workspace_bytes
    )
    objects = _object_waits(uses, log, start, int(pool.counts.sum()), len(verb))
    return schedule._replace(wait=np.maximum(schedule.wait, objects))


@compiled
def _rows(uses: OpUses, log: SwapLog) -> tuple[Ints, Ints, Ints]:
    """Return verbs, their ops or tensors, and the ops that swap-outs wait for."""
    most = log.length[0]
    verb, what, after = np.empty(most, np.int64), np.empty(most, np.int64), np.full(most, NOTHING)
    used, rows, done = np.full(len(uses.size), NOTHING), 0, 0
    for entry in log.entries[:most]:
        x = entry.what
        if entry.verb == RUN:
            for u in range(uses.start[x], uses.start[x + 1]):
                used[uses.tensor[u]] = done
            verb[rows], what[rows], rows, done = COMPUTE, x, rows + 1, done + 1
        elif entry.verb == IN:
            used[x] = NOTHING
            verb[rows], what[rows], rows = SWAP_IN, x, rows + 1
        elif entry.verb == OUT:
            verb[rows], what[rows], after[rows], rows = SWAP_OUT, x, used[x], rows + 1
        elif entry.verb == GONE:
            verb[rows], what[rows], rows = DROP, x, rows + 1
    return verb[:rows], what[:rows], after[:rows]


@compiled
def _object_waits(uses: OpUses, log: SwapLog, start: Ints, objects: int, rows: int) -> Ints:
    """Return, per row and lane, the last step that must have ended before the row's objects are free, or NOTHING."""
    wait = np.full((rows, 3), NOTHING)
    where = start.copy()
    touched = np.full((len(start), 3), NOTHING)  # per tensor and lane, the last step that used its object
    free = np.full((objects, 3), NOTHING)  # per object and lane, the last step of its former holder
    needed = np.full(3, NOTHING)  # by the next op's results and scratch
    steps = np.zeros(3, np.int64)  # so far on each lane
    scratch, row = NOTHING, 0
    for entry in log.entries[: log.length[0]]:
        x, o = entry.what, entry.where
        if entry.verb == RESULT or entry.verb == SCRATCH:
            needed = np.maximum(needed, free[o])
            if entry.verb == RESULT:
                where[x], touched[x] = o, NOTHING
            else:
                scratch = o
            continue
        if entry.verb == RUN:
            wait[row], wait[row, COMPUTE] = needed, NOTHING
            for u in range(uses.start[x], uses.start[x + 1]):
                touched[uses.tensor[u], COMPUTE] = steps[COMPUTE]
            if scratch >= 0:
                free[scratch], free[scratch, COMPUTE] = NOTHING, steps[COMPUTE]
            needed, scratch = np.full(3, NOTHING), NOTHING
            steps[COMPUTE] += 1
        elif entry.verb == IN:
            wait[row], wait[row, SWAP_IN] = free[o], NOTHING
            where[x], touched[x] = o, NOTHING
            touched[x, SWAP_IN] = steps[SWAP_IN]
            steps[SWAP_IN] += 1
        elif entry.verb == OUT:
            touched[x, SWAP_OUT] = steps[SWAP_OUT]
            steps[SWAP_OUT] += 1
        elif where[x] >= 0:  # it leaves its object
            free[where[x]] = touched[x]
            where[x] = NOTHING
        row += 1
    return wait


def _residents(arrays: GraphArrays, start: Ints) -> Ints:
    """Return the weights in memory at the start. Empty ones always are, if they are used."""
    used = np.zeros(len(start), np.bool_)
    used[arrays.read], used[arrays.outputs] = True, True
    empty = (arrays.copied_bytes == 0) & used
    residents: Ints = np.flatnonzero(arrays.is_weight & ((start >= 0) | empty)).astype(np.int64)
    return residents
