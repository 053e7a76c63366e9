"""HOME's cost model (He et al., section 3.4, Algorithm 2): what a choice per gap costs, without making a plan.

The algorithm goes through the stages of an iteration and keeps the time, the memory and a queue of tensors on their
way out; when a stage needs more memory than there is, it waits for the front of the queue. A swap costs what of its
transfers nothing hides (Figure 4: (OFFLOAD - FWD) + (PRE - BWD), each at least 0), a recomputation its ops' time.

Here a stage is an op. A prefetch is issued as early as memory allows, as `no_wait` does it; the paper has it issued
with the stage before. Copies in and out have a channel each. The model knows neither fragmentation nor how ops and
copies slow each other down.
"""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.profile import Profile
from cohabit.planner.schedule.alap import CHANGES, NEEDED, WRITES, AlapSequence, Codes, Tables, alap
from cohabit.planner.schedule.gaps import Gaps
from cohabit.planner.schedule.no_wait import with_earliest_swap_ins
from cohabit.planner.schedule.table import COMPUTE, DROP, SWAP_IN, SWAP_OUT

TOO_MUCH_S: Final = 1e9
"""Cost of choices that need too much memory, for each memory's worth that they need."""

COPYING: Final = 1e-3
"""Part of the copies' time that counts even if it is hidden: of equal choices, those that copy less are better."""


class Seconds(NamedTuple):
    """Times of ops (by position) and of copies (by tensor)."""

    op: Floats
    swap_in: Floats
    swap_out: Floats


def seconds(gaps: Gaps, profile: Profile) -> Seconds:
    tensors = gaps.graph.tensors
    return Seconds(
        np.array(profile.op_seconds),
        np.array([profile.swap_in_seconds(t) for t in tensors]),
        np.array([profile.swap_out.seconds(t.nbytes) for t in tensors]),
    )


@compiled
def evaluate(t: Tables, times: Seconds, choices: Codes, memory_bytes: int) -> float:
    """Seconds of an iteration, and a little for its copies; TOO_MUCH_S or more where the choices do not fit."""
    made = alap(t, choices)
    if not len(made.held):
        return float(TOO_MUCH_S * TOO_MUCH_S)
    peak_bytes = made.held.max()
    if peak_bytes > memory_bytes:
        return float(TOO_MUCH_S * peak_bytes / memory_bytes)
    order = with_earliest_swap_ins(made, t.nbytes, memory_bytes)
    total_s, copying_s = overhead(t, times, made, order, memory_bytes)
    return float(total_s + COPYING * copying_s)


@compiled
def overhead(t: Tables, times: Seconds, made: AlapSequence, order: Ints, memory_bytes: int) -> tuple[float, float]:
    """Algorithm 2 over the actions of a sequence that fits in the memory, in this order.

    Returns the time of an iteration, and that of all copies, hidden or not.
    One long function for the reason given in planner.schedule.alap.
    """
    start, ids, nbytes, scratch_bytes = t.start, t.ids, t.nbytes, t.scratch_bytes
    verb, what = made.verb, made.what
    op_s, in_s, out_s = times.op, times.swap_in, times.swap_out
    there_s, used_s, saved_s = np.zeros(len(nbytes)), np.zeros(len(nbytes)), np.zeros(len(nbytes))
    # Bytes that were given up and when they are free: [0] what is copied out, [1] the rest, each in order of time.
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
        while taken_bytes + more_bytes + scratch > memory_bytes:
            queue = 0 if head[1] == tail[1] else 1
            if head[queue] == tail[queue]:
                break
            if head[0] < tail[0] and free_s[0, head[0]] < free_s[queue, head[queue]]:
                queue = 0
            ready_s = max(ready_s, free_s[queue, head[queue]])
            taken_bytes -= freed_bytes[queue, head[queue]]
            head[queue] += 1
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
    """What is in memory before the first action."""
    i = made.what[0]
    held = made.held[0]
    if made.verb[0] == SWAP_IN:
        held -= t.nbytes[i]
    elif made.verb[0] == COMPUTE:
        held -= t.scratch_bytes[i] + t.nbytes[t.ids[t.start[WRITES, i] : t.start[WRITES, i + 1]]].sum()
    return int(held)
