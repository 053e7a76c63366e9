"""The schedule: the one form of what happens when, made by every searcher, as a table that compiled loops read.

Its rows stand in one total order: ops, copies and drops. A searcher chooses rows; `with_waits` finds out what each has
to wait for. `lanes_of` turns a schedule into what the simulator reads, `write` into a plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints, ints
from cohabit.planner.compiled import compiled

COMPUTE: Final = 0
SWAP_IN: Final = 1
SWAP_OUT: Final = 2
"""Verbs, and the lanes that they run on."""
DROP: Final = 3

NOTHING: Final = -1
"""No step to wait for; no address, because the tensor is counted; no use."""

WORKSPACE: Final = 1 << 48
"""Offsets below this lie in the partition; from here on they count from the workspace's start."""

UNLIMITED: Final = 1 << 62
"""A pool in which nothing has to wait for bytes."""


class Schedule(NamedTuple):
    """One inference, `n` rows in total order."""

    verb: Ints
    what: Ints
    """An op, or the tensor that is copied or dropped, [n]. An op may be computed again."""
    offset: Ints
    """Where a swap-in goes, in the partition or from WORKSPACE on; NOTHING where the tensor is counted, [n]."""
    wait: Ints
    """`wait[i, lane]`: the number, counted on that lane from 0, of the last step that row i waits for, or NOTHING,
    [n, 3]."""
    residents: Ints
    """Weights that are in memory at the start and at the end."""
    resident_at: Ints
    """The offset of each resident, or NOTHING."""


Row = tuple[int, int, int, int]
"""Verb, what, offset, and `after`: see `with_waits`."""
Action = tuple[int, int]
"""Verb and what, of a row that is counted."""


def scheduled(
    arrays: GraphArrays, rows: Iterable[Row], resident_at: Mapping[int, int], pool_bytes: int = UNLIMITED
) -> Schedule:
    """Make a schedule of rows and of the residents with their offsets. See `with_waits`."""
    table = np.array([*rows], np.int64).reshape(-1, 4)
    verb, what, offset, after = (np.ascontiguousarray(column) for column in table.T)
    return with_waits(arrays, verb, what, offset, after, ints(resident_at), ints(resident_at.values()), pool_bytes)


def counted(
    arrays: GraphArrays, verb: Ints, what: Ints, residents: Collection[int], memory_bytes: int
) -> Schedule | None:
    """Make a schedule in which everything is counted; None if it needs more than the memory."""
    if peak_bytes(arrays, verb, what, residents) > memory_bytes:
        return None
    nothing, resident_at = np.full(len(verb), NOTHING), np.full(len(residents), NOTHING)
    return with_waits(arrays, verb, what, nothing, nothing, ints(residents), resident_at, memory_bytes)


def columns(actions: Sequence[Action]) -> tuple[Ints, Ints]:
    """Return the verbs and what they are about as arrays."""
    table = np.array(actions, np.int64).reshape(-1, 2)
    return np.ascontiguousarray(table[:, 0]), np.ascontiguousarray(table[:, 1])


@compiled
def with_waits(
    g: GraphArrays,
    verb: Ints,
    what: Ints,
    offset: Ints,
    after: Ints,
    residents: Ints,
    resident_at: Ints,
    pool_bytes: int,
) -> Schedule:
    """Find out what every row waits for.

    An op waits for the arrival of what it reads, and for swap-outs of what it changes in place. The last op waits for
    the outputs, and for all swap-ins of non-residents: the next inference counts their bytes as free. A copy
    waits for what made its source, and for `after`, a number of a compute step: the last user of the bytes that a
    swap-in with an address takes. A counted swap-in waits for the tensor's former users. A row that takes counted
    bytes waits until enough released bytes are certain to be free for all to fit in the pool, in release order (FIFO).
    """
    n, tensors = len(verb), len(g.nbytes)
    wait = np.full((n, 3), NOTHING)
    # Clocks: how many steps of each lane have ended. Arrival, last use and swap-out of each tensor; what each lane's
    # next step knows to have ended; what is known once a step has ended.
    arrived, used, saved = (
        np.zeros((tensors, 3), np.int64),
        np.zeros((tensors, 3), np.int64),
        np.zeros(tensors, np.int64),
    )
    done, known, ended = np.zeros(3, np.int64), np.zeros((3, 3), np.int64), np.zeros((3, n + 1, 3), np.int64)
    counted, passes, passing = np.ones(tensors, np.bool_), np.ones(tensors, np.bool_), 0
    given_bytes, given_clock = np.zeros(2 * n, np.int64), np.zeros((2 * n, 3), np.int64)
    head, tail = np.zeros(3, np.int64), 0
    held = g.nbytes[g.inputs].sum()
    for i in range(len(residents)):
        counted[residents[i]], passes[residents[i]] = resident_at[i] < 0, False
        held += g.nbytes[residents[i]] if resident_at[i] < 0 else 0
    last = n - 1
    while last >= 0 and verb[last] != COMPUTE:
        last -= 1
    need, mine = np.zeros(3, np.int64), np.zeros(3, np.int64)
    for i in range(n):
        lane, x = verb[i], what[i]
        if lane == DROP:
            if counted[x]:
                held -= g.nbytes[x]
                given_bytes[tail], given_clock[tail], tail = g.nbytes[x], used[x], tail + 1
            continue
        need[:] = 0
        more = scratch = 0
        if lane == COMPUTE:
            for t in g.read[g.read_start[x] : g.read_start[x + 1]]:
                _merge(need, arrived[t])
            for t in g.change[g.change_start[x] : g.change_start[x + 1]]:
                need[SWAP_OUT] = max(need[SWAP_OUT], saved[t])
                saved[t] = 0
            for t in g.write[g.write_start[x] : g.write_start[x + 1]]:
                arrived[t] = 0
                more += g.nbytes[t]
            if i == last:
                for t in g.outputs:
                    _merge(need, arrived[t])
                need[SWAP_IN] = max(need[SWAP_IN], passing)
            scratch = g.scratch_bytes[x]
        elif lane == SWAP_IN:
            need[COMPUTE], need[SWAP_OUT] = after[i] + 1, saved[x]
            counted[x] = offset[i] < 0
            more = g.nbytes[x] if counted[x] else 0
            if counted[x]:  # it returns to the storage that it left
                _merge(need, used[x])
        else:
            _merge(need, arrived[x])
            need[COMPUTE] = max(need[COMPUTE], after[i] + 1)
        now = known[lane]
        _learn(now, need, ended)
        if more + scratch > 0:
            _wait_for_bytes(
                now, need, ended, given_bytes, given_clock, head, tail, lane, held + more + scratch, pool_bytes
            )
        held += more
        for other in range(3):
            if other != lane and need[other] > 0:
                wait[i, other] = need[other] - 1
        done[lane] += 1
        now[lane] = done[lane]
        ended[lane, done[lane]] = now
        mine[:] = 0
        mine[lane] = done[lane]
        if lane == COMPUTE:
            for t in g.read[g.read_start[x] : g.read_start[x + 1]]:
                used[t, COMPUTE] = done[COMPUTE]
            for t in g.change[g.change_start[x] : g.change_start[x + 1]]:
                arrived[t, COMPUTE] = done[COMPUTE]
            for t in g.write[g.write_start[x] : g.write_start[x + 1]]:
                arrived[t], used[t], counted[t] = mine, mine, True
            if scratch > 0:
                given_bytes[tail], given_clock[tail], tail = scratch, mine, tail + 1
        elif lane == SWAP_IN:
            arrived[x], used[x] = mine, mine
            passing = done[SWAP_IN] if passes[x] else passing
        else:
            used[x, SWAP_OUT], saved[x] = done[SWAP_OUT], done[SWAP_OUT]
    return Schedule(verb, what, offset, wait, residents, resident_at)


@compiled
def _merge(clock: Ints, other: Ints) -> None:
    for lane in range(3):
        clock[lane] = max(clock[lane], other[lane])


@compiled
def _learn(now: Ints, need: Ints, ended: Ints) -> None:
    """Add to what a step knows what it waits for, and what is known once that has ended."""
    for other in range(3):
        if need[other] > now[other]:
            _merge(now, ended[other, need[other]])


@compiled
def _wait_for_bytes(
    now: Ints,
    need: Ints,
    ended: Ints,
    given_bytes: Ints,
    given_clock: Ints,
    head: Ints,
    tail: int,
    lane: int,
    wanted_bytes: int,
    pool_bytes: int,
) -> None:
    """Wait for bytes that were given up, first those that were given up first, until all that is held fits."""
    unfinished = 0
    for r in range(head[lane], tail):
        if _is_past(given_clock[r], now):
            if r == head[lane]:
                head[lane] += 1
        else:
            unfinished += given_bytes[r]
    r = head[lane]
    while wanted_bytes + unfinished > pool_bytes and r < tail:
        if not _is_past(given_clock[r], now):
            _merge(need, given_clock[r])
            _learn(now, need, ended)
            unfinished = 0
            for later in range(r + 1, tail):
                if not _is_past(given_clock[later], now):
                    unfinished += given_bytes[later]
        r += 1


@compiled
def _is_past(clock: Ints, now: Ints) -> bool:
    return bool(clock[0] <= now[0] and clock[1] <= now[1] and clock[2] <= now[2])


def peak_bytes(arrays: GraphArrays, verb: Ints, what: Ints, residents: Collection[int] = ()) -> int:
    """The most bytes in memory at once where everything is counted: the least pool that these rows can have."""
    return int(_peak_bytes(arrays, verb, what, ints(residents)))


@compiled
def _peak_bytes(g: GraphArrays, verb: Ints, what: Ints, residents: Ints) -> int:
    held = g.nbytes[g.inputs].sum() + g.nbytes[residents].sum()
    peak = held
    for i in range(len(verb)):
        x = what[i]
        if verb[i] == COMPUTE:
            for t in g.write[g.write_start[x] : g.write_start[x + 1]]:
                held += g.nbytes[t]
            peak = max(peak, held + g.scratch_bytes[x])
        elif verb[i] == SWAP_IN:
            held += g.nbytes[x]
            peak = max(peak, held)
        elif verb[i] == DROP:
            held -= g.nbytes[x]
    return int(peak)
