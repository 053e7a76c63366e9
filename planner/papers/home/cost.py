"""HOME's cost model (He et al., section 3.4, Algorithm 2): the cost of one choice per gap, without a plan.

The algorithm goes through the stages of an iteration and tracks the time, the memory and a queue of tensors on their
way out. If a stage needs more memory than is free, it waits for the front of the queue. A swap costs the part of its
transfers that is not hidden (Figure 4: (OFFLOAD - FWD) + (PRE - BWD), each at least 0), a recomputation its ops' time.

Here a stage is an op. Prefetches are issued as early as memory allows, as in `no_wait`; in the paper, with the previous
stage. Copies in and out have a channel each. The model ignores fragmentation and slowdowns between ops and copies.
"""

from typing import Final

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.schedule.alap import CHANGES, NEEDED, WRITES, AlapSequence, Codes, Tables, alap
from cohabit.planner.schedule.no_wait import with_earliest_swap_ins
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT

TOO_MUCH_S: Final = 1e9
"""Cost of choices that do not fit, times the ratio of their peak to the memory."""

COPYING: Final = 1e-3
"""Fraction of the copies' time that counts even if hidden: among equal choices, those that copy less are better."""


@compiled
def evaluate(t: Tables, g: GraphArrays, choices: Codes, memory_bytes: int) -> float:
    """Return the seconds of an iteration, plus a little for its copies; TOO_MUCH_S or more if choices do not fit."""
    made = alap(t, choices)
    if not len(made.held):
        return float(TOO_MUCH_S * TOO_MUCH_S)
    peak_bytes = made.held.max()
    if peak_bytes > memory_bytes:
        return float(TOO_MUCH_S * peak_bytes / memory_bytes)
    order = with_earliest_swap_ins(made, t.nbytes, memory_bytes)
    total_s, copying_s = overhead(t, g, made, order, memory_bytes)
    return float(total_s + COPYING * copying_s)


@compiled
def overhead(t: Tables, g: GraphArrays, made: AlapSequence, order: Ints, memory_bytes: int) -> tuple[float, float]:
    """Run Algorithm 2 over the actions of a sequence that fits in memory, in this order.

    Returns the time of an iteration, and that of all copies, hidden or not.
    One long function for the reason given in planner.schedule.alap.
    """
    start, ids, nbytes, scratch_bytes = t.start, t.ids, t.nbytes, t.scratch_bytes
    verb, what = made.verb, made.what
    op_s, in_s, out_s = g.op_s, g.swap_in_s, g.swap_out_s
    there_s, used_s, saved_s = np.zeros(len(nbytes)), np.zeros(len(nbytes)), np.zeros(len(nbytes))
    # Released bytes, and when they are free: [0] of tensors being copied out, [1] others; each in order of time.
    free_s, freed_bytes = np.empty((2, len(verb))), np.empty((2, len(verb)), np.int64)
    head, tail = np.zeros(2, np.int64), np.zeros(2, np.int64)
    taken_bytes = _bytes_at_start(t, made)
    compute_s = inward_s = outward_s = copying_s = 0.0
    for n in order:
        i = what[n]
        if verb[n] == SWAP_OUT:
            outward_s = max(outward_s, there_s[i]) + out_s[i]
            copying_s += out_s[i]
            saved_s[i] = outward_s
            continue
        if verb[n] == DROP:
            queue = 0 if saved_s[i] > used_s[i] else 1
            free_s[queue, tail[queue]] = max(saved_s[i], used_s[i], compute_s)
            freed_bytes[queue, tail[queue]] = nbytes[i]
            tail[queue] += 1
            continue
        # The bytes that the action takes, and when its operands are ready.
        if verb[n] == SWAP_IN:
            more_bytes, scratch, ready_s = nbytes[i], 0, max(inward_s, saved_s[i])
        else:
            more_bytes, scratch, ready_s = 0, scratch_bytes[i], compute_s
            for u in range(start[NEEDED, i], start[NEEDED, i + 1]):
                ready_s = max(ready_s, there_s[ids[u]])
            for u in range(start[CHANGES, i], start[CHANGES, i + 1]):
                ready_s = max(ready_s, saved_s[ids[u]])
            for u in range(start[WRITES, i], start[WRITES, i + 1]):
                more_bytes += nbytes[ids[u]]
        # Wait for released bytes, the earliest first, until these fit.
        while taken_bytes + more_bytes + scratch > memory_bytes:
            queue = 0 if head[1] == tail[1] else 1
            if head[queue] == tail[queue]:
                break
            if head[0] < tail[0] and free_s[0, head[0]] < free_s[queue, head[queue]]:
                queue = 0
            ready_s = max(ready_s, free_s[queue, head[queue]])
            taken_bytes -= freed_bytes[queue, head[queue]]
            head[queue] += 1
        # Run the action on its channel.
        taken_bytes += more_bytes + scratch
        if verb[n] == SWAP_IN:
            inward_s = ready_s + in_s[i]
            copying_s += in_s[i]
            there_s[i] = used_s[i] = inward_s
            continue
        compute_s = ready_s + op_s[i]
        free_s[1, tail[1]], freed_bytes[1, tail[1]] = compute_s, scratch
        tail[1] += 1
        for kind in range(NEEDED, CHANGES + 1):
            for u in range(start[kind, i], start[kind, i + 1]):
                used_s[ids[u]] = compute_s
                if kind in (WRITES, CHANGES):
                    there_s[ids[u]] = compute_s
    return compute_s, copying_s


@compiled
def _bytes_at_start(t: Tables, made: AlapSequence) -> int:
    """Return the bytes in memory before the first action."""
    i = made.what[0]
    held = made.held[0]
    if made.verb[0] == SWAP_IN:
        held -= t.nbytes[i]
    elif made.verb[0] == COMPUTE:
        held -= t.scratch_bytes[i] + t.nbytes[t.ids[t.start[WRITES, i] : t.start[WRITES, i + 1]]].sum()
    return int(held)
