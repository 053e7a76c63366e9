"""DYNPROG: the best set of activations to offload if copies are fractional (Beaumont et al., Algorithm 1).

The table of layer i has an entry per (bytes kept below x_i, Delta_F, Delta_B), with the least idle time so far; the
paper's M_F is x_i + kept + Delta_F+. Unlike in the paper, entries are removed if they cannot lead to an optimum, or
if another entry dominates them. The result stays the same:
- an entry with no more of each reaches the same states as early; it may also wait first, which lowers the Deltas by
  the bytes that the link copies during the wait;
- the remaining idle time is at least that of the copies that do not fit into the remaining ops.

The paper leaves its rounding to a research report. Here, sizes and times are in units of a grid on the link, and
prefix sums are rounded, not single values, so that errors do not grow with the layers. Free memory is rounded down.
The finalists are evaluated again without rounding, together with GREEDY's choices."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.papers.beaumont.layers import LayerChain
from cohabit.planner.papers.beaumont.offload import relaxed_s, turn_s, whole

Offloaded = tuple[bool, ...]

GRID_UNITS: Final = 2000
"""Number of units in all activations together."""
FINALISTS: Final = 16
"""Number of choices evaluated without rounding."""
_TIE: Final = 1e-9


class _OffloadTable(NamedTuple):
    """Entries of one layer; `parent` is an index into the previous layer's table."""

    kept: Ints
    to_offload: Ints
    to_prefetch: Ints
    idle_s: Floats
    parent: Ints
    offloaded: Bools


class _Grid(NamedTuple):
    """The chain in units. The rooms have, per layer, the memory beyond an op's own needs."""

    x: Ints
    forward: Ints
    backward: Ints
    forward_room: Ints
    backward_room: Ints
    unit_out_s: float
    unit_in_s: float


def optima(chain: LayerChain, memory_bytes: float) -> list[Offloaded]:
    """Return, among the best choices, the one that offloads least and the one that offloads most.

    The latter leaves memory for effects that the relaxation ignores; it is left out if offloading is not needed.
    """
    if chain.least_bytes() > memory_bytes:
        return []
    unit = max(sum(chain.x_bytes) / GRID_UNITS, 1.0)
    found = incumbents(chain)
    limit_s = min(relaxed_s(chain, memory_bytes, whole(chain, o)) for o in found) - chain.compute_s
    tables = _fill(_on_grid(chain, memory_bytes, unit), limit_s + _TIE * chain.compute_s)
    found += [_offloaded(tables, entry) for entry in _finalists(chain, memory_bytes, tables[-1], unit)]
    makespan_s = {o: relaxed_s(chain, memory_bytes, whole(chain, o)) for o in found}
    longest_s = min(makespan_s.values()) * (1 + _TIE)
    best = sorted((o for o in makespan_s if makespan_s[o] <= longest_s), key=lambda o: sum(whole(chain, o)))
    return [best[0], best[-1]] if any(best[0]) and len(best) > 1 else best[:1]


def incumbents(chain: LayerChain) -> list[Offloaded]:
    """Return the eager choices: the first k activations, for every k."""
    last = chain.layers
    return [tuple(i < k for i in range(last)) for k in range(last + 1)]


def _on_grid(chain: LayerChain, memory_bytes: float, unit: float) -> _Grid:
    last = chain.layers
    rooms = [
        [int((memory_bytes - own(i)) // unit) for i in range(last)]
        for own in (chain.forward_own_bytes, chain.backward_own_bytes)
    ]
    return _Grid(
        rounded(chain.x_bytes[:last], unit),
        rounded([s * chain.offload_bytes_per_s for s in chain.forward_s], unit),
        rounded([s * chain.prefetch_bytes_per_s for s in chain.backward_s], unit),
        np.array(rooms[0], np.int64),
        np.array(rooms[1], np.int64),
        unit / chain.offload_bytes_per_s,
        unit / chain.prefetch_bytes_per_s,
    )


def rounded(values: Sequence[float], unit: float) -> Ints:
    """Convert values to units such that their prefix sums are rounded."""
    sums = [round(s / unit) for s in accumulate(values, initial=0.0)]
    return np.array([b - a for a, b in pairwise(sums)], np.int64)


def _fill(grid: _Grid, limit_s: float) -> list[_OffloadTable]:
    zero = np.zeros(1, np.int64)
    tables = [_OffloadTable(zero, zero, zero, np.zeros(1), zero, np.zeros(1, np.bool_))]
    ahead = np.minimum(grid.forward_room, grid.backward_room)
    room = np.minimum.accumulate(ahead[::-1])[::-1]  # for all layers from here on
    for i in range(len(grid.x)):
        tables.append(_next(grid, i, tables[-1], int(room[i]), limit_s))
    return tables


def _next(grid: _Grid, i: int, table: _OffloadTable, room: int, limit_s: float) -> _OffloadTable:
    parent = np.flatnonzero(table.kept <= room)
    kept, to_offload, to_prefetch = table.kept[parent], table.to_offload[parent], table.to_prefetch[parent]
    forward_wait = np.maximum(0, to_offload - (grid.forward_room[i] - kept))  # (1)
    backward_wait = np.maximum(0, to_prefetch - (grid.backward_room[i] - kept))  # (6)
    idle_s = table.idle_s[parent] + forward_wait * grid.unit_out_s + backward_wait * grid.unit_in_s
    out_moved, in_moved = forward_wait + grid.forward[i], backward_wait + grid.backward[i]
    stay = kept + grid.x[i], to_offload - out_moved, to_prefetch - in_moved  # (4), (8)
    leave = (  # (2), (7)
        kept,
        np.maximum(to_offload, 0) + grid.x[i] - out_moved,
        np.maximum(to_prefetch - in_moved, 0) + grid.x[i],
    )
    if grid.x[i] == 0:
        leave = tuple(a[:0] for a in leave)  # type: ignore[assignment]
    both = [np.concatenate(pair) for pair in zip(stay, leave, strict=True)]
    count, gone = len(parent), len(leave[0])
    idle_s, parent = np.concatenate([idle_s, idle_s[:gone]]), np.concatenate([parent, parent[:gone]])
    offloaded = np.arange(count + gone) >= count
    copies_s = (both[1] - grid.forward[i + 1 :].sum()) * grid.unit_out_s
    copies_s += (both[2] - grid.backward[i + 1 :].sum()) * grid.unit_in_s
    good = np.flatnonzero(idle_s + np.maximum(copies_s, 0.0) <= limit_s)
    order = good[np.lexsort((both[2][good], both[1][good], idle_s[good], both[0][good]))]
    kept, to_offload, to_prefetch = (a[order] for a in both)
    best = _undominated(kept, to_offload, to_prefetch, idle_s[order], grid.unit_out_s, grid.unit_in_s)
    chosen = order[best]
    return _OffloadTable(
        kept[best], to_offload[best], to_prefetch[best], idle_s[chosen], parent[chosen], offloaded[chosen]
    )


@compiled
def _undominated(
    kept: Ints, to_offload: Ints, to_prefetch: Ints, idle_s: Floats, unit_out_s: float, unit_in_s: float
) -> Ints:
    """Return the indices of the entries, sorted by bytes kept and idle time, that no earlier one dominates."""
    found = np.empty(len(kept), np.int64)
    count = 0
    for i in range(len(kept)):
        better = False
        for n in range(count - 1, -1, -1):
            j = found[n]
            if (
                idle_s[j]
                + max(to_offload[j] - to_offload[i], 0) * unit_out_s
                + max(to_prefetch[j] - to_prefetch[i], 0) * unit_in_s
                <= idle_s[i]
            ):
                better = True
                break
        if not better:
            found[count] = i
            count += 1
    return found[:count]


def _finalists(chain: LayerChain, memory_bytes: float, table: _OffloadTable, unit: float) -> list[int]:
    """Return the entries of the last table with the least idle time, including the turn between the phases."""
    turns = [
        turn_s(chain, memory_bytes, kept * unit, out * unit, back * unit)
        for kept, out, back in zip(
            table.kept.tolist(), table.to_offload.tolist(), table.to_prefetch.tolist(), strict=True
        )
    ]
    found: list[int] = np.argsort(table.idle_s + turns, kind="stable")[:FINALISTS].tolist()
    return found


def _offloaded(tables: Sequence[_OffloadTable], entry: int) -> Offloaded:
    """Trace back an entry of the last table."""
    found = []
    for table in tables[:0:-1]:
        found.append(bool(table.offloaded[entry]))
        entry = int(table.parent[entry])
    return tuple(reversed(found))
