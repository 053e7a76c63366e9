"""Mutation of streaming decisions: a short annealing walk over which parameters to stream, keep, or release."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.schedule.table import NOTHING
from cohabit.planner.streaming.page_map import NO_MORE
from cohabit.planner.streaming.stream import (
    KEPT,
    RELEASED,
    STREAMED,
    Decisions,
    Swaps,
    place_residents,
    play,
    timed,
)
from cohabit.planner.streaming.workload import Arrays, Numbering

LINK_WEIGHT: Final = 0.002
"""Cost of a second of link time relative to a second of latency; breaks ties."""

GUIDED: Final = 0.5
"""Fraction of changes that begin with a critical copy (see `critical`)."""
REFITTED: Final = 0.08
"""Fraction of changes that choose another rule for holes."""
SOME: Final = 0.75
"""Fraction of these that do so only for some consecutive uses."""
EARLY: Final = 0.3
"""Fraction of changes that let a copy go ahead, or stop doing so."""
HELD: Final = 0.13
"""Fraction of changes that hold a parameter until its next use (if any), or stop doing so."""
RESTORED: Final = 0.1
"""Fraction of the other changes of a resident that only decide whether it stays or is restored in the end."""
ALONE: Final = 0.3
"""Fraction of exchanges that move one parameter alone."""
FAR: Final = 0.3
"""Fraction of the others that look for partners anywhere; the rest look within `NEAR` parameters."""
NEAR: Final = 8
RUN: Final = 64
"""Number of parameters examined as partners."""
SIMILAR: Final = 8
"""Maximum ratio of the sizes of partners."""
SPARE: Final = 32
"""An exchange may take 1/32 of the parameter's size more than it frees: four quarters of a layer, each with a bias,
are larger than the whole."""

FITS: Final = 3
"""Number of rules for choosing a hole."""


class Critical(NamedTuple):
    """Critical copies (see `critical`), as arrays of the same length."""

    parameter: Ints
    op: Ints
    """First op that reads the copy."""
    pause: Ints
    """Op whose end the link waited for before these copies, or NOTHING."""


@compiled
def walk(
    work: Arrays,
    numbering: Numbering,
    start: Decisions,
    resident_at: Ints,
    fixed: bool,
    steps: int,
    heat: float,
    seed: int,
) -> Decisions:
    """Walk from the given decisions to better ones, and return the best seen.

    A step that raises the cost by a fraction d is taken with probability exp(-d / heat); the heat falls to zero
    by the last step. With `fixed` residents, their set stays; only whether each is kept may change.
    """
    np.random.seed(seed)
    now = best = start
    now_cost, urgent = _judged(work, numbering, now, resident_at, fixed)
    best_cost = now_cost
    for step in range(steps):
        tried = changed(work, now, fixed, urgent)
        cost, waited_for = _judged(work, numbering, tried, resident_at, fixed)
        left = heat * (1 - step / steps)
        if cost <= now_cost or np.random.random() < np.exp((now_cost - cost) / (left * best_cost + 1e-30)):
            now, now_cost, urgent = tried, cost, waited_for
        if cost < best_cost:
            best, best_cost = tried, cost
    return best


@compiled
def _judged(
    work: Arrays, numbering: Numbering, decisions: Decisions, resident_at: Ints, fixed: bool
) -> tuple[float, Critical]:
    """Return the cost of decisions, and the critical copies."""
    at = resident_at if fixed else place_residents(work, decisions.choice)
    swaps, latency_s = play(work, at, decisions)
    latency_s, _, link_pages = timed(work, numbering, at, swaps, latency_s, 0.0)
    return latency_s + LINK_WEIGHT * link_pages * work.page_s, critical(work, swaps)


@compiled
def changed(work: Arrays, decisions: Decisions, fixed: bool, urgent: Critical) -> Decisions:
    """Return decisions with one change or exchange, often of a critical copy."""
    choice, hold = decisions.choice.copy(), decisions.hold.copy()
    fit, lead = decisions.fit.copy(), decisions.lead.copy()
    count, ops = len(choice), len(work.op_s)
    kind, j = np.random.random(), np.random.randint(len(hold))
    if kind < REFITTED:
        first, end = 0, len(fit)
        if np.random.random() < SOME:
            first, end = j, j + int(len(fit) ** np.random.random())
        fit[first:end] = np.random.randint(FITS)
    elif kind < REFITTED + EARLY:
        ahead = int(ops ** np.random.random())
        if len(urgent.op) > 0 and np.random.random() < GUIDED:
            c = np.random.randint(len(urgent.op))
            op = urgent.op[c]
            ahead = op - max(urgent.pause[c], 0) + np.random.randint(NEAR)
            for i in range(work.use_start[op], work.use_start[min(op + 1, ops)]):
                if work.use_parameter[i] == urgent.parameter[c]:
                    j = i
        lead[j] = 0 if lead[j] >= ahead else ahead
    elif kind < REFITTED + EARLY + HELD and work.use_next[j] < NO_MORE:
        hold[j] = not hold[j]
    else:
        p = np.random.randint(count)
        if len(urgent.parameter) > 0 and np.random.random() < GUIDED:
            p = urgent.parameter[np.random.randint(len(urgent.parameter))]
        if choice[p] != STREAMED and (fixed or np.random.random() < RESTORED):
            choice[p] = KEPT + RELEASED - choice[p]
        elif not fixed:
            _exchange(work, choice, p)
    return Decisions(choice, hold, fit, lead)


@compiled
def _exchange(work: Arrays, choice: Ints, p: int) -> None:
    """Turn a resident into a streamed parameter or vice versa, mostly with partners that balance its size.

    Partners are consecutive in the order of use, from near the first or from anywhere. Residents leave until the rest
    fit, and streamed parameters take the remaining pages.
    """
    count = len(choice)
    comes = choice[p] == STREAMED
    choice[p] = np.random.randint(RELEASED, KEPT + 1) if comes else STREAMED
    more = work.size[p] if comes else -work.size[p]  # change of the residents' pages
    spare = work.size[p] // SPARE
    if np.random.random() >= ALONE:
        reach = count if np.random.random() < FAR else NEAR
        q = p + np.random.randint(-reach, reach + 1)
        for i in range(q, q + RUN):
            r = i % count
            if not work.size[p] <= SIMILAR * work.size[r] <= SIMILAR**2 * work.size[p] or r == p:
                continue
            if choice[r] != STREAMED and more > spare:
                choice[r] = STREAMED
                more -= work.size[r]
            elif choice[r] == STREAMED and more + work.size[r] <= spare:
                choice[r] = np.random.randint(RELEASED, KEPT + 1)
                more += work.size[r]
    # Without enough partners, evict random residents until the rest fit.
    pages = work.size[choice != STREAMED].sum()
    while pages > work.partition_pages:
        q = np.random.randint(count)
        if choice[q] != STREAMED and q != p:
            choice[q] = STREAMED
            pages -= work.size[q]
        elif pages == work.size[p]:
            choice[p] = STREAMED
            break


@compiled
def holds_up_to(work: Arrays, seconds: float) -> Bools:
    """Return, per use, whether the parameter's next use comes within `seconds` of compute time."""
    hold = np.zeros(len(work.use_parameter), np.bool_)
    for k in range(len(work.op_s)):
        for j in range(work.use_start[k], work.use_start[k + 1]):
            if work.use_next[j] < NO_MORE:
                hold[j] = work.op_start_s[work.use_next[j]] - work.op_start_s[k + 1] <= seconds
    return hold


@compiled
def critical(work: Arrays, swaps: Swaps) -> Critical:
    """Return the copies that lead, without a pause of the link, up to one that an op waits for.

    The op would wait less if some of them were left out, or moved into the pause before them.
    """
    start_s, end_s, late = _lateness(work, swaps)
    most = swaps.length[0]
    found = Critical(np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64))
    count, behind, waited_for = 0, 0, False
    for i in range(most - 1, -1, -1):
        waited_for |= late[i]
        if waited_for:
            found.parameter[count], found.op[count] = swaps.parameter[i], swaps.op[i]
            count += 1
        if i == 0 or start_s[i] > end_s[i - 1]:
            found.pause[behind:count] = swaps.after_op[i]
            behind, waited_for = count, False
    return Critical(found.parameter[:count], found.op[:count], found.pause[:count])


@compiled
def _lateness(work: Arrays, swaps: Swaps) -> tuple[Floats, Floats, Bools]:
    """Return start and end of each copy without slowdowns, and whether an otherwise ready op waits for it."""
    count, ops = swaps.length[0], len(work.op_s)
    start_s, end_s, late = np.full(count, np.inf), np.full(count, np.inf), np.zeros(count, np.bool_)
    newest = np.full(len(work.size), NOTHING)  # each parameter's latest copy
    op_end_s = np.zeros(ops + 1)
    link_s, i = 0.0, 0
    for k in range(ops):
        while i < count and swaps.after_op[i] < k:
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
