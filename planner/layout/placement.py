"""Byte offsets for blocks with known lifespans: blocks that are alive at the same time do not overlap.

This is dynamic storage allocation, which is NP-hard. Greedy orders with best fit come within a few per cent of the
peak of live bytes, the lower bound of every placement."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from cohabit.planner.arrays import Ints
from cohabit.planner.compiled import compiled
from cohabit.planner.graph import SCRATCH_ALIGNMENT, Graph
from cohabit.planner.lifetimes import Lifespan, lifespans, live_bytes


@dataclass(frozen=True, slots=True)
class Block:
    """Contiguous bytes needed during `span`."""

    nbytes: int
    alignment: int
    span: Lifespan


@dataclass(frozen=True, slots=True)
class Layout:
    """`offsets[i]` belongs to block i; all blocks end at or below `peak_bytes`."""

    offsets: tuple[int, ...]
    peak_bytes: int


def place(blocks: Sequence[Block], enough_bytes: int = 0) -> Layout:
    """Return the smallest of the greedy layouts, or the first that needs at most `enough_bytes`."""
    if not blocks:
        return Layout((), 0)
    best: Layout | None = None
    floor = max(most_live_bytes(blocks), enough_bytes)
    rows = np.array([(b.nbytes, b.alignment, b.span.first, b.span.end) for b in blocks], dtype=np.int64).T.copy()
    nbytes, alignment, first, end = rows
    for order, best_fit in product(_orders(nbytes, alignment, first, end), (True, False)):
        offsets = _fit(order, rows, best_fit)
        peak_bytes = int((offsets + nbytes).max())
        if best is None or peak_bytes < best.peak_bytes:
            best = Layout(tuple(offsets.tolist()), peak_bytes)
        if best.peak_bytes <= floor:
            break
    assert best is not None
    return best


def most_live_bytes(blocks: Sequence[Block]) -> int:
    """Return the peak of live bytes: a lower bound on every layout's peak."""
    end = max((b.span.end for b in blocks), default=0)
    return max(live_bytes([(b.span, b.nbytes) for b in blocks], end), default=0)


def activation_pool_bytes(graph: Graph) -> int:
    """Return the bytes that inputs, activations and scratch take if they are placed for the graph's order of ops.

    An allocator that places them one after the other may need more than the peak of live bytes; this size certainly
    suffices. All blocks are rounded up to their alignment, as plans count them.
    """
    tensors = [
        Block(t.aligned_bytes, t.alignment, span)
        for t, span in zip(graph.tensors, lifespans(graph), strict=True)
        if t.kind != "parameter" and t.nbytes and span is not None
    ]
    scratch = [
        Block(op.aligned_scratch_bytes, SCRATCH_ALIGNMENT, Lifespan(k, k + 1))
        for k, op in enumerate(graph.ops)
        if op.scratch_bytes
    ]
    return place([*tensors, *scratch]).peak_bytes


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
def _fit(order: Ints, blocks: Ints, best_fit: bool) -> Ints:
    """Place blocks one by one in the tightest (or the lowest) gap between placed blocks.

    `blocks` has their bytes, alignment, first and end, [4, blocks].
    """
    offsets = np.zeros(len(order), dtype=np.int64)
    nbytes, alignment = blocks[0], blocks[1]
    # Placed blocks, lowest first; rows are offset, end, and first and end of the span.
    placed = np.empty((4, len(order)), dtype=np.int64)
    count = 0
    for i in order:
        first, end = blocks[2, i], blocks[3, i]
        at, slack, found, top = 0, 0, False, 0
        # The gaps between blocks alive at the same time, from the lowest up.
        for j in range(count):
            if first >= placed[3, j] or placed[2, j] >= end:
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
        # Insert the block by its offset.
        hole = count
        while hole > 0 and placed[0, hole - 1] > at:
            for row in range(4):
                placed[row, hole] = placed[row, hole - 1]
            hole -= 1
        placed[0, hole], placed[1, hole] = at, at + nbytes[i]
        placed[2, hole], placed[3, hole] = first, end
        count += 1
    return offsets
