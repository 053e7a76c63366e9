"""Which weights to keep where memory holds too few: the backward phase of Beaumont's model, for weights.

Our extension of the paper, which keeps all weights in memory and offloads activations. A weight that is not kept must
come back before its op, as an offloaded activation before B_i, and copies come in the order of the uses. So a choice
costs what the backward phase of section 5.2 does, from the last op to the first, with one difference: what is kept
stays after its use (it is there for the next inference), so `kept_bytes` is fixed beforehand and taken off the memory.

    ahead_k = fetched_k + max(0, ahead_(k+1) - (wait_k + u_k) * bandwidth)       bytes copied before op k starts
    wait_k  = max(0, ahead_(k+1) + fetched_k + a_k + kept - memory) / bandwidth  while op k needs a_k other than weights

and before the first op all of ahead_0 is copied. "Eager and ordered" (section 4) becomes: keep what is used first,
for then copies for the rest get ahead of the ops. That is `eager`; `best` is a DYNPROG over (bytes kept, ahead).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.beaumont.dynprog import GRID_UNITS, rounded


@dataclass(frozen=True, slots=True)
class WeightChain:
    """Ops in a row, each with the weights that it is the first (or the last) to use."""

    op_s: Sequence[float]
    weight_bytes: Sequence[float]
    copy_s: Sequence[float]
    """Link time of these weights."""
    room_bytes: Sequence[float]
    """Memory without what the op needs other than weights."""
    bytes_per_s: float


def fetching_s(
    op_s: Sequence[float], fetched: Sequence[tuple[float, float]], room_bytes: Sequence[float], bytes_per_s: float
) -> float:
    """Time of the ops and the waits between them; infinite where what is fetched for an op does not fit in its room.

    `fetched` has bytes and link time by op.
    """
    wait_s = ahead_bytes = 0.0
    for seconds, (nbytes, copy_s), room in zip(
        reversed(op_s), reversed(fetched), reversed(room_bytes), strict=True
    ):
        if room < nbytes:
            return math.inf
        waited = max(0.0, ahead_bytes - (room - nbytes))
        wait_s += waited / bytes_per_s
        ahead_bytes = max(0.0, ahead_bytes - waited - seconds * bytes_per_s) + copy_s * bytes_per_s
    return sum(op_s) + wait_s + ahead_bytes / bytes_per_s


def eager(line: WeightChain, window_bytes: float = 0.0) -> tuple[bool, ...]:
    """Keep the weights of the first k ops, k the most that leave `window_bytes` in addition to what each op needs."""
    before = list(accumulate(line.weight_bytes, initial=0.0))
    for k in reversed(range(len(line.op_s) + 1)):
        rest = [0.0] * k + list(line.weight_bytes[k:])
        window = window_bytes if k < len(line.op_s) else 0.0
        if all(before[k] + max(r, window) <= room for r, room in zip(rest, line.room_bytes, strict=True)):
            return tuple(i < k for i in range(len(line.op_s)))
    return (False,) * len(line.op_s)


def best(line: WeightChain, kept_bytes: float) -> tuple[bool, ...] | None:
    """The least latency of all choices that keep at most `kept_bytes`; None where none fits.

    Rounded to a grid as in planner.papers.beaumont.dynprog; entries that are no better than another are forgotten.
    """
    unit = max(sum(line.weight_bytes) / GRID_UNITS, 1.0)
    weight, copy, run = (
        rounded(values, unit)
        for values in (
            line.weight_bytes,
            [s * line.bytes_per_s for s in line.copy_s],
            [s * line.bytes_per_s for s in line.op_s],
        )
    )
    room = np.array([int((r - kept_bytes) // unit) for r in line.room_bytes], np.int64)
    most = int(kept_bytes // unit)
    tables = [_zeros(1)]
    for k in reversed(range(len(line.op_s))):
        tables.append(_next(tables[-1], int(weight[k]), int(copy[k]), int(run[k]), int(room[k]), most))
        if not len(tables[-1].kept):
            return None
    entry = int(np.argmin(tables[-1].waited + tables[-1].ahead))
    keeps = []
    for table in tables[:0:-1]:
        keeps.append(bool(table.keeps[entry]))
        entry = int(table.parent[entry])
    return tuple(keeps)


class _KeepTable(NamedTuple):
    kept: Ints
    ahead: Ints
    waited: Ints
    parent: Ints
    keeps: Bools


def _next(table: _KeepTable, weight: int, copy: int, run: int, room: int, most: int) -> _KeepTable:
    found = []
    for keeps in (True, False) if weight or copy else (True,):
        parent = np.flatnonzero(table.kept + weight <= most) if keeps else np.arange(len(table.kept))
        free = room - (0 if keeps else weight)
        if free < 0:
            continue
        ahead = table.ahead[parent]
        wait = np.maximum(0, ahead - free)
        ahead = np.maximum(0, ahead - wait - run) + (0 if keeps else copy)
        kept = table.kept[parent] + (weight if keeps else 0)
        found.append(_KeepTable(kept, ahead, table.waited[parent] + wait, parent, np.full(len(parent), keeps)))
    if not found:
        return _zeros(0)
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    kept, ahead, waited = columns[:3]
    order = np.lexsort((ahead, waited, kept))
    rank = np.unique(waited[order], return_inverse=True)[1]
    chosen = order[_undominated(rank, (waited + ahead)[order])]
    return _KeepTable._make(column[chosen] for column in columns)


def _zeros(count: int) -> _KeepTable:
    zero = np.zeros(count, np.int64)
    return _KeepTable(zero, zero, zero, zero, np.zeros(count, np.bool_))


@compiled
def _undominated(rank: Ints, total: Ints) -> Ints:
    """Indices of entries, sorted by bytes kept and rank of the wait, that no earlier one is as good as.

    One that has copied more than another can wait to catch up: it is as good if that neither makes its wait longer
    nor, in any case, the sum of its wait and its copies larger. A Fenwick tree has the least sum for each rank.
    """
    found = np.empty(len(rank), np.int64)
    least = np.full(len(rank) + 1, 2**62)
    count = 0
    for i in range(len(rank)):
        j, best = rank[i] + 1, 2**62
        while j > 0:
            best = min(best, least[j])
            j -= j & -j
        if best > total[i]:
            found[count] = i
            count += 1
            j = rank[i] + 1
            while j < len(least):
                least[j] = min(least[j], total[i])
                j += j & -j
    return found[:count]
