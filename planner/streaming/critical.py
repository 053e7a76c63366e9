"""Critical copies: those whose absence would have shortened a stall."""

import numpy as np

from planner.arrays import Floats, Ints
from planner.compiled import compiled
from planner.streaming.stream import Decisions, Swaps, play
from planner.streaming.workload import Arrays


@compiled
def critical(work: Arrays, home: Ints, decisions: Decisions) -> Ints:
    """Parameters whose copies stand, without a pause of the link between, before one that an op waits for."""
    swaps, _ = play(work, home, decisions)
    start_s, end_s, late = _lateness(work, swaps)
    found = np.empty(swaps.length[0], np.int64)
    count, waited_for = 0, False
    for i in range(swaps.length[0] - 1, -1, -1):
        waited_for |= late[i]
        if waited_for:
            found[count] = swaps.parameter[i]
            count += 1
        if i > 0 and start_s[i] > end_s[i - 1]:
            waited_for = False
    return found[:count]


@compiled
def _lateness(work: Arrays, swaps: Swaps) -> tuple[Floats, Floats, np.ndarray]:
    """Start and end of each copy on an undisturbed link, and whether an op that was ready otherwise waits for it."""
    count, ops = swaps.length[0], len(work.op_s)
    start_s, end_s, late = np.empty(count), np.empty(count), np.zeros(count, np.bool_)
    op_end_s = np.zeros(ops + 1)
    link_s, i = 0.0, 0
    for k in range(ops):
        ready_s = op_end_s[k]
        while i < count and swaps.op[i] <= k:
            link_s = max(link_s, op_end_s[swaps.after_op[i] + 1])
            start_s[i] = link_s
            link_s += work.swap_s[swaps.parameter[i]]
            end_s[i] = link_s
            late[i] = link_s > op_end_s[k]
            ready_s = max(ready_s, link_s)
            i += 1
        op_end_s[k + 1] = ready_s + work.op_s[k]
    start_s[i:], end_s[i:] = np.inf, np.inf
    return start_s, end_s, late
