"""SwapAdvisor's swap planner (section 4.2): swaps for a given order of the ops and memory pool.

Ops are scanned in the order of the schedule. A missing tensor takes a free object of its size class, or displaces the
tensor needed furthest in the future (Belady), counted on into the next inference. For swap-ins, victims are preferred
whose last use is so long ago that there is time to copy them out, if necessary, and the new tensor in: the paper's
"threshold of time", for which it gives no number.

Free objects are taken so that copies can start early: a swap-in takes the longest free, an op's outputs and scratch
the last freed.
"""

from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.swapadvisor.pool_state import (
    BUSY,
    FREE,
    IN,
    NEVER,
    NOWHERE,
    RESULT,
    RUN,
    SCRATCH,
    UNUSED,
    PoolState,
    SwapLog,
    disown,
    displace,
    empty_state,
    fill,
    leave,
    note,
    release,
    save,
    take_free,
)
from cohabit.planner.papers.swapadvisor.pools import CONSTANT, NO_SIZE, STATE, VALUE, OpUses

_MOST_PASSES: Final = 8
_CLOSE: Final = 1 - 1e-9


class _OpSchedule(NamedTuple):
    """The op schedule as the planner reads it."""

    order: Ints
    next_use: Ints
    """Per use, the position of the tensor's next use, or NEVER."""
    first_use: Ints
    """Per tensor, the position of its first use."""
    start_s: Floats
    """Start of the op at each position if none ever waits, and the end of the last; shape [ops + 1]."""


class _Rule(NamedTuple):
    """Rule by which a pass over the ops finds objects."""

    start_s: Floats
    threshold: float
    """Minimum time since a victim's last use, in units of the time of the copies."""
    first: bool
    pressed: Bools
    """Per demand, whether the first pass had to displace a tensor. That pass sets it, the second reads it."""


@compiled
def plan_swaps(
    uses: OpUses, order: Ints, class_of_size: Ints, counts: Ints, threshold: float, double_pass: bool
) -> tuple[bool, SwapLog, Ints]:
    """Return whether the ops can run in this pool, the log, and each tensor's object at the start or NOWHERE.

    The first pass starts without parameters. Those in memory at its end are the initial residents of the second,
    which removes some again under pressure that the first did not see.
    """
    course = _course(uses, order)
    resident_at = np.full(len(uses.size), NOWHERE)
    pressed = np.zeros(len(uses.tensor) + len(uses.op_s) + len(uses.outputs), np.bool_)
    state = empty_state(uses, course.first_use, class_of_size, counts, resident_at)
    fits = _scan(uses, course, class_of_size, state, _Rule(course.start_s, threshold, True, pressed))
    if fits and double_pass:
        for t in range(len(resident_at)):  # weights stay where the first pass leaves them
            if state.tensors[t].kind != VALUE:
                resident_at[t] = state.tensors[t].where
        for trial in range(_MOST_PASSES + 1):
            if trial == _MOST_PASSES:
                resident_at[:] = NOWHERE
            state = empty_state(uses, course.first_use, class_of_size, counts, resident_at)
            fits = _scan(uses, course, class_of_size, state, _Rule(course.start_s, threshold, False, pressed))
            if not _bar(state, resident_at):
                break
    if fits:
        _restore(uses, course, state)
    start = np.empty(len(resident_at), np.int64)
    for t in range(len(resident_at)):
        start[t] = max(state.tensors[t].start, state.tensors[t].resident_at)
    return fits, state.log, start


@compiled
def _course(uses: OpUses, order: Ints) -> _OpSchedule:
    ops = len(order)
    upcoming, next_use = np.full(len(uses.size), NEVER), np.full(len(uses.tensor), NEVER)
    for t in uses.outputs:
        upcoming[t] = ops - 1
    for k in range(ops - 1, -1, -1):
        for i in range(uses.start[order[k]], uses.start[order[k] + 1]):
            t = uses.tensor[i]
            if upcoming[t] > k:
                next_use[i] = upcoming[t]
            upcoming[t] = k
    start_s = np.zeros(ops + 1)
    for k, op in enumerate(order):
        start_s[k + 1] = start_s[k] + uses.op_s[op]
    return _OpSchedule(order, next_use, upcoming, start_s)


@compiled
def _scan(uses: OpUses, course: _OpSchedule, class_of_size: Ints, state: PoolState, rule: _Rule) -> bool:
    """Scan the schedule once. Returns whether all ops found objects."""
    if not _begin(uses, state):
        return False
    tensors, last = state.tensors, len(course.order) - 1
    for k in range(last + 1):
        op = course.order[k]
        low, high = uses.start[op], uses.start[op + 1]
        # Tensors of this op must not be displaced while it gets its objects.
        for i in range(low, high):
            tensors[uses.tensor[i]].needed_by = k
        if k == last:
            for t in uses.outputs:
                tensors[t].needed_by = k
        # Fetch the reads; for the last op also the outputs.
        for i in range(low, high):
            if not uses.written[i] and not _fetch(state, rule, uses.tensor[i], k, i):
                return False
        if k == last:
            for j, t in enumerate(uses.outputs):
                demand = len(uses.tensor) + len(uses.op_s) + j
                if not _writes(uses, op, t) and not _fetch(state, rule, t, k, demand):
                    return False
        # Find objects for scratch and results.
        scratch = NOWHERE
        if uses.scratch[op] != NO_SIZE:
            scratch = _make_room(state, rule, class_of_size[uses.scratch[op]], k, -1.0, len(uses.tensor) + op)
            if scratch < 0:
                return False
            state.objects[scratch].holder = BUSY
            note(state.log, SCRATCH, op, scratch)
        for i in range(low, high):
            if uses.written[i]:
                t = uses.tensor[i]
                o = _make_room(state, rule, tensors[t].size_class, k, -1.0, i)
                if o < 0:
                    return False
                fill(state, t, o)
                note(state.log, RESULT, t, o)
        # Run the op, then release its scratch, and tensors without further use.
        note(state.log, RUN, op, NOWHERE)
        if scratch >= 0:
            release(state, scratch, class_of_size[uses.scratch[op]])
        for i in range(low, high):
            _pass_by(state, uses.tensor[i], k, last, course.next_use[i], uses.changed[i], rule.first)
    return True


@compiled
def _begin(uses: OpUses, state: PoolState) -> bool:
    """Put initial residents and inputs into their objects. A resident in an input's way is removed."""
    tensors, objects = state.tensors, state.objects
    for t in range(len(tensors)):
        if tensors[t].resident_at >= 0:
            fill(state, t, tensors[t].resident_at)
            tensors[t].saved = tensors[t].kind != STATE  # the previous inference changed it
    for t in uses.inputs:
        size_class = state.classes[tensors[t].size_class]
        o = size_class.first
        while o < size_class.end and objects[o].holder != FREE:
            o += 1
        if o == size_class.end:
            o = _least_urgent(state, tensors[t].size_class, NEVER)
            if o < 0:
                return False
            disown(state, objects[o].holder)
        fill(state, t, o)
        tensors[t].start = o
    for c in range(len(state.classes)):
        for o in range(state.classes[c].first, state.classes[c].end):
            if objects[o].holder == FREE:
                release(state, o, c)
    for t in uses.inputs:
        if tensors[t].upcoming == NEVER:
            leave(state, t)
    return True


@compiled
def _fetch(state: PoolState, rule: _Rule, t: int, k: int, demand: int) -> bool:
    """Bring a tensor into memory if it is missing; False if there is no object for it."""
    tensor = state.tensors[t]
    if tensor.where >= 0:
        return True
    o = tensor.resident_at
    if o >= 0 and state.objects[o].holder == FREE:
        state.objects[o].entry = NOWHERE
    else:
        o = _make_room(state, rule, tensor.size_class, k, tensor.in_s, demand)
    if o < 0:
        return False
    fill(state, t, o)
    note(state.log, IN, t, o)
    return True


@compiled
def _make_room(state: PoolState, rule: _Rule, c: int, k: int, copy_s: float, demand: int) -> int:
    """Free an object of class c and return it, or NOWHERE. `copy_s` is negative if nothing is copied in."""
    o = take_free(state, c, copy_s >= 0)
    if o >= 0:
        return int(o)
    if rule.first:
        rule.pressed[demand] = True
    elif not rule.pressed[demand]:
        o = _least_urgent(state, c, k)
    if o < 0 and copy_s >= 0:
        o = _victim(state, rule, c, k, copy_s)
    if o < 0:
        o = _victim(state, rule, c, k, -1.0)
    if o >= 0:
        t = state.objects[o].holder
        if state.tensors[t].touched == UNUSED and state.tensors[t].resident_at == o:
            disown(state, t)
        else:
            displace(state, t)
    return int(o)


@compiled
def _victim(state: PoolState, rule: _Rule, c: int, k: int, copy_s: float) -> int:
    """Return the object to displace: next use furthest; ties go to saved tensors, then to the least recently used."""
    chosen = NOWHERE
    furthest, saved, touched = NOWHERE, False, NOWHERE
    for o in range(state.classes[c].first, state.classes[c].end):
        t = state.objects[o].holder
        if t < 0:
            continue
        tensor = state.tensors[t]
        if tensor.needed_by == k or tensor.upcoming < furthest:
            continue
        if tensor.upcoming == furthest and (
            (saved and not tensor.saved) or (saved == tensor.saved and touched <= tensor.touched)
        ):
            continue
        if copy_s >= 0.0:
            copies_s = copy_s if tensor.saved else copy_s + tensor.out_s
            if rule.start_s[k] - rule.start_s[tensor.touched + 1] < rule.threshold * copies_s * _CLOSE:
                continue
        chosen, furthest, saved, touched = o, tensor.upcoming, tensor.saved, tensor.touched
    return chosen


@compiled
def _least_urgent(state: PoolState, c: int, k: int) -> int:
    """Return the object of the unused initial resident with the furthest first use, or NOWHERE."""
    chosen, furthest = NOWHERE, NOWHERE
    for o in range(state.classes[c].first, state.classes[c].end):
        t = state.objects[o].holder
        if t < 0:
            continue
        tensor = state.tensors[t]
        unused = tensor.resident_at == o and tensor.touched == UNUSED and tensor.needed_by != k
        if unused and tensor.upcoming > furthest:
            chosen, furthest = o, tensor.upcoming
    return chosen


@compiled
def _pass_by(state: PoolState, t: int, k: int, last: int, next_use: int, changed: bool, first: bool) -> None:
    """Update a tensor after an op has used it. Inputs and activations without further use leave at once."""
    tensor = state.tensors[t]
    tensor.touched = k
    tensor.upcoming = next_use
    if changed:
        tensor.saved = False
    if next_use != NEVER:
        return
    if tensor.kind != VALUE:
        if first or tensor.resident_at >= 0:
            tensor.upcoming = last + 1 + tensor.first_use
    elif k < last or not tensor.output:
        leave(state, t)


@compiled
def _bar(state: PoolState, resident_at: Ints) -> bool:
    """Remove initial residents that cannot be restored, because outputs end in their objects. Returns whether there
    were any."""
    barred = False
    for t in range(len(resident_at)):
        tensor = state.tensors[t]
        resident_at[t] = tensor.resident_at
        if tensor.resident_at < 0 or tensor.where == tensor.resident_at:
            continue
        there = state.objects[tensor.resident_at].holder
        if _stays(state, t) or (there >= 0 and _stays(state, there)):
            resident_at[t] = NOWHERE
            barred = True
    return barred


@compiled
def _stays(state: PoolState, t: int) -> bool:
    return bool(state.tensors[t].output and state.tensors[t].kind != CONSTANT)


@compiled
def _restore(uses: OpUses, course: _OpSchedule, state: PoolState) -> None:
    """After the last op: save changed state that does not stay, and restore initial residents to their objects."""
    for k, op in enumerate(course.order):
        for t in uses.tensor[uses.start[op] : uses.start[op + 1]]:
            if state.tensors[t].touched == k:
                _clear(state, t)
    for t in uses.outputs:
        _clear(state, t)
    for op in course.order:
        for t in uses.tensor[uses.start[op] : uses.start[op + 1]]:
            _return(state, t)
    for t in uses.outputs:
        _return(state, t)


@compiled
def _clear(state: PoolState, t: int) -> None:
    """Save a weight's changes if it is not in its initial object; an initial resident is dropped there."""
    tensor = state.tensors[t]
    if tensor.where >= 0 and tensor.where != tensor.resident_at and tensor.kind != VALUE:
        save(state, t)
        if tensor.resident_at >= 0:
            displace(state, t)


@compiled
def _return(state: PoolState, t: int) -> None:
    """Restore an initial resident. The tensor in its object, if any, is not needed."""
    tensor = state.tensors[t]
    if tensor.resident_at >= 0 and tensor.where != tensor.resident_at:
        if state.objects[tensor.resident_at].holder >= 0:
            displace(state, state.objects[tensor.resident_at].holder)
        fill(state, t, tensor.resident_at)
        note(state.log, IN, t, tensor.resident_at)


@compiled
def _writes(uses: OpUses, op: int, t: int) -> bool:
    for i in range(uses.start[op], uses.start[op + 1]):  # noqa: SIM110 - compiled
        if uses.tensor[i] == t and uses.written[i]:
            return True
    return False
