"""Simulates one inference in which parameters stream through memory past residents, by given decisions.

Ops are scanned in order. A parameter that is not in memory when its op comes goes into a hole that is free by the time
the link can begin, or else into the hole that is free first. Only if there is no hole does it displace a parameter
that the decisions would keep: the one needed furthest in the future (Belady; SwapAdvisor, section 4.2). Parameters
never change: displacing one costs nothing, except that a resident must be restored.

The copies of an op come after those of the ops before it, unless the decisions let one go first: into a hole that is
free while the link would wait for another."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.simulate import COMPUTE, NOTHING, SWAP_IN, LaneArrays, empty_lanes, latency_and_period
from cohabit.planner.streaming.page_map import (
    NO_MORE,
    NOWHERE,
    Hole,
    PageMap,
    cover,
    empty_page_map,
    find_hole,
    find_room,
    put,
    remove,
    tidy,
    use,
)
from cohabit.planner.streaming.workload import Arrays

STREAMED: Final = 0
"""Not a resident."""
RELEASED: Final = 1
"""A resident whose bytes are free after its last use; the epilogue restores it."""
KEPT: Final = 2
"""A resident that stays."""


class Decisions(NamedTuple):
    """What a search decides."""

    fate: Ints
    """One of the three above per parameter."""
    hold: Bools
    """Per use of a streamed parameter, whether it stays until its next use."""
    fit: Ints
    """Per use, which hole its copy prefers: see `planner.streaming.page_map.find_hole`."""
    lead: Ints
    """Per use, how many ops earlier than its own its copy may be issued, ahead of other copies."""


def uniform(fate: Ints, hold: Bools, fit: int) -> Decisions:
    """Decisions with one rule for all holes, in which all copies are in the order of their ops."""
    return Decisions(fate, hold, np.full(len(hold), fit), np.zeros(len(hold), np.int64))


class Swaps(NamedTuple):
    """The swap-ins of one inference, in the order of their lane."""

    parameter: Ints
    page: Ints
    after_op: Ints
    """The last op that used these bytes before, or NOTHING."""
    op: Ints
    """The op that reads it first; the number of ops for the epilogue."""
    before: Ints
    """The op before which it is issued at the latest, in ascending order; `op`, unless it went first."""
    length: Ints
    """How many elements of the arrays are in use, [1]."""


@compiled
def homes(work: Arrays, fate: Ints) -> Ints:
    """Homes for residents, one after the other: per parameter a page, or NOWHERE.

    The released ones lie together in the order of their use, so that what they leave is in one piece; in a single
    budget they lie next to the window. Those that activations would cover before their first use are no residents
    after all. Empty parameters take no room and are always resident.
    """
    home = np.full(len(fate), NOWHERE)
    page = 0
    end = work.workspace_pages + 1
    ops = len(work.op_s)
    for chosen in (KEPT, RELEASED):
        for i in range(len(fate)):
            p = len(fate) - 1 - i if work.single and chosen == RELEASED else i
            if fate[p] == chosen and work.size[p] > 0:
                home[p] = end - page - work.size[p] if work.single else page
                page += work.size[p]
                if work.single and home[p] < 1 + work.zone_so_far[min(work.first_use[p], ops - 1)]:
                    home[p] = NOWHERE
    home[work.size == 0] = 0
    return home


@compiled
def play(work: Arrays, home: Ints, decisions: Decisions) -> tuple[Swaps, float]:
    """Return the swap-ins, and the latency were there no slow-down of ops by transfers or the other way round.

    The latency is infinite if a copy that went first is in the way of an op: these decisions have no plan.
    """
    ops, parameters = len(work.op_s), len(work.size)
    most = 2 * len(work.use_parameter) + parameters
    most_items = 2 * (most + parameters + len(work.busy)) + 4
    memory = empty_page_map(work.partition_pages, work.workspace_pages, parameters, most_items)
    swaps = Swaps(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.empty(most, np.int64), np.zeros(1, np.int64),
    )  # fmt: skip
    locked = np.full(parameters, NOTHING)  # each parameter stays in memory through this op
    upcoming = work.first_use.copy()
    touched = np.full(parameters, NOTHING)  # the last op that read each parameter
    arrival_s = np.zeros(parameters)
    op_end_s = np.zeros(ops + 1)  # of op k in [k + 1]
    link_s, cursor = 0.0, 0
    ahead = np.flatnonzero((decisions.lead > 0) & (home[work.use_parameter] < 0))
    longest_lead = decisions.lead[ahead].max() if len(ahead) else 0
    early = np.full(parameters, NOTHING)  # of each parameter whose copy went first, the op that it is for
    for p in range(parameters):
        if home[p] >= 0:
            memory.where[p] = home[p]
            stays = work.keeps or decisions.fate[p] == KEPT or work.last_use[p] < 0
            locked[p] = ops if stays else work.last_use[p]
            if work.size[p] > 0:
                put(memory, p, home[p], work.size[p])
    for k in range(ops):
        first, last = work.use_start[k], work.use_start[k + 1]
        if last > first:
            tidy(memory, upcoming, op_end_s, link_s)
        for i in range(work.busy_start[k], work.busy_start[k + 1]):
            cover(memory, work.partition_pages + 1 + work.busy[i, 0], work.busy[i, 1] - work.busy[i, 0], k)
        missing = False
        for j in range(first, last):
            p = work.use_parameter[j]
            locked[p] = max(locked[p], k)
            missing |= memory.where[p] < 0
        if missing:
            begun = swaps.length[0]
            if not _bring(
                work, memory, swaps, decisions, k, op_end_s, link_s, cursor, locked, upcoming, touched, early
            ):
                if early.max() >= k:
                    return swaps, np.inf
                for i in range(begun, swaps.length[0]):  # what it displaced for nothing stays away
                    if work.size[swaps.parameter[i]] > 0:
                        remove(memory, swaps.parameter[i])
                    memory.where[swaps.parameter[i]] = NOWHERE
                swaps.length[0] = begun
                _make_room(work, memory, swaps, home, k, touched)
            for i in range(begun, swaps.length[0]):
                p = swaps.parameter[i]
                link_s = max(link_s, op_end_s[swaps.after_op[i] + 1]) + work.swap_s[p]
                arrival_s[p] = link_s
                cursor = swaps.page[i] + work.size[p]
        for j in ahead[np.searchsorted(ahead, last) :]:
            op, p = work.use_op[j], work.use_parameter[j]
            if link_s > op_end_s[k] or op > k + longest_lead:  # it has enough to do
                break
            if op - decisions.lead[j] > k or memory.where[p] >= 0 or work.size[p] == 0 or upcoming[p] != op:
                continue
            hole = Hole(k, op_end_s, link_s, decisions.fit[j], cursor)
            page = find_hole(memory, work.size[p], _zone(work, decisions, k, j), locked, hole)
            if page < 0:
                continue
            after_op = max(touched[p], put(memory, p, page, work.size[p]))
            _append(swaps, p, page, after_op, op, k + 1)
            link_s = max(link_s, op_end_s[after_op + 1]) + work.swap_s[p]
            arrival_s[p] = link_s
            cursor = page + work.size[p]
            early[p] = op
            locked[p] = max(locked[p], op)
        ready_s = op_end_s[k]
        for j in range(first, last):
            p = work.use_parameter[j]
            ready_s = max(ready_s, arrival_s[p])
            touched[p] = k
            upcoming[p] = work.use_next[j]
            if home[p] < 0 or memory.where[p] != home[p]:
                locked[p] = work.use_next[j] if decisions.hold[j] and work.use_next[j] < NO_MORE else k
            if upcoming[p] == NO_MORE and home[p] >= 0:
                upcoming[p] = ops + work.first_use[p]
            if work.size[p] > 0:
                use(memory, p, k)
        op_end_s[k + 1] = ready_s + work.op_s[k]
    for p in range(parameters):
        if home[p] >= 0 and memory.where[p] != home[p]:
            _move(work, memory, swaps, p, home[p], touched[p], ops)
    return swaps, op_end_s[ops]


@compiled
def evaluate(work: Arrays, home: Ints, decisions: Decisions, good_s: float) -> tuple[float, float, int]:
    """Play an inference; return its latency, period and the pages copied as `timed` does."""
    swaps, latency_s = play(work, home, decisions)
    return timed(work, home, swaps, latency_s, good_s)


@compiled
def timed(work: Arrays, home: Ints, swaps: Swaps, played_s: float, good_s: float) -> tuple[float, float, int]:
    """Latency, period (infinite unless the latency is at most `good_s`) and pages copied, as the simulator sees it."""
    if played_s == np.inf:
        return np.inf, np.inf, 0
    link_pages = work.size[swaps.parameter[: swaps.length[0]]].sum()
    is_exact = work.compute_slowdown == 1.0 and work.swap_slowdown == 1.0
    if is_exact and played_s > good_s:
        return played_s, np.inf, link_pages
    latency_s, period_s = latency_and_period(
        _lanes(work, home, swaps), work.compute_slowdown, work.swap_slowdown, good_s
    )
    return latency_s, period_s, link_pages


@compiled
def _lanes(work: Arrays, home: Ints, swaps: Swaps) -> LaneArrays:
    """What `simulate.prepare` makes of the plan that these swaps become."""
    ops, count = len(work.op_s), swaps.length[0]
    lanes = empty_lanes(np.array([ops, count, 0]))
    lanes.work_s[COMPUTE, :ops] = work.op_s
    newest = np.full(len(work.size), NOTHING)  # each parameter's latest swap-in
    i = 0
    for k in range(ops + 1):
        while i < count and swaps.before[i] <= k:
            lanes.work_s[SWAP_IN, i] = work.swap_s[swaps.parameter[i]]
            lanes.wait[SWAP_IN, i, COMPUTE] = swaps.after_op[i]
            newest[swaps.parameter[i]] = i
            i += 1
        if k < ops:
            for p in work.use_parameter[work.use_start[k] : work.use_start[k + 1]]:
                lanes.wait[COMPUTE, k, SWAP_IN] = max(lanes.wait[COMPUTE, k, SWAP_IN], newest[p])
    for k in range(ops):
        for p in work.use_parameter[work.use_start[k] : work.use_start[k + 1]]:
            if home[p] >= 0:
                lanes.carried[k] = max(lanes.carried[k], newest[p])
    return lanes


@compiled
def _bring(
    work: Arrays,
    memory: PageMap,
    swaps: Swaps,
    decisions: Decisions,
    op: int,
    op_end_s: Floats,
    link_s: float,
    cursor: int,
    locked: Ints,
    upcoming: Ints,
    touched: Ints,
    early: Ints,
) -> bool:
    """Find room for every parameter of an op that is not in memory; False if one of them finds none."""
    for j in range(work.use_start[op], work.use_start[op + 1]):
        p = work.use_parameter[j]
        if memory.where[p] >= 0:
            continue
        page, after_op = 0, NOTHING
        if work.size[p] > 0:
            hole = Hole(op, op_end_s, link_s, decisions.fit[j], cursor)
            zone = _zone(work, decisions, op, j)
            page = find_hole(memory, work.size[p], zone, locked, hole)
            if page < 0 and zone > 0:
                page = find_hole(memory, work.size[p], 0, locked, hole)
            if page < 0:
                page = find_room(memory, work.size[p], op, upcoming, early)
            if page < 0:
                return False
            after_op = max(touched[p], put(memory, p, page, work.size[p]))
        memory.where[p] = page
        _append(swaps, p, page, after_op, op, op)
    return True


@compiled
def _zone(work: Arrays, decisions: Decisions, op: int, use: int) -> int:
    """Pages of the workspace that activations take while a parameter stays, from `op` on to the last use held."""
    end = work.use_op[use]
    if decisions.hold[use] and work.use_next[use] < NO_MORE:
        end = work.use_next[use]
    return int(work.zone[op : end + 1].max()) if end > op else 0


@compiled
def _make_room(work: Arrays, memory: PageMap, swaps: Swaps, home: Ints, op: int, touched: Ints) -> None:
    """Give an op's parameters places that are certain to fit; those that lie elsewhere are brought anew.

    Residents go home and the others to the front of the window. If the window is too small for that, all go where
    an empty memory would take them.
    """
    uses = slice(work.use_start[op], work.use_start[op + 1])
    needed = work.use_parameter[uses]
    target = np.empty(len(needed), np.int64)
    front = work.partition_pages + 1 + work.zone[op]
    end = work.partition_pages + 1 + work.workspace_pages
    for i, p in enumerate(needed):
        target[i] = home[p] if home[p] >= 0 else front
        front += 0 if home[p] >= 0 else work.size[p]
        if home[p] > work.partition_pages:
            end = min(end, home[p])
    if front > end:
        target[:] = work.use_split[uses]
    for i, p in enumerate(needed):
        if work.size[p] > 0 and memory.where[p] >= 0 and memory.where[p] != target[i]:
            remove(memory, p)
    for i, p in enumerate(needed):
        if memory.where[p] < 0:
            _move(work, memory, swaps, p, target[i], touched[p], op)


@compiled
def _move(work: Arrays, memory: PageMap, swaps: Swaps, parameter: int, page: int, touched: int, op: int) -> None:
    """Bring a parameter to a page, once its former place (if any) has been read for the last time."""
    after_op = touched
    if work.size[parameter] > 0:
        if memory.where[parameter] >= 0:
            remove(memory, parameter)
        after_op = max(touched, put(memory, parameter, page, work.size[parameter]))
    memory.where[parameter] = page
    _append(swaps, parameter, page, after_op, op, op)


@compiled
def _append(swaps: Swaps, parameter: int, page: int, after_op: int, op: int, before: int) -> None:
    i = swaps.length[0]
    swaps.parameter[i], swaps.page[i], swaps.after_op[i], swaps.op[i] = parameter, page, after_op, op
    swaps.before[i] = before
    swaps.length[0] += 1
