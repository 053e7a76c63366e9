"""Byte offsets for blocks with known lifespans, so that blocks alive together do not overlap.

This is dynamic storage allocation, which is NP-hard. Greedy orders with best fit come within a few per cent of the
most bytes alive at once, which no placement can beat."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph
from cohabit.planner.layout.packing import MOST_BLOCKS, improve
from cohabit.planner.lifetimes import Lifespan, lifespans, live_bytes

NOWHERE: Final = -1
"""Offset of a block that is not placed yet."""
UNLIMITED: Final = 1 << 62
"""More bytes than any layout needs."""

LOW_WORK: Final = 150_000
"""Blocks that are placed in the search for a low layout: about 10 ms, 0.1 s where many are needed at the same time."""

ByteRange = tuple[int, int]
"""Half-open: the first byte, and the first byte after it."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that are needed as one piece during `span`."""

    nbytes: int
    alignment: int
    span: Lifespan
    again: Lifespan | None = None
    """A later span during which the same bytes are needed again."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`offsets[i]` belongs to block i; nothing reaches beyond `peak_bytes`."""

    offsets: tuple[int, ...]
    peak_bytes: int


def place(blocks: Sequence[Block], enough_bytes: int = 0, nodes: int = 0, seed: int = 0) -> Layout:
    """Place all blocks, deterministically. Stop at the first layout that needs at most `enough_bytes`.

    Greedy rules come first. Then up to `nodes` partial placements are searched (about 100,000 a second), unless there
    are too many blocks for that (`planner.layout.packing`).
    """
    best: Layout | None = None
    floor = max(most_live_bytes(blocks), enough_bytes)
    for layout in layouts(blocks):
        if best is None or layout.peak_bytes < best.peak_bytes:
            best = layout
        if best.peak_bytes <= floor:
            break
    assert best is not None
    if nodes and best.peak_bytes > floor:
        nbytes, alignment, *spans = _arrays(blocks)
        known = np.array(best.offsets, dtype=np.int64)
        offsets = improve(nbytes, alignment, np.stack(spans, axis=1), floor, known, nodes, seed)
        best = Layout(tuple(offsets.tolist()), int((offsets + nbytes).max()))
    return best


def place_within(blocks: Sequence[Block], memory_bytes: int, nodes: int = 0) -> Layout | None:
    """Place all blocks in so many bytes; None if no rule and no search of `nodes` (as in `place`) finds a way."""
    if most_live_bytes(blocks) > memory_bytes:
        return None
    if not nodes or len(blocks) > MOST_BLOCKS:
        return next(layouts(blocks, memory_bytes), None)
    layout = place(blocks, memory_bytes, nodes)
    return layout if layout.peak_bytes <= memory_bytes else None


def layouts(blocks: Sequence[Block], most_bytes: int = UNLIMITED) -> Iterator[Layout]:
    """Layouts by greedy rules, at least one; with `most_bytes` those that need no more."""
    if not blocks:
        yield Layout((), 0)
        return
    rows = _arrays(blocks)
    for order in _orders(*rows[:4]):
        for best_fit in (True, False):
            offsets = _fit(order, rows, best_fit, most_bytes)
            if len(offsets):
                yield Layout(tuple(offsets.tolist()), int((offsets + rows[0]).max()))


def most_live_bytes(blocks: Sequence[Block]) -> int:
    """Most bytes alive at once: a lower bound of every layout's peak."""
    pairs = [(span, b.nbytes) for b in blocks for span in (b.span, b.again) if span is not None]
    return max(live_bytes(pairs, max((span.end for span, _ in pairs), default=0)), default=0)


@dataclass(frozen=True)
class ActivationLayout:
    """Where a graph's inputs and activations (by tensor id) and the ops' scratch (by op) go in [0, peak)."""

    tensors: dict[int, int]
    scratch: dict[int, int]
    busy: tuple[tuple[ByteRange, ...], ...]
    """Bytes in use during each op: disjoint ranges, lowest first."""

    @cached_property
    def tops(self) -> tuple[int, ...]:
        """End of the highest byte in use during each op."""
        return tuple(ranges[-1][1] if ranges else 0 for ranges in self.busy)

    @property
    def peak_bytes(self) -> int:
        return max(self.tops, default=0)


def place_activations(graph: Graph, low: bool = False) -> ActivationLayout:
    """Give every input, activation and scratch buffer a fixed offset, ops in the graph's order.

    With `low`, leave much room above the highest byte in use, on average over the ops as well as at the peak.
    """
    spans = lifespans(graph)
    tensors = {
        i: Block(t.nbytes, t.alignment, span)
        for i, (t, span) in enumerate(zip(graph.tensors, spans, strict=True))
        if t.kind != "parameter" and span is not None
    }
    scratch = {
        k: Block(op.scratch_bytes, SCRATCH_ALIGNMENT, Lifespan(k, k + 1))
        for k, op in enumerate(graph.ops)
        if op.scratch_bytes
    }
    blocks = [*tensors.values(), *scratch.values()]
    layout = _place_low(blocks) if low and blocks else place(blocks)
    return ActivationLayout(
        dict(zip(tensors, layout.offsets, strict=False)),
        dict(zip(scratch, layout.offsets[len(tensors) :], strict=True)),
        _busy(graph, blocks, layout),
    )


class Meeting(NamedTuple):
    """For each block, the others that are needed at the same time."""

    start: Ints
    """Block i meets `block[start[i]]` to `block[start[i + 1]]`."""
    block: Ints


def _place_low(blocks: Sequence[Block]) -> Layout:
    """Climb from the best of the greedy orders: what is on top during some op is placed earlier. Deterministic."""
    rows = _arrays(blocks)
    order = min(_orders(*rows[:4]), key=lambda order: _height(_tops(rows, _fit(order, rows, True, UNLIMITED))))
    first, end = rows[2:4]
    meets = (first[:, None] < end) & (first < end[:, None])
    np.fill_diagonal(meets, False)
    meeting = Meeting(np.cumsum([0, *meets.sum(axis=1)]), np.nonzero(meets)[1])
    offsets = _climb(order, rows, meeting, LOW_WORK // len(blocks))
    return Layout(tuple(offsets.tolist()), int((offsets + rows[0]).max()))


@compiled
def _climb(order: Ints, rows: Ints, meeting: Meeting, steps: int) -> Ints:
    np.random.seed(0)
    nbytes, first, end = rows[0], rows[2], rows[3]
    best = _fit_tightly(order, rows, meeting)
    tops = _tops(rows, best)
    live = np.zeros(len(tops), np.int64)
    for i in range(len(nbytes)):
        live[first[i] : end[i]] += nbytes[i]
    for step in range(steps):
        moved, to = np.random.randint(len(order)), np.random.randint(len(order))
        waste = np.cumsum(tops - live)
        if step % 2 == 0 and waste[-1] > 0:
            k = np.searchsorted(waste, np.random.randint(waste[-1]), side="right")
            highest = np.argmax((best + nbytes == tops[k]) & (first <= k) & (k < end) & (nbytes > 0))
            moved = int(np.argmax(order == highest))
            to = np.random.randint(moved + 1)
        others = np.concatenate((order[:moved], order[moved + 1 :]))
        tried = np.concatenate((others[:to], order[moved : moved + 1], others[to:]))
        offsets = _fit_tightly(tried, rows, meeting)
        heights = _tops(rows, offsets)
        if _height(heights) <= _height(tops):
            order, best, tops = tried, offsets, heights
    return best


@compiled
def _tops(rows: Ints, offsets: Ints) -> Ints:
    """The end of the highest byte in use during each op."""
    nbytes, first, end = rows[0], rows[2], rows[3]
    tops = np.zeros(end.max(), dtype=np.int64)
    for i in range(len(nbytes)):
        for k in range(first[i], end[i]) if nbytes[i] else range(0):
            tops[k] = max(tops[k], offsets[i] + nbytes[i])
    return tops


@compiled
def _height(tops: Ints) -> int:
    """All tops, and as often the peak."""
    return int(tops.sum() + len(tops) * tops.max())


def _busy(graph: Graph, blocks: Sequence[Block], layout: Layout) -> tuple[tuple[ByteRange, ...], ...]:
    busy: list[list[ByteRange]] = [[] for _ in range(max(len(graph.ops), 1))]
    for block, offset in sorted(zip(blocks, layout.offsets, strict=True), key=lambda placed: placed[1]):
        for k in range(block.span.first, block.span.end) if block.nbytes else ():
            busy[k].append((offset, offset + block.nbytes))
    return tuple(joined(ranges) for ranges in busy)


def joined(ranges: Iterable[ByteRange]) -> tuple[ByteRange, ...]:
    """Merge ranges that touch or overlap; they come sorted by their first byte."""
    found: list[ByteRange] = []
    for first, end in ranges:
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((first, end))
    return tuple(found)


def _arrays(blocks: Sequence[Block]) -> Ints:
    """Bytes, alignment, and both spans' first and end, [6, blocks]; the second span is empty for most."""
    rows = [(b.nbytes, b.alignment, b.span.first, b.span.end, *_again(b)) for b in blocks]
    return np.array(rows, dtype=np.int64).T.copy()


def _again(block: Block) -> tuple[int, int]:
    return (block.again.first, block.again.end) if block.again is not None else (block.span.end, block.span.end)


@compiled
def _meet(
    first: int, end: int, first_again: int, end_again: int, first_2: int, end_2: int, again_2: int, end_again_2: int
) -> bool:
    """Whether two blocks are ever needed at the same time. An empty span meets nothing."""
    if first < end_2 and first_2 < end:
        return True
    if first_again < end_again and (
        (first_again < end_2 and first_2 < end_again)
        or (again_2 < end_again_2 and first_again < end_again_2 and again_2 < end_again)
    ):
        return True
    return bool(again_2 < end_again_2 and first < end_again_2 and again_2 < end)


def _orders(nbytes: Ints, alignment: Ints, first: Ints, end: Ints) -> list[Ints]:
    """Orders worth trying: largest first, largest area first, longest first, earliest first, coarsest first."""
    return [
        np.lexsort((first, -nbytes)),
        np.lexsort((first, -nbytes * (end - first))),
        np.lexsort((-nbytes, first - end)),
        np.lexsort((-nbytes, first)),
        np.lexsort((-nbytes, -alignment)),
    ]


@compiled
def _fit(order: Ints, blocks: Ints, best_fit: bool, most_bytes: int) -> Ints:
    """Place blocks one by one in the tightest (or the lowest) gap between those already there.

    `blocks` is of `_arrays`. Returns no offsets once a block would end above `most_bytes`.
    """
    offsets = np.zeros(len(order), dtype=np.int64)
    nbytes, alignment = blocks[0], blocks[1]
    # Offset, top and times of those there, lowest first, side by side.
    placed = np.empty((6, len(order)), dtype=np.int64)
    count = 0
    for i in order:
        first, end, first_again, end_again = blocks[2, i], blocks[3, i], blocks[4, i], blocks[5, i]
        at, slack, found, top = 0, 0, False, 0
        for j in range(count):
            if not _meet(
                first, end, first_again, end_again, placed[2, j], placed[3, j], placed[4, j], placed[5, j]
            ):
                continue
            low = (top + alignment[i] - 1) // alignment[i] * alignment[i]
            gap = placed[0, j] - low - nbytes[i]
            if gap >= 0 and (not found or (best_fit and gap < slack)):
                at, slack, found = low, gap, True
                if not best_fit:
                    break
            top = max(top, placed[1, j])
        if not found:
            at = (top + alignment[i] - 1) // alignment[i] * alignment[i]
        offsets[i] = at
        if nbytes[i] == 0:
            continue
        if at + nbytes[i] > most_bytes:
            return offsets[:0]
        hole = count
        while hole > 0 and placed[0, hole - 1] > at:
            for row in range(6):
                placed[row, hole] = placed[row, hole - 1]
            hole -= 1
        placed[0, hole], placed[1, hole] = at, at + nbytes[i]
        placed[2, hole], placed[3, hole], placed[4, hole], placed[5, hole] = first, end, first_again, end_again
        count += 1
    return offsets


@compiled
def _fit_tightly(order: Ints, rows: Ints, meeting: Meeting) -> Ints:
    """What `_fit` does by best fit, several times as fast where blocks meet few others."""
    nbytes, alignment = rows[0], rows[1]
    offsets = np.full(len(order), NOWHERE)
    near = np.empty(len(order), dtype=np.int64)  # those there that a block meets, lowest first
    for i in order:
        count = 0
        for j in meeting.block[meeting.start[i] : meeting.start[i + 1]]:
            if offsets[j] == NOWHERE or nbytes[j] == 0:
                continue
            hole = count
            while hole > 0 and offsets[near[hole - 1]] > offsets[j]:
                near[hole] = near[hole - 1]
                hole -= 1
            near[hole] = j
            count += 1
        slack, top = UNLIMITED, 0
        for j in near[:count]:
            low = (top + alignment[i] - 1) // alignment[i] * alignment[i]
            gap = offsets[j] - low - nbytes[i]
            if 0 <= gap < slack:
                offsets[i], slack = low, gap
            top = max(top, offsets[j] + nbytes[j])
        if slack == UNLIMITED:
            offsets[i] = (top + alignment[i] - 1) // alignment[i] * alignment[i]
    return offsets
