"""Schedules of a pool's swap plan.

A swap-out waits for the tensor's last user (section 4.2, Figure 3). The pool decides which tensors leave and when; the
schedule counts their bytes, and swap-ins wait for these."""

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import Graph
from cohabit.planner.papers.swapadvisor.pool_state import GONE, IN, OUT, RUN, SwapLog
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
    residents = _residents(problem.graph, start)
    resident_at, offset = np.full(len(residents), NOTHING), np.full(len(verb), NOTHING)
    return with_waits(
        problem.arrays, verb, what, offset, after, residents, resident_at, problem.memory.workspace_bytes
    )


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


def _residents(graph: Graph, start: Ints) -> Ints:
    """Return the weights in memory at the start. Empty ones always are."""
    used = {t for op in graph.ops for t in op.reads} | set(graph.outputs)
    return np.array(
        [
            t
            for t, tensor in enumerate(graph.tensors)
            if tensor.is_weight and (start[t] >= 0 or (not tensor.nbytes and t in used))
        ],
        np.int64,
    )
