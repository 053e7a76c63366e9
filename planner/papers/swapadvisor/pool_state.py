"""State of a memory pool while the swap planner scans the ops: the tensor in each object, and a log of actions.

The state is in tables of records, because each array argument of a compiled function costs time. All functions run
inside compiled loops and change the tables in place."""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.swapadvisor.pools import NO_SIZE, VALUE, OpUses

Table = NDArray[Any]


def _records(fields: list[tuple[str, Any]]) -> np.dtype[Any]:
    """Return a dtype of records whose fields are attributes, in interpreted functions, too."""
    return np.dtype((np.record, np.dtype(fields, align=True)))


RUN: Final = 0
IN: Final = 1
OUT: Final = 2
GONE: Final = 3
RESULT: Final = 4
SCRATCH: Final = 5
"""Verbs of a log. RESULT and SCRATCH name the object that the next RUN uses."""

NOWHERE: Final = -1
NEVER: Final = 1 << 40
UNUSED: Final = -1
"""Last user of a tensor that no op has used in this inference."""

FREE: Final = -1
BUSY: Final = -2
"""Holders of an object that is free, or has an op's scratch."""

TENSOR: Final = _records(
    [
        ("kind", np.int64),
        ("size_class", np.int64),  # NOWHERE for an empty tensor
        ("output", np.bool_),
        ("in_s", np.float64),
        ("out_s", np.float64),
        ("where", np.int64),  # its object, or NOWHERE
        ("start", np.int64),  # an input's first object, or NOWHERE
        ("resident_at", np.int64),  # an initial resident's object, or NOWHERE
        ("saved", np.bool_),  # whether the host copy is up to date
        ("touched", np.int64),  # position of its last use, or UNUSED
        ("upcoming", np.int64),  # position of its next use, also in the next inference, or NEVER
        ("first_use", np.int64),
        ("needed_by", np.int64),  # latest position so far that needs it
    ]
)
OBJECT: Final = _records([("holder", np.int64), ("entry", np.int64)])
"""The tensor in the object, or FREE or BUSY; and its index in the queue if it is free."""
CLASS: Final = _records([("first", np.int64), ("end", np.int64), ("head", np.int64), ("tail", np.int64)])
"""The range of the class's objects, and of its free ones in the queue, longest free first."""
ENTRY: Final = _records([("verb", np.int64), ("what", np.int64), ("where", np.int64)])
"""An action: its verb; the op of a RUN or SCRATCH, else a tensor; the object that an IN, RESULT or SCRATCH fills."""


class SwapLog(NamedTuple):
    """A log of actions; `entries` is longer than needed."""

    entries: Table
    length: Ints
    """Number of entries in use; shape [1]."""


class PoolState(NamedTuple):
    tensors: Table
    objects: Table
    classes: Table
    queue: Ints
    log: SwapLog


@compiled
def empty_state(uses: OpUses, first_use: Ints, class_of_size: Ints, counts: Ints, resident_at: Ints) -> PoolState:
    """Return the state with an empty memory and empty queues of free objects."""
    tensors = np.zeros(len(uses.size), TENSOR)
    objects = np.zeros(counts.sum(), OBJECT)
    classes = np.zeros(len(counts), CLASS)
    room = counts.copy()  # for all entries that the queue ever gets
    for t in range(len(tensors)):
        tensor = tensors[t]
        tensor.kind, tensor.in_s, tensor.out_s = uses.kind[t], uses.in_s[t], uses.out_s[t]
        tensor.size_class = NOWHERE
        if uses.size[t] != NO_SIZE:
            tensor.size_class = class_of_size[uses.size[t]]
            room[tensor.size_class] += 1
        tensor.where = tensor.start = NOWHERE
        tensor.resident_at = resident_at[t]
        tensor.saved = uses.kind[t] != VALUE
        tensor.touched = tensor.needed_by = UNUSED
        tensor.upcoming = tensor.first_use = first_use[t]
    for t in uses.outputs:
        tensors[t].output = True
    for s in uses.scratch:
        if s != NO_SIZE:
            room[class_of_size[s]] += 1
    first = begin = 0
    for c in range(len(counts)):
        classes[c].first, classes[c].end = first, first + counts[c]
        classes[c].head = classes[c].tail = begin
        first, begin = first + counts[c], begin + room[c]
    for o in range(len(objects)):
        objects[o].holder, objects[o].entry = FREE, NOWHERE
    most = 4 * (len(uses.tensor) + len(uses.op_s) + len(uses.outputs)) + 6 * len(uses.size)
    log = SwapLog(np.empty(most, ENTRY), np.zeros(1, np.int64))
    return PoolState(tensors, objects, classes, np.empty(begin, np.int64), log)


@compiled
def note(log: SwapLog, verb: int, what: int, where: int) -> None:
    entry = log.entries[log.length[0]]
    entry.verb, entry.what, entry.where = verb, what, where
    log.length[0] += 1


@compiled
def fill(state: PoolState, t: int, o: int) -> None:
    state.objects[o].holder = t
    state.tensors[t].where = o


@compiled
def release(state: PoolState, o: int, c: int) -> None:
    """Append an object to its class's queue of free objects."""
    tail = state.classes[c].tail
    state.objects[o].holder, state.objects[o].entry = FREE, tail
    state.queue[tail] = o
    state.classes[c].tail = tail + 1


@compiled
def leave(state: PoolState, t: int) -> None:
    """Drop a tensor for good, and release its object."""
    note(state.log, GONE, t, NOWHERE)
    release(state, state.tensors[t].where, state.tensors[t].size_class)
    state.tensors[t].where = NOWHERE


@compiled
def take_free(state: PoolState, c: int, oldest: bool) -> int:
    """Take the object that is free the longest (`oldest`), or the one freed last; NOWHERE if there is none."""
    size_class = state.classes[c]
    while size_class.head < size_class.tail:
        if oldest:
            i = size_class.head
            size_class.head = i + 1
        else:
            i = size_class.tail - 1
            size_class.tail = i
        o = state.queue[i]
        if state.objects[o].entry == i:
            state.objects[o].entry = NOWHERE
            return int(o)
    return NOWHERE


@compiled
def save(state: PoolState, t: int) -> None:
    """Swap a tensor out unless its host copy is up to date."""
    if not state.tensors[t].saved:
        note(state.log, OUT, t, NOWHERE)
        state.tensors[t].saved = True


@compiled
def displace(state: PoolState, t: int) -> None:
    """Save a tensor (see `save`) and drop it. The caller takes its object."""
    save(state, t)
    note(state.log, GONE, t, NOWHERE)
    state.objects[state.tensors[t].where].holder = FREE
    state.tensors[t].where = NOWHERE


@compiled
def disown(state: PoolState, t: int) -> None:
    """Remove an unused tensor from the initial residents: its object has been free since the start."""
    tensor = state.tensors[t]
    state.objects[tensor.where].holder = FREE
    tensor.resident_at = tensor.where = NOWHERE
    tensor.saved = True
