"""Byte offsets for blocks with known lifespans: blocks that are alive at the same time do not overlap.

This is dynamic storage allocation, which is NP-hard. Greedy orders with best fit come within a few per cent of the
peak of live bytes, the lower bound of every placement."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph
from cohabit.planner.lifetimes import Lifespan, lifespans, live_bytes

UNLIMITED: Final = 1 << 62
"""More bytes than any layout needs."""


@dataclass(frozen=True, slots=True)
class Block:
    """Contiguous bytes needed during `span`."""

    nbytes: int
    alignment: int
    span: Lifespan
    again: Lifespan | None = None
    """A later span during which the same bytes are needed again."""


@dataclass(frozen=True, slots=True)
class Layout:
    """`offsets[i]` belongs to block i; all blocks end at or below `peak_bytes`."""

    offsets: tuple[int, ...]
    peak_bytes: int


def place(blocks: Sequence[Block], enough_bytes: int = 0) -> Layout:
    """Return the smallest of the greedy layouts, or the first that needs at most `enough_bytes`."""
    best: Layout | None = None
    floor = max(most_live_bytes(blocks), enough_bytes)
    for layout in layouts(blocks):
        if best is None or layout.peak_bytes < best.peak_bytes:
            best = layout
        if best.peak_bytes <= floor:
            break
    assert best is not None
    return best


def layouts(blocks: Sequence[Block], most_bytes: int = UNLIMITED) -> Iterator[Layout]:
    """Yield at least one layout by greedy rules; with `most_bytes`, only layouts within it."""
    if not blocks:
        yield Layout((), 0)
        return
    rows = arrays_of(blocks)
    for order in _orders(*rows[:4]):
        for best_fit in (True, False):
            offsets = _fit(order, rows, best_fit, most_bytes)
            if len(offsets):
                yield Layout(tuple(offsets.tolist()), int((offsets + rows[0]).max()))


def most_live_bytes(blocks: Sequence[Block]) -> int:
    """Return the peak of live bytes: a lower bound on every layout's peak."""
    pairs = [(span, b.nbytes) for b in blocks for span in (b.span, b.again) if span is not None]
    return max(live_bytes(pairs, max((span.end for span, _ in pairs), default=0)), default=0)


def activation_tops(graph: Graph) -> tuple[int, ...]:
    """Place inputs, activations and scratch for the graph's order of ops. Returns the highest end of each op's blocks.

    An allocator that places them one after the other may need more than the peak of live bytes; these sizes certainly
    suffice. All blocks are rounded up to their alignment, as plans count them.
    """
    tensors = [
        Block(t.aligned_bytes, t.alignment, span)
        for t, span in zip(graph.tensors, lifespans(graph), strict=True)
        if t.kind != "parameter" and span is not None
    ]
    scratch = [
        Block(op.aligned_scratch_bytes, SCRATCH_ALIGNMENT, Lifespan(k, k + 1))
        for k, op in enumerate(graph.ops)
        if op.scratch_bytes
    ]
    blocks = [*tensors, *scratch]
    tops = np.zeros(max(len(graph.ops), 1), np.int64)
    for block, offset in zip(blocks, place(blocks).offsets, strict=True):
        if block.nbytes:
            own = tops[block.span.first : block.span.end]
            np.maximum(own, offset + block.nbytes, out=own)
    return tuple(tops.tolist())


def arrays_of(blocks: Sequence[Block]) -> Ints:
    """Return bytes, alignment, and first and end of both spans; shape [6, blocks]. Most second spans are empty."""
    rows = [(b.nbytes, b.alignment, b.span.first, b.span.end, *_again(b)) for b in blocks]
    return np.array(rows, dtype=np.int64).T.copy()


def _again(block: Block) -> tuple[int, int]:
    return (block.again.first, block.again.end) if block.again is not None else (block.span.end, block.span.end)


@compiled
def _meet(
    first: int, end: int, first_again: int, end_again: int, first_2: int, end_2: int, again_2: int, end_again_2: int
) -> bool:
    """Whether two blocks are ever needed at the same time. Empty spans never meet."""
    if first < end_2 and first_2 < end:
        return True
    if first_again < end_again and (
        (first_again < end_2 and first_2 < end_again)
        or (again_2 < end_again_2 and first_again < end_again_2 and again_2 < end_again)
    ):
        return True
    return bool(again_2 < end_again_2 and first < end_again_2 and again_2 < end)


def _orders(nbytes: Ints, alignment: Ints, first: Ints, end: Ints) -> list[Ints]:
    """Return the orders to try: largest first, largest area first, longest first, earliest first, coarsest first."""
    return [
        np.lexsort((first, -nbytes)),
        np.lexsort((first, -nbytes * (end - first))),
        np.lexsort((-nbytes, first - end)),
        np.lexsort((-nbytes, first)),
        np.lexsort((-nbytes, -alignment)),
    ]


@compiled
def _fit(order: Ints, blocks: Ints, best_fit: bool, most_bytes: int) -> Ints:
    """Place blocks one by one in the tightest (or the lowest) gap between placed blocks.

    `blocks` is from `arrays_of`. Returns no offsets if a block would end above `most_bytes`.
    """
    offsets = np.zeros(len(order), dtype=np.int64)
    nbytes, alignment = blocks[0], blocks[1]
    # Placed blocks, lowest first; rows are offset, end and the times of both spans.
    placed = np.empty((6, len(order)), dtype=np.int64)
    count = 0
    for i in order:
        first, end, first_again, end_again = blocks[2, i], blocks[3, i], blocks[4, i], blocks[5, i]
        at, slack, found, top = 0, 0, False, 0
        # The gaps between blocks alive at the same time, from the lowest up.
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
        # Insert the block by its offset.
        hole = count
        while hole > 0 and placed[0, hole - 1] > at:
            for row in range(6):
                placed[row, hole] = placed[row, hole - 1]
            hole -= 1
        placed[0, hole], placed[1, hole] = at, at + nbytes[i]
        placed[2, hole], placed[3, hole], placed[4, hole], placed[5, hole] = first, end, first_again, end_again
        count += 1
    return offsets
