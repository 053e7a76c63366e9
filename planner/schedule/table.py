"""Schedules: the output of every searcher, as a table that compiled loops read.

Rows (ops, copies and drops) are in one total order. A searcher chooses rows; `with_waits` computes the waits of each.
`lanes_of` converts a schedule for the simulator, `write` into a plan."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import GraphArrays, Ints, ints
from cohabit.planner.compiled import compiled

COMPUTE: Final = 0
SWAP_IN: Final = 1
SWAP_OUT: Final = 2
"""Verbs, also the indices of the lanes that they run on."""
DROP: Final = 3

NOTHING: Final = -1
"""No step to wait for, no address (the tensor is counted), or no use."""

WORKSPACE: Final = 1 << 48
"""Offsets below this are in the partition; from here on, they count from the workspace's start."""

UNLIMITED: Final = 1 << 62
"""Size of a pool in which no row waits for bytes."""


class Schedule(NamedTuple):
    """One inference: `n` rows in total order."""

    verb: Ints
    what: Ints
    """The op, or the copied or dropped tensor; shape [n]. An op may occur again."""
    offset: Ints
    """Destination of a swap-in, in the partition or from WORKSPACE on; NOTHING if the tensor is counted; shape [n]."""
    wait: Ints
    """`wait[i, lane]`: position on that lane, from 0, of the last step that row i waits for, or NOTHING;
    shape [n, 3]."""
    residents: Ints
    """Weights in memory both at the start and at the end."""
    resident_at: Ints
    """Offset of each resident, or NOTHING."""


Row = tuple[int, int, int, int]
"""Verb, what, offset and `after`; see `with_waits`."""
Action = tuple[int, int]
"""Verb and what of a counted row."""


def scheduled(
    arrays: GraphArrays, rows: Iterable[Row], resident_at: Mapping[int, int], pool_bytes: int = UNLIMITED
) -> Schedule:
    """Make a schedule from rows and the residents' offsets; see `with_waits`."""
    table = np.array([*rows], np.int64).reshape(-1, 4)
    verb, what, offset, after = (np.ascontiguousarray(column) for column in table.T)
    return with_waits(arrays, verb, what, offset, after, ints(resident_at), ints(resident_at.values()), pool_bytes)


def counted(
    arrays: GraphArrays, verb: Ints, what: Ints, residents: Collection[int], memory_bytes: int
) -> Schedule | None:
    """Make a schedule in which everything is counted; None if it needs more than `memory_bytes`."""
    if peak_bytes(arrays, verb, what, residents) > memory_bytes:
        return None
    nothing, resident_at = np.full(len(verb), NOTHING), np.full(len(residents), NOTHING)
    return with_waits(arrays, verb, what, nothing, nothing, ints(residents), resident_at, memory_bytes)


def columns(actions: Sequence[Action]) -> tuple[Ints, Ints]:
    """Return the verbs, and their ops or tensors, as arrays."""
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
    """Compute the waits of every row.

    An op waits for its reads to arrive, and for swap-outs of tensors that it changes in place. The last op waits for
    the outputs, and for all swap-ins of non-residents: the next inference counts their bytes as free. A copy waits for
    the steps that made its source, and for the compute step `after`: for a swap-in with an address, the last user of
    the bytes that it takes. A counted swap-in also waits for the tensor's former users. A row that takes counted bytes
    waits until enough released bytes, in release order (FIFO), are certainly free for all to fit in the pool.
    """
    n, tensors = len(verb), len(g.nbytes)
    wait = np.full((n, 3), NOTHING)
    # Clocks, in steps ended per lane: arrival, last use and swap-out of each tensor; `known` to each lane's next step;
    # known once a step has `ended`.
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
    # Only the last op waits for outputs and for swap-ins of non-residents.
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
        # Data dependencies, and the counted bytes that the row takes.
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
            if counted[x]:  # it returns to its former storage
                _merge(need, used[x])
        else:
            _merge(need, arrived[x])
            need[COMPUTE] = max(need[COMPUTE], after[i] + 1)
        # A wait implies all that was known at its step's end. Waits for memory come on top.
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
        # The row ends: advance its lane's clock, and those of the tensors that it touched.
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
    """Merge into `now` the clocks at the ends of the steps in `need`."""
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
    """Add waits for released bytes, in release order, until `wanted_bytes` fit in the pool."""
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
    """Return the peak bytes in memory if everything is counted: the smallest pool for these rows."""
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
