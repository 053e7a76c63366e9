"""Simulated annealing over what streams, what stays and what comes back in the epilogue."""

from typing import Final

import numpy as np

from planner.arrays import Bools, Floats, Ints
from planner.compiled import compiled
from planner.simulate import NOTHING
from planner.streaming.page_map import NO_MORE
from planner.streaming.stream import KEPT, RELEASED, STREAMED, Decisions, Swaps, evaluate, homes, play
from planner.streaming.workload import Arrays

LINK_WEIGHT: Final = 0.002
"""Weight of a second of link time relative to a second of latency: it breaks ties."""

GUIDED: Final = 0.5
"""Share of the changes that begin with a parameter whose copy is waited for."""
ALONE: Final = 0.3
"""Share of the changes that move one parameter alone."""
FAR: Final = 0.3
"""Share of the others that look for a partner anywhere; the rest within so many parameters:"""
NEAR: Final = 8
RUN: Final = 64
"""Parameters that are looked at for partners."""
SPARE: Final = 32
"""An exchange may take a 32nd of the parameter's size more than it frees: four quarters are larger than a whole with
biases of their own."""

FITS: Final = 3
"""How many rules there are for choosing a hole."""


@compiled
def anneal(
    work: Arrays, start: Decisions, home: Ints, fixed: bool, most_pages: int, steps: int, heat: float, seed: int
) -> Decisions:
    """Walk from some decisions to better ones; return the best seen.

    A step that costs more by a share d of the cost is taken with probability exp(-d / heat); the heat falls to
    nothing at the last step. With `fixed` residents their homes are `home`, and only whether they are kept is open.
    """
    np.random.seed(seed)
    now = best = start
    now_cost = best_cost = _cost(work, now, home, fixed)
    urgent = critical(work, home if fixed else homes(work, now.fate), now)
    for step in range(steps):
        tried = changed(work, now, fixed, most_pages, urgent)
        cost = _cost(work, tried, home, fixed)
        left = heat * (1 - step / steps)
        if cost <= now_cost or np.random.random() < np.exp((now_cost - cost) / (left * best_cost + 1e-30)):
            now, now_cost = tried, cost
            urgent = critical(work, home if fixed else homes(work, now.fate), now)
        if cost < best_cost:
            best, best_cost = tried, cost
    return best


@compiled
def _cost(work: Arrays, decisions: Decisions, home: Ints, fixed: bool) -> float:
    latency_s, _, link_pages = evaluate(work, home if fixed else homes(work, decisions.fate), decisions, 0.0)
    return latency_s + LINK_WEIGHT * link_pages * work.page_s


@compiled
def changed(work: Arrays, decisions: Decisions, fixed: bool, most_pages: int, urgent: Ints) -> Decisions:
    """Change one decision, or exchange some; often one of what is waited for."""
    fate, hold, fit = decisions.fate.copy(), decisions.hold.copy(), decisions.fit.copy()
    count = len(fate)
    kind = np.random.random()
    if kind < 0.04:
        fit[:] = np.random.randint(FITS)
    elif kind < 0.25 and len(work.reused) > 0:
        j = work.reused[np.random.randint(len(work.reused))]
        hold[j] = not hold[j]
    else:
        p = np.random.randint(count)
        if len(urgent) > 0 and np.random.random() < GUIDED:
            p = urgent[np.random.randint(len(urgent))]
        if fate[p] != STREAMED and (fixed or kind < 0.4):
            fate[p] = KEPT + RELEASED - fate[p]
        elif not fixed:
            _exchange(work, fate, p, most_pages)
    return Decisions(fate, hold, fit, decisions.lead)


@compiled
def _exchange(work: Arrays, fate: Ints, p: int, most_pages: int) -> None:
    """Turn a resident into a streamed parameter or the other way round, mostly with others that make up for its size.

    These follow one another in the order of use, from near the first or from anywhere. Residents leave until there is
    room, and streamed parameters take what is left of it.
    """
    count = len(fate)
    comes = fate[p] == STREAMED
    fate[p] = np.random.randint(RELEASED, KEPT + 1) if comes else STREAMED
    more = work.size[p] if comes else -work.size[p]  # pages of residents, compared with before
    spare = work.size[p] // SPARE
    if np.random.random() >= ALONE:
        reach = count if np.random.random() < FAR else NEAR
        q = p + np.random.randint(-reach, reach + 1)
        for i in range(q, q + RUN):
            r = i % count
            if r == p or work.size[r] == 0:
                continue
            if fate[r] != STREAMED and more > spare:
                fate[r] = STREAMED
                more -= work.size[r]
            elif fate[r] == STREAMED and more + work.size[r] <= spare:
                fate[r] = np.random.randint(RELEASED, KEPT + 1)
                more += work.size[r]
    pages = work.size[fate != STREAMED].sum()
    while pages > most_pages:
        q = np.random.randint(count)
        if fate[q] != STREAMED and q != p:
            fate[q] = STREAMED
            pages -= work.size[q]
        elif pages == work.size[p]:
            fate[p] = STREAMED
            break


@compiled
def holds_up_to(work: Arrays, seconds: float) -> Bools:
    """Per use, whether the next use of the same parameter comes within so much compute time."""
    hold = np.zeros(len(work.use_parameter), np.bool_)
    for k in range(len(work.op_s)):
        for j in range(work.use_start[k], work.use_start[k + 1]):
            if work.use_next[j] < NO_MORE:
                hold[j] = work.op_start_s[work.use_next[j]] - work.op_start_s[k + 1] <= seconds
    return hold


@compiled
def critical(work: Arrays, home: Ints, decisions: Decisions) -> Ints:
    """Parameters whose copies stand, without a pause of the link between, before one that an op waits for.

    Without some of these copies, the op would wait less.
    """
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
def _lateness(work: Arrays, swaps: Swaps) -> tuple[Floats, Floats, Bools]:
    """Start and end of each copy on an undisturbed link, and whether an op that was ready otherwise waits for it."""
    count, ops = swaps.length[0], len(work.op_s)
    start_s, end_s, late = np.full(count, np.inf), np.full(count, np.inf), np.zeros(count, np.bool_)
    newest = np.full(len(work.size), NOTHING)  # each parameter's latest copy
    op_end_s = np.zeros(ops + 1)
    link_s, i = 0.0, 0
    for k in range(ops):
        while i < count and swaps.before[i] <= k:
            start_s[i] = max(link_s, op_end_s[swaps.after_op[i] + 1])
            link_s = start_s[i] + work.swap_s[swaps.parameter[i]]
            end_s[i] = link_s
            newest[swaps.parameter[i]] = i
            i += 1
        ready_s = op_end_s[k]
        for p in work.use_parameter[work.use_start[k] : work.use_start[k + 1]]:
            if newest[p] >= 0 and end_s[newest[p]] > op_end_s[k]:
                late[newest[p]] = True
                ready_s = max(ready_s, end_s[newest[p]])
        op_end_s[k + 1] = ready_s + work.op_s[k]
    return start_s, end_s, late
