"""SwapAdvisor's swap planner (section 4.2), on byte offsets instead of size classes.

Ops are scanned in order. A parameter that is not in memory when its op comes is put where it displaces what is
not needed for the longest time (Belady), preferring bytes that nobody has used for at least a threshold, so that
the copy can start early. Parameters never change: displacing one costs nothing, except that an initial resident
must be brought back by the epilogue.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.compiled import compiled
from planner.feasible import PAGE_BYTES
from planner.memory import (
    NO_MORE,
    NOWHERE,
    Demand,
    Memory,
    copy_memory,
    cover,
    empty_memory,
    find_room,
    put,
    remove,
    use,
)
from planner.problem import Cost
from planner.simulate import COMPUTE, MOST_INFERENCES, NOTHING, SWAP_IN, Lanes, empty_lanes, run
from planner.workload import Arrays, Workload

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rule:
    """What may be displaced."""

    threshold_s: float = 0.0
    """Prefer bytes whose last use ended this long before the op that needs room: SwapAdvisor's remedy against
    choosing what was used only just now."""
    keep: int = NO_MORE
    """Displace only what is not needed before op `keep`, counting on into the next inference, unless nothing
    else will do. 0 is Belady; the number of ops spares what this inference still needs; NO_MORE spares every
    resident, so that the others stream through what is left."""


class Swaps(NamedTuple):
    """The swap-ins of one inference, in the order of their lane."""

    parameter: Ints
    page: Ints
    behind: Ints
    """The last op that used these bytes before, or NOTHING."""
    op: Ints
    """The op that reads it first; the number of ops for the epilogue."""
    length: Ints
    """How many elements of the arrays are in use, [1]."""


def plan_swaps(work: Workload, home: Ints, rule: Rule) -> Swaps:
    """Scan the ops once, with residents at `home` before and after."""
    swaps, _ = _scan(work.arrays, home, rule.threshold_s, rule.keep, False)
    count = swaps.length[0]
    return Swaps(swaps.parameter[:count], swaps.page[:count], swaps.behind[:count], swaps.op[:count], swaps.length)


def first_pass(work: Workload, rule: Rule) -> tuple[int, ...]:
    """Scan the ops from empty memory: what the partition holds at the end are SwapAdvisor's initial residents."""
    _, final = _scan(work.arrays, work.pack(()), rule.threshold_s, rule.keep, True)
    arrays = work.arrays
    inside = (final >= 0) & (arrays.size > 0)
    if not work.single:
        inside &= final < arrays.partition_pages
    kept: list[int] = []
    room = work.resident_pages
    for p in sorted(
        np.flatnonzero(inside).tolist(), key=lambda p: -int(final[p]) if work.single else int(final[p])
    ):
        if arrays.size[p] <= room:
            kept.append(p)
            room -= int(arrays.size[p])
    return tuple(kept)


def pressed_out(work: Workload, home: Ints, rule: Rule) -> frozenset[int]:
    """Initial residents that the second pass displaces, and the epilogue would have to restore."""
    _, final = _scan(work.arrays, home, rule.threshold_s, rule.keep, False)
    return frozenset(np.flatnonzero((home != NOWHERE) & (final != home)).tolist())


def judge(work: Workload, home: Ints, rule: Rule, good_s: float) -> Cost:
    """Simulate the plan of one scan; its period only if its latency is at most `good_s`."""
    latency_s, period_s, link_pages = _judge(work.arrays, home, rule.threshold_s, rule.keep, good_s)
    return Cost(latency_s, period_s, link_pages * PAGE_BYTES)


@compiled
def _judge(work: Arrays, home: Ints, threshold_s: float, keep: int, good_s: float) -> tuple[float, float, int]:
    swaps, _ = _scan(work, home, threshold_s, keep, False)
    link_pages = work.size[swaps.parameter[: swaps.length[0]]].sum()
    lanes = _lanes(work, home, swaps)
    ops = len(work.op_s)
    _, end, _ = run(lanes, work.compute_slowdown, work.swap_slowdown, 1)
    latency_s = end[COMPUTE, ops - 1]
    if latency_s > good_s:
        return latency_s, np.inf, link_pages
    _, _, period_s = run(lanes, work.compute_slowdown, work.swap_slowdown, MOST_INFERENCES)
    return latency_s, period_s, link_pages


@compiled
def _lanes(work: Arrays, home: Ints, swaps: Swaps) -> Lanes:
    """What `simulate.prepare` makes of the plan that these swaps become."""
    ops, count = len(work.op_s), swaps.length[0]
    lanes = empty_lanes(np.array([ops, count, 0]))
    lanes.work_s[COMPUTE, :ops] = work.op_s
    newest = np.full(len(work.size), NOTHING)  # each parameter's latest swap-in
    i = 0
    for k in range(ops + 1):
        while i < count and swaps.op[i] <= k:
            lanes.work_s[SWAP_IN, i] = work.swap_s[swaps.parameter[i]]
            lanes.wait[SWAP_IN, i, COMPUTE] = swaps.behind[i]
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
def _scan(work: Arrays, home: Ints, threshold_s: float, keep: int, keep_all: bool) -> tuple[Swaps, Ints]:
    """Return the swap-ins, and where the last op leaves each parameter.

    With `keep_all` every parameter is worth keeping for the next inference, and nothing is restored.
    """
    ops, parameters = len(work.op_s), len(work.size)
    most = 2 * len(work.use_parameter) + parameters
    most_items = 2 * (most + parameters) + 4
    memory = empty_memory(work.partition_pages, work.workspace_pages, parameters, most_items)
    saved = empty_memory(work.partition_pages, work.workspace_pages, parameters, most_items)
    swaps = Swaps(
        np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    for p in range(parameters):
        if home[p] >= 0:
            memory.where[p] = home[p]
            if work.size[p] > 0:
                put(memory, p, home[p], work.size[p])

    upcoming = work.first_use.copy()
    needed_by = np.full(parameters, NOTHING)
    touched = np.full(parameters, NOTHING)  # the last op that read each parameter
    for k in range(ops):
        uses = slice(work.use_start[k], work.use_start[k + 1])
        needed = work.use_parameter[uses]
        missing = False
        cover(memory, work.zone[k], k)
        for p in needed:
            needed_by[p] = k
            missing |= memory.where[p] < 0
        if missing:
            saved_length = swaps.length[0]
            copy_memory(memory, saved)
            demand = Demand(k, needed_by, upcoming, work.op_start_s, threshold_s, keep)
            if not _bring(work, memory, swaps, needed, demand, touched):
                copy_memory(saved, memory)
                swaps.length[0] = saved_length
                _make_room(work, memory, swaps, home, uses, k, touched)
        for j in range(uses.start, uses.stop):
            p = work.use_parameter[j]
            touched[p] = k
            upcoming[p] = work.use_next[j]
            if upcoming[p] == NO_MORE and (keep_all or home[p] >= 0):
                upcoming[p] = ops + work.first_use[p]
            if work.size[p] > 0:
                use(memory, p, k)
    final = memory.where.copy()
    if not keep_all:
        for p in range(parameters):
            if home[p] >= 0 and memory.where[p] != home[p]:
                _move(work, memory, swaps, p, home[p], touched[p], ops)
    return swaps, final


@compiled
def _bring(work: Arrays, memory: Memory, swaps: Swaps, needed: Ints, demand: Demand, touched: Ints) -> bool:
    """Find room for every needed parameter that is not in memory; False if one of them finds none."""
    eager = Demand(demand.op, demand.needed_by, demand.upcoming, demand.op_start_s, 0.0, demand.keep)
    desperate = Demand(demand.op, demand.needed_by, demand.upcoming, demand.op_start_s, 0.0, 0)
    for p in needed:
        if memory.where[p] >= 0:
            continue
        page, behind = 0, NOTHING
        if work.size[p] > 0:
            page = find_room(memory, work.size[p], demand)
            if page < 0:
                page = find_room(memory, work.size[p], eager)
            if page < 0:
                page = find_room(memory, work.size[p], desperate)
            if page < 0:
                return False
            behind = max(touched[p], put(memory, p, page, work.size[p]))
        memory.where[p] = page
        _append(swaps, p, page, behind, demand.op)
    return True


@compiled
def _make_room(work: Arrays, memory: Memory, swaps: Swaps, home: Ints, uses: slice, op: int, touched: Ints) -> None:
    """Give an op's parameters places that are certain to fit; those that lie elsewhere are brought anew.

    Residents go home and the others to the front of the window. If the window is too small for that, all go where
    an empty memory would take them.
    """
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
def _move(work: Arrays, memory: Memory, swaps: Swaps, parameter: int, page: int, touched: int, op: int) -> None:
    """Bring a parameter to a page, once its former place (if any) has been read for the last time."""
    behind = touched
    if work.size[parameter] > 0:
        if memory.where[parameter] >= 0:
            remove(memory, parameter)
        behind = max(touched, put(memory, parameter, page, work.size[parameter]))
    memory.where[parameter] = page
    _append(swaps, parameter, page, behind, op)


@compiled
def _append(swaps: Swaps, parameter: int, page: int, behind: int, op: int) -> None:
    i = swaps.length[0]
    swaps.parameter[i], swaps.page[i], swaps.behind[i], swaps.op[i] = parameter, page, behind, op
    swaps.length[0] += 1
