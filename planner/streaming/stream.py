"""Simulates one inference with given decisions: residents stay, other parameters stream through memory.

Ops are scanned in order. A missing parameter goes into a hole that is free by the time the link is; if there is none,
into the hole that becomes free first. If no hole is large enough, it displaces a parameter that the decisions would
keep: the one needed furthest in the future (Belady; SwapAdvisor, section 4.2). Parameters never change, so displacing
one costs nothing, unless it is a resident, which must be restored.

Copies are issued in op order. Decisions may let a copy overtake others, into a hole that is free while the link would
otherwise be idle."""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.schedule.simulate import lanes_of, latency_and_period
from cohabit.planner.schedule.table import COMPUTE, NOTHING, SWAP_IN, UNLIMITED, Schedule, with_waits
from cohabit.planner.streaming.page_map import (
    NO_MORE,
    NOWHERE,
    Hole,
    PageMap,
    empty_page_map,
    find_free,
    find_hole,
    put,
    remove,
    tidy,
    use,
)
from cohabit.planner.streaming.workload import Arrays, Numbering, offset_of

STREAMED: Final = 0
"""Not a resident."""
RELEASED: Final = 1
"""A resident whose bytes are free after its last use; the epilogue restores it."""
KEPT: Final = 2
"""A resident that stays."""


class Decisions(NamedTuple):
    """The decision variables of a search."""

    choice: Ints
    """Per parameter: STREAMED, RELEASED or KEPT."""
    hold: Bools
    """Per use of a streamed parameter: whether it stays until its next use."""
    fit: Ints
    """Per use: the rule by which its copy chooses a hole, see `planner.streaming.page_map.Hole`."""
    lead: Ints
    """Per use: number of ops by which its copy may be issued before its turn."""


def uniform(choice: Ints, hold: Bools, fit: int) -> Decisions:
    """Return decisions with one rule for all holes and all copies in op order."""
    return Decisions(choice, hold, np.full(len(hold), fit), np.zeros(len(hold), np.int64))


class Swaps(NamedTuple):
    """The swap-ins of one inference, in the order of their lane."""

    parameter: Ints
    page: Ints
    after_op: Ints
    """Last op that used these bytes before, or NOTHING."""
    op: Ints
    """Op that reads it first; the number of ops for the epilogue."""
    length: Ints
    """Number of swap-ins in the arrays; shape [1]."""


@compiled
def place_residents(work: Arrays, choice: Ints) -> Ints:
    """Lay out residents contiguously. Returns the first page of each parameter, or NOWHERE.

    Released residents are adjacent, in the order of their use, so that they leave one contiguous range. Empty
    parameters take no memory and are always resident.
    """
    resident_at = np.full(len(choice), NOWHERE)
    page = 0
    for chosen in (KEPT, RELEASED):
        for p in range(len(choice)):
            if choice[p] == chosen and work.size[p] > 0:
                resident_at[p] = page
                page += work.size[p]
    resident_at[work.size == 0] = 0
    return resident_at


@compiled
def play(work: Arrays, resident_at: Ints, decisions: Decisions) -> tuple[Swaps, float]:
    """Return the swap-ins, and the latency without slowdowns of concurrent ops and copies.

    The latency is infinite if a copy issued ahead of its turn blocks an op: these decisions have no plan.
    """
    ops, parameters = len(work.op_s), len(work.size)
    most = 2 * len(work.use_parameter) + parameters
    memory = empty_page_map(work.partition_pages, work.window_pages, parameters, 2 * (most + parameters) + 4)
    swaps = Swaps(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    locked = np.full(parameters, NOTHING)  # op through which each parameter stays in memory
    next_use = work.first_use.copy()
    last_reader = np.full(parameters, NOTHING)  # last op that read each parameter
    arrival_s = np.zeros(parameters)
    op_end_s = np.zeros(ops + 1)  # op k ends at op_end_s[k + 1]
    link_s, cursor = 0.0, 0
    ahead = np.flatnonzero((decisions.lead > 0) & (resident_at[work.use_parameter] < 0))
    longest_lead = decisions.lead[ahead].max() if len(ahead) else 0
    early = np.full(parameters, NOTHING)  # op that each parameter's early copy is for
    # Residents are in memory from the start; released ones are locked until their last use.
    for p in range(parameters):
        if resident_at[p] >= 0:
            memory.where[p] = resident_at[p]
            stays = work.keeps or decisions.choice[p] == KEPT or work.last_use[p] < 0
            locked[p] = ops if stays else work.last_use[p]
            if work.size[p] > 0:
                put(memory, p, resident_at[p], work.size[p])
    for k in range(ops):
        first, last = work.use_start[k], work.use_start[k + 1]
        if last > first:
            tidy(memory, next_use, op_end_s, link_s)
        # Place the op's missing parameters, and time their copies. If some do not fit, lay out all of them again.
        missing = False
        for j in range(first, last):
            p = work.use_parameter[j]
            locked[p] = max(locked[p], k)
            missing |= memory.where[p] < 0
        if missing:
            first_swap = swaps.length[0]
            if not _place_missing(
                work, memory, swaps, decisions, k, op_end_s, link_s, cursor, locked, next_use, last_reader, early
            ):
                if early.max() >= k:
                    return swaps, np.inf
                for i in range(first_swap, swaps.length[0]):  # evictions of the failed attempt are kept
                    if work.size[swaps.parameter[i]] > 0:
                        remove(memory, swaps.parameter[i])
                    memory.where[swaps.parameter[i]] = NOWHERE
                swaps.length[0] = first_swap
                _free_memory_for(work, memory, swaps, resident_at, k, last_reader)
            for i in range(first_swap, swaps.length[0]):
                p = swaps.parameter[i]
                link_s = max(link_s, op_end_s[swaps.after_op[i] + 1]) + work.swap_s[p]
                arrival_s[p] = link_s
                cursor = swaps.page[i] + work.size[p]
        # While the link would wait, issue copies of later ops ahead.
        for j in ahead[np.searchsorted(ahead, last) :]:
            op, p = work.use_op[j], work.use_parameter[j]
            if link_s > op_end_s[k] or op > k + longest_lead:  # the link is busy past this op
                break
            if op - decisions.lead[j] > k or memory.where[p] >= 0 or work.size[p] == 0 or next_use[p] != op:
                continue
            hole = Hole(k, op_end_s, link_s, decisions.fit[j], cursor)
            page = find_hole(memory, work.size[p], locked, hole)
            if page < 0:
                continue
            after_op = max(last_reader[p], put(memory, p, page, work.size[p]))
            _append(swaps, p, page, after_op, op)
            link_s = max(link_s, op_end_s[after_op + 1]) + work.swap_s[p]
            arrival_s[p] = link_s
            cursor = page + work.size[p]
            early[p] = op
            locked[p] = max(locked[p], op)
        # Run the op once its parameters have arrived; then lock those that stay until their next use.
        ready_s = op_end_s[k]
        for j in range(first, last):
            p = work.use_parameter[j]
            ready_s = max(ready_s, arrival_s[p])
            last_reader[p] = k
            next_use[p] = work.use_next[j]
            if resident_at[p] < 0 or memory.where[p] != resident_at[p]:
                locked[p] = work.use_next[j] if decisions.hold[j] and work.use_next[j] < NO_MORE else k
            if next_use[p] == NO_MORE and resident_at[p] >= 0:
                next_use[p] = ops + work.first_use[p]
            if work.size[p] > 0:
                use(memory, p, k)
        op_end_s[k + 1] = ready_s + work.op_s[k]
    # The epilogue restores displaced residents.
    for p in range(parameters):
        if resident_at[p] >= 0 and memory.where[p] != resident_at[p]:
            _move(work, memory, swaps, p, resident_at[p], last_reader[p], ops)
    return swaps, op_end_s[ops]


@compiled
def evaluate(
    work: Arrays, numbering: Numbering, resident_at: Ints, decisions: Decisions, good_s: float
) -> tuple[float, float, int]:
    """Play an inference, and return its latency, period and copied pages; see `timed`."""
    swaps, latency_s = play(work, resident_at, decisions)
    return timed(work, numbering, resident_at, swaps, latency_s, good_s)


@compiled
def timed(
    work: Arrays, numbering: Numbering, resident_at: Ints, swaps: Swaps, played_s: float, good_s: float
) -> tuple[float, float, int]:
    """Return simulated latency, period and copied pages; the period is infinite if the latency exceeds `good_s`."""
    if played_s == np.inf:
        return np.inf, np.inf, 0
    link_pages = work.size[swaps.parameter[: swaps.length[0]]].sum()
    graph = numbering.graph
    is_exact = graph.compute_slowdown == 1.0 and graph.swap_slowdown == 1.0
    if is_exact and played_s > good_s:
        return played_s, np.inf, link_pages
    if len(numbering.op) == 0:
        return 0.0, 0.0, link_pages
    lanes = lanes_of(graph, schedule_of(work, numbering, resident_at, swaps))
    latency_s, period_s = latency_and_period(lanes, graph.compute_slowdown, graph.swap_slowdown, good_s)
    return latency_s, period_s, link_pages


@compiled
def schedule_of(work: Arrays, numbering: Numbering, resident_at: Ints, swaps: Swaps) -> Schedule:
    """Make a schedule of ops and swap-ins, which come as early in the total order as lanes allow.

    `planner.streaming.emit` adds the drops. They take no time, and no row waits for them: copies name the last users of
    their bytes, and activations always fit in the pool.
    """
    ops, count = len(numbering.op), swaps.length[0]
    verb, what = np.empty(ops + count, np.int64), np.empty(ops + count, np.int64)
    offset, after = np.full(ops + count, NOTHING), np.full(ops + count, NOTHING)
    i = row = 0
    for k in range(-1, ops):
        if k >= 0:
            verb[row], what[row], row = COMPUTE, numbering.op[k], row + 1
        while i < count and swaps.after_op[i] <= k:
            verb[row], what[row] = SWAP_IN, numbering.tensor[swaps.parameter[i]]
            offset[row], after[row] = offset_of(work, numbering, swaps.page[i]), swaps.after_op[i]
            i, row = i + 1, row + 1
    residents = np.flatnonzero(resident_at >= 0)
    at = np.array([offset_of(work, numbering, page) for page in resident_at[residents]], np.int64)
    return with_waits(
        numbering.graph,
        verb[:row],
        what[:row],
        offset[:row],
        after[:row],
        numbering.tensor[residents],
        at,
        UNLIMITED,
    )


@compiled
def _place_missing(
    work: Arrays,
    memory: PageMap,
    swaps: Swaps,
    decisions: Decisions,
    op: int,
    op_end_s: Floats,
    link_s: float,
    cursor: int,
    locked: Ints,
    next_use: Ints,
    last_reader: Ints,
    early: Ints,
) -> bool:
    """Find memory for each missing parameter of an op, and append its swap-in; False if one does not fit."""
    for j in range(work.use_start[op], work.use_start[op + 1]):
        p = work.use_parameter[j]
        if memory.where[p] >= 0:
            continue
        page, after_op = 0, NOTHING
        if work.size[p] > 0:
            hole = Hole(op, op_end_s, link_s, decisions.fit[j], cursor)
            page = find_hole(memory, work.size[p], locked, hole)
            if page < 0:
                page = find_free(memory, work.size[p], op, next_use, early)
            if page < 0:
                return False
            after_op = max(last_reader[p], put(memory, p, page, work.size[p]))
        memory.where[p] = page
        _append(swaps, p, page, after_op, op)
    return True


@compiled
def _free_memory_for(
    work: Arrays, memory: PageMap, swaps: Swaps, resident_at: Ints, op: int, last_reader: Ints
) -> None:
    """Move an op's parameters to pages that fit for certain; those elsewhere are copied again.

    Residents go to their own pages and the others to the front of the window. If the window is too small for that,
    all are laid out as in empty memory.
    """
    uses = slice(work.use_start[op], work.use_start[op + 1])
    needed = work.use_parameter[uses]
    target = np.empty(len(needed), np.int64)
    front = work.partition_pages + 1
    for i, p in enumerate(needed):
        target[i] = resident_at[p] if resident_at[p] >= 0 else front
        front += 0 if resident_at[p] >= 0 else work.size[p]
    if front > work.partition_pages + 1 + work.window_pages:
        target[:] = work.use_split[uses]
    for i, p in enumerate(needed):
        if work.size[p] > 0 and memory.where[p] >= 0 and memory.where[p] != target[i]:
            remove(memory, p)
    for i, p in enumerate(needed):
        if memory.where[p] < 0:
            _move(work, memory, swaps, p, target[i], last_reader[p], op)


@compiled
def _move(
    work: Arrays, memory: PageMap, swaps: Swaps, parameter: int, page: int, last_reader: int, op: int
) -> None:
    """Copy a parameter to a page, after the last read of its former page (if any)."""
    after_op = last_reader
    if work.size[parameter] > 0:
        if memory.where[parameter] >= 0:
            remove(memory, parameter)
        after_op = max(last_reader, put(memory, parameter, page, work.size[parameter]))
    memory.where[parameter] = page
    _append(swaps, parameter, page, after_op, op)


@compiled
def _append(swaps: Swaps, parameter: int, page: int, after_op: int, op: int) -> None:
    i = swaps.length[0]
    swaps.parameter[i], swaps.page[i], swaps.after_op[i], swaps.op[i] = parameter, page, after_op, op
    swaps.length[0] += 1
