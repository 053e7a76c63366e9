"""Offsets within a given capacity, by depth-first search: what greedy orders leave unused.

This follows MiniMalloc (Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
Learning", ASPLOS 2023). Blocks are placed upwards, each at the lowest offset that earlier blocks leave, and offsets
never fall: every solution can be pushed down into this canonical form. A branch ends when, at some time, the blocks to
come do not fit between the lowest free offset and the capacity, or when a block would be so high that another one fits
below it. Times that no block to come connects are solved independently. Unlike MiniMalloc, the search restarts with
another order of preference after some nodes, and lowers the capacity towards the lower bound.

    capacity -----------------------
             |      |  to come     |
             |  B   |--------------|  <- lowest offset left at this time
             |------|      A       |
             0 ------------------------> time"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from cohabit.planner.arrays import Bools, Floats, Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.layout.placement import Block, Layout, arrays_of, most_live_bytes, place

MOST_BLOCKS: Final = 1500
"""Larger problems are not searched: memory grows with the square of their number, and nodes become slow."""
RESTART_NODES: Final = (1000, 1000, 5000)
"""How long each descent may be, in turn: most that come to an end do so early."""
_SHARES: Final = 3
"""Each order is tried with the lower bound as the capacity, and with this many between it and the best peak so far."""
_NOISE: Final = (0.0, 0.05, 0.2, 0.5)
_FIXED: Final = ((0, 2, 1), (0, 1, 2), (1, 2, 0), (2, 0, 1))


def searched(blocks: Sequence[Block], enough_bytes: int = 0, *, nodes: int, seed: int = 0) -> Layout:
    """Place blocks by greedy rules, then search up to `nodes` partial placements, about 100,000 a second.

    Stops at a layout that needs at most `enough_bytes`.
    """
    best, floor = place(blocks, enough_bytes), max(most_live_bytes(blocks), enough_bytes)
    if best.peak_bytes <= floor:
        return best
    nbytes, alignment, *spans = arrays_of(blocks)
    known = np.array(best.offsets, dtype=np.int64)
    offsets = improve(nbytes, alignment, np.stack(spans, axis=1), floor, known, nodes, seed)
    return Layout(tuple(offsets.tolist()), int((offsets + nbytes).max()))


def improve(nbytes: Ints, alignment: Ints, spans: Ints, floor: int, known: Ints, nodes: int, seed: int) -> Ints:
    """Find offsets with a lower peak than those known, and return the best.

    `spans` [blocks, 4] has first and end, twice (the second empty for most). Stops at a peak of `floor` or after
    `nodes` partial placements; the same arguments give the same offsets.
    """
    best = known
    kept = np.flatnonzero((nbytes > 0) & (spans[:, 0] < spans[:, 1]))
    if not 0 < len(kept) <= MOST_BLOCKS or nodes <= 0:
        return best
    times, sections = _sections(spans[kept])
    size, align = nbytes[kept], alignment[kept]
    tallest, length = _shape(size, times, sections)
    random = np.random.default_rng(seed)
    peak, left = int((best + nbytes).max()), nodes
    each = 0
    while left > 0 and peak > floor:
        rank = _rank(size, tallest, length, random, each)
        for share in (0.0, *random.random(_SHARES)):
            capacity = floor + int(share * (peak - floor))
            most = min(left, RESTART_NODES[each % len(RESTART_NODES)])
            offsets, found, used = _descend(size, align, times, sections, rank, capacity, most)
            left -= used
            if found and (offsets + size).max() < peak:
                best = np.zeros_like(nbytes)
                best[kept] = offsets
                peak = int((best + nbytes).max())
        each += 1
    return best


def _sections(spans: Ints) -> tuple[Ints, int]:
    """Spans as ranges of sections, the times between neighbouring first and end positions; and their number."""
    positions = np.unique(spans)
    return np.searchsorted(positions, spans).astype(np.int64), len(positions) - 1


def _shape(size: Ints, times: Ints, sections: int) -> tuple[Floats, Floats]:
    """For each block, the most bytes alive at once while it is needed, and for how many sections it is."""
    change = np.zeros(sections + 1, dtype=np.int64)
    for first, end in ((0, 1), (2, 3)):
        np.add.at(change, times[:, first], size)
        np.add.at(change, times[:, end], -size)
    live = np.cumsum(change)
    tallest = [max(live[a:b].max(initial=0), live[c:d].max(initial=0)) for a, b, c, d in times]
    length = times[:, 1] - times[:, 0] + times[:, 3] - times[:, 2]
    return np.maximum(tallest, 1).astype(np.float64), np.maximum(length, 1).astype(np.float64)


def _rank(size: Ints, tallest: Floats, length: Floats, random: np.random.Generator, each: int) -> Ints:
    """Rank of each block among those that could be placed at the same offset.

    The first few orders are MiniMalloc's (by the most crowded time, length and area, each as first criterion), the
    others random: those again with noise, or mixtures.
    """
    keys = (tallest, length, size * length)
    if each < len(_FIXED):
        order = np.lexsort(tuple(-keys[k] for k in reversed(_FIXED[each])))
    elif random.random() < 0.5:
        noise = np.exp(0.1 * random.standard_normal((len(keys), len(size))))
        order = np.lexsort(tuple(-keys[k] * noise[k] for k in random.permutation(len(keys))))
    else:
        share = 3 * random.dirichlet(np.ones(3))
        score = 3 * share[0] * np.log(tallest) + share[1] * np.log(length) + share[2] * np.log(size)
        order = np.argsort(-(score + random.choice(_NOISE) * random.standard_normal(len(size))), kind="stable")
    ranks = np.empty(len(size), dtype=np.int64)
    ranks[order] = np.arange(len(size))
    return ranks


@compiled
def _descend(
    size: Ints, alignment: Ints, times: Ints, sections: int, rank: Ints, capacity: int, nodes: int
) -> tuple[Ints, bool, int]:
    """Search until all blocks are placed, nothing is left to try, or `nodes` placements were looked at.

    Returns offsets, whether they are complete, and the nodes used. Each level places one block of one *island*:
    sections that blocks to come connect. What islands have to place is independent, so when one cannot be completed,
    the search returns to the last block placed in its time and leaves out what was placed elsewhere since.
    """
    blocks = len(size)
    offsets, lowest = np.zeros(blocks, dtype=np.int64), np.zeros(blocks, dtype=np.int64)
    lowest_before = np.zeros((blocks, blocks), dtype=np.int64)
    placed = np.zeros(blocks, dtype=np.bool_)
    candidates = np.zeros((blocks, blocks), dtype=np.int64)
    tried, known = np.zeros(blocks, dtype=np.int64), np.zeros(blocks, dtype=np.int64)
    chosen = np.zeros(blocks, dtype=np.int64)
    island = np.zeros((blocks, 2), dtype=np.int64)
    to_come = np.zeros(sections, dtype=np.int64)
    for i in range(blocks):
        _add(to_come, times, i, size[i])
    depth, used, deeper = 0, 0, True
    while True:
        if deeper:
            used += 1
            if depth == blocks or used > nodes:
                return offsets, depth == blocks, used
            island[depth] = _tightest_island(size, times, capacity, lowest, placed, to_come)
            last = _last_inside(times, chosen, depth, island[depth])
            before = chosen[last] if last >= 0 else -1
            known[depth] = _candidates(
                candidates[depth],
                size,
                times,
                rank,
                capacity,
                offsets,
                lowest,
                placed,
                to_come,
                before,
                island[depth],
            )
            tried[depth] = 0
            lowest_before[depth] = lowest
        if tried[depth] < known[depth]:
            i = candidates[depth, tried[depth]]
            tried[depth] += 1
            chosen[depth], placed[i], offsets[i] = i, True, lowest[i]
            _add(to_come, times, i, -size[i])
            top = offsets[i] + size[i]
            for j in range(blocks):
                if not placed[j] and lowest[j] < top and _meet(times, i, j):
                    lowest[j] = (top + alignment[j] - 1) // alignment[j] * alignment[j]
            depth, deeper = depth + 1, True
        else:
            last = _last_inside(times, chosen, depth, island[depth])
            if last < 0:
                return offsets, False, used
            for level in range(last, depth):
                placed[chosen[level]] = False
                _add(to_come, times, chosen[level], size[chosen[level]])
            depth, deeper = last, False
            lowest[:] = lowest_before[depth]


@compiled
def _tightest_island(size: Ints, times: Ints, capacity: int, lowest: Ints, placed: Bools, to_come: Ints) -> Ints:
    """First and end section of the island that has least room to spare. A block fills the time between its spans."""
    sections = len(to_come)
    covered = np.zeros(sections + 1, dtype=np.int64)
    floor = np.full(sections, 2**62, dtype=np.int64)
    for j in range(len(size)):
        if not placed[j]:
            # Between two sections, so that islands that only touch stay apart.
            covered[times[j, 0]] += 1
            covered[_finish(times, j) - 1] -= 1
            for k in (0, 2):
                for section in range(times[j, k], times[j, k + 1]):
                    floor[section] = min(floor[section], lowest[j])
    best = np.zeros(2, dtype=np.int64)
    least, room, first, across = np.int64(2**62), np.int64(2**62), 0, 0
    for section in range(sections):
        if to_come[section] > 0:
            room = min(room, capacity - floor[section] - to_come[section])
        across += covered[section]
        if across == 0:
            if room < least:
                least, best[0], best[1] = room, first, section + 1
            first, room = section + 1, np.int64(2**62)
    return best


@compiled
def _last_inside(times: Ints, chosen: Ints, depth: int, island: Ints) -> int:
    """The deepest level above `depth` that placed a block in the island's time, or -1."""
    for level in range(depth - 1, -1, -1):
        if times[chosen[level], 0] < island[1] and _finish(times, chosen[level]) > island[0]:
            return level
    return -1


@compiled
def _finish(times: Ints, j: int) -> int:
    """One more than the last section that a block needs."""
    return int(max(times[j, 1], times[j, 3]))


@compiled
def _candidates(
    found: Ints,
    size: Ints,
    times: Ints,
    rank: Ints,
    capacity: int,
    offsets: Ints,
    lowest: Ints,
    placed: Bools,
    to_come: Ints,
    before: int,
    island: Ints,
) -> int:
    """Write the island's blocks that may be placed next to `found`; return their number.

    Lowest offset first, then by rank. `before` is the last block that was placed in the island's time.
    """
    height = offsets[before] if before >= 0 else 0
    reach = np.int64(2**62)  # lowest top that a block to come can have: a block above it leaves a hole for that one
    floor = np.full(len(to_come), 2**62, dtype=np.int64)
    for j in range(len(size)):
        if not placed[j] and island[0] <= times[j, 0] < island[1]:
            at = max(lowest[j], height)
            reach = min(reach, at + size[j])
            for k in (0, 2):
                for section in range(times[j, k], times[j, k + 1]):
                    floor[section] = min(floor[section], at)
    for section in range(island[0], island[1]):
        if to_come[section] > 0 and floor[section] + to_come[section] > capacity:
            return 0
    count = 0
    for j in range(len(size)):
        if placed[j] or not island[0] <= times[j, 0] < island[1] or lowest[j] < height or lowest[j] >= reach:
            continue
        if before >= 0 and lowest[j] == height and rank[j] < rank[before]:
            continue  # two blocks at one offset: the same placement in another order
        hole = count
        while hole > 0 and (
            lowest[found[hole - 1]] > lowest[j]
            or (lowest[found[hole - 1]] == lowest[j] and rank[found[hole - 1]] > rank[j])
        ):
            found[hole] = found[hole - 1]
            hole -= 1
        found[hole] = j
        count += 1
    return count


@compiled
def _add(to_come: Ints, times: Ints, i: int, nbytes: int) -> None:
    for k in (0, 2):
        for section in range(times[i, k], times[i, k + 1]):
            to_come[section] += nbytes


@compiled
def _meet(times: Ints, i: int, j: int) -> bool:
    """Whether two blocks are ever needed at the same time."""
    for k in (0, 2):
        for m in (0, 2):
            # An empty span meets nothing, which needs saying: it may lie inside another.
            if max(times[i, k], times[j, m]) < min(times[i, k + 1], times[j, m + 1]):
                return True
    return False
