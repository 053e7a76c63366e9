"""Slots: the memory of growing states, with a row for each sequence.

An execution reads a window of adjacent rows where they are. A row has address space for the longest state; its pages
take memory when they are first written, and return it when the row is released.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cohabit.runtime.stores.pages import anonymous_memory, release_pages
from cohabit.server.ipc.model import Array
from cohabit.server.scheduling.sequences import State


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence's row in the memory of every growing state."""

    block: "_Block"
    row: int
    length: int = 0
    """Number of written entries, including those of a request whose answer has not been written yet."""
    nbytes: int = 0
    """Bytes counted for the entries."""


class _Rows:
    """Rows of one growing state, each beginning at a page."""

    def __init__(self, shape: tuple[int, ...], axis: int, dtype: np.dtype[Any], rows: int) -> None:
        self.axis = axis
        """Axis of the entries, including the rows' own."""
        self.row_bytes = -(-math.prod(shape) * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._entry_bytes = math.prod(shape[axis:]) * dtype.itemsize
        self._runs = math.prod(shape[: axis - 1])
        memory = anonymous_memory(rows * self.row_bytes)
        with suppress(OSError):  # no huge pages on this system: one entry of each head would take 2 MiB
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        strides = np.ndarray(shape, dtype, memory).strides
        self.array: Array = np.ndarray((rows, *shape), dtype, memory, strides=(self.row_bytes, *strides))
        self._bytes = np.frombuffer(memory, np.uint8)

    def nbytes(self, length: int) -> int:
        """Return the bytes of the pages that a row of this length occupies."""
        pages = -(-length * self._entry_bytes // mmap.PAGESIZE)
        return min(self._runs * pages * mmap.PAGESIZE, self.row_bytes)

    def release(self, row: int) -> None:
        release_pages(self._bytes[row * self.row_bytes : (row + 1) * self.row_bytes])

    def entries(self, rows: slice, start: int, end: int) -> Array:
        """Return a view of entries of some rows."""
        return self.array[(rows, *[slice(None)] * (self.axis - 1), slice(start, end))]


@dataclass(slots=True, eq=False)
class _Block:
    states: tuple[_Rows, ...]
    slots: list[Slot | None] = field(default_factory=list)
    """By row."""

    def entries(self, rows: slice, start: int, end: int) -> list[Array]:
        return [rows_of.entries(rows, start, end) for rows_of in self.states]

    def release(self, row: int) -> None:
        self.slots[row] = None
        for rows_of in self.states:
            rows_of.release(row)


@dataclass(frozen=True, slots=True)
class Window:
    """Adjacent rows that hold the slots of an execution."""

    block: _Block
    start: int
    size: int


class Slots:
    """The slots of one load of a model, in blocks of as many rows as its largest batch has.

    `lock` guards which row belongs to which slot. Only the compute lane's thread takes and moves slots, and reads and
    writes entries; any thread releases slots.
    """

    def __init__(
        self,
        states: Sequence[State],
        most_length: int,
        batches: Sequence[int],
        lock: AbstractContextManager[Any],
        *,
        batched: bool,
    ) -> None:
        """`states` are the growing ones, `batches` the planned batch sizes, ascending."""
        self._most_length = most_length
        self._states = [(s.initial.shape[batched:], (s.axis or 0) + (not batched), s.initial.dtype) for s in states]
        self._batches = batches or (1,)
        self._lock = lock
        self._blocks: list[_Block] = []

    def nbytes(self, length: int) -> int:
        """Return the bytes of a slot with this number of entries."""
        block = self._blocks[0] if self._blocks else self._add_block()
        return sum(rows.nbytes(length) for rows in block.states)

    def take(self) -> Slot:
        """Return a free slot without entries: the first of all."""
        with self._lock:
            return self._take(lambda block, row: True)

    def release(self, slot: Slot) -> None:
        """Release a slot's memory. Its entries read as zeros from now on."""
        with self._lock:
            slot.block.release(slot.row)

    def is_held(self, slot: Slot) -> bool:
        """Whether a slot has not been released."""
        return slot.block.slots[slot.row] is slot

    def entries(self, slot: Slot, start: int, end: int) -> list[Array]:
        """Return views of entries, [1, ...] for each growing state."""
        return slot.block.entries(slice(slot.row, slot.row + 1), start, end)

    def window(self, slots: Sequence[Slot], is_spare: Callable[[Slot], bool]) -> Window:
        """Return the smallest window of a planned size that holds the slots.

        Moves slots to rows that are free, or that have spare slots. Other slots move only if there is no window
        without that.
        """
        sizes = [size for size in self._batches if size >= len(slots)] or [len(slots)]
        first = min(slots, key=lambda slot: slot.row)
        if all(slot.block is first.block and slot.row < first.row + sizes[0] for slot in slots):
            return Window(first.block, first.row, sizes[0])
        with self._lock:
            window, free, others = self._least_moves(slots, sizes, is_spare)
        rows = range(window.start, window.start + window.size)
        outside = [slot for slot in slots if slot.block is not window.block or slot.row not in rows]
        for slot, row in zip(outside, [*free, *others], strict=False):
            other = window.block.slots[row]
            if other is not None:
                with self._lock:
                    away = self._take(lambda block, row: block is not window.block or row not in rows)
                self._move(other, away.block, away.row)
            self._move(slot, window.block, row)
        return window

    def _least_moves(
        self, slots: Sequence[Slot], sizes: Sequence[int], is_spare: Callable[[Slot], bool]
    ) -> tuple[Window, list[int], list[int]]:
        """Return a window, its free rows, and its rows whose slots may be moved away."""
        blocks = {id(slot.block): slot.block for slot in slots}.values()
        for only_spare in (True, False):
            for size in sizes:
                found: list[tuple[int, Window, list[int], list[int]]] = []
                for block in blocks:
                    for start in range(len(block.slots)):
                        rows = range(start, min(start + size, len(block.slots)))
                        held = [(row, other) for row in rows if (other := block.slots[row]) is not None]
                        free = [row for row in rows if block.slots[row] is None]
                        others = [r for r, o in held if o not in slots and (not only_spare or is_spare(o))]
                        outside = len(slots) - sum(other in slots for _, other in held)
                        if outside <= len(free) + len(others):
                            moves = outside + max(outside - len(free), 0)
                            found.append((moves, Window(block, start, size), free, others))
                if found:
                    return min(found, key=lambda one: one[0])[1:]
        raise AssertionError("a block has as many rows as the largest batch")

    def _take(self, suits: Callable[[_Block, int], bool]) -> Slot:
        """Return the first free slot that suits, in a new block if there is none."""
        free = (
            (block, row)
            for block in self._blocks
            for row, slot in enumerate(block.slots)
            if slot is None and suits(block, row)
        )
        block, row = next(free, None) or (self._add_block(), 0)
        slot = block.slots[row] = Slot(block, row)
        return slot

    def _add_block(self) -> _Block:
        """Add a block. Windows may extend beyond its last slot, over rows that stay zero."""
        rows = self._batches[-1]
        states = tuple(
            _Rows(tuple(size or self._most_length for size in shape), axis, dtype, 2 * rows - 1)
            for shape, axis, dtype in self._states
        )
        block = _Block(states, [None] * rows)
        self._blocks.append(block)
        return block

    def _move(self, slot: Slot, block: _Block, row: int) -> None:
        """Move a slot to another row, unless another thread releases it meanwhile. Copies without the lock."""
        with self._lock:
            block.slots[row] = slot
        here, there = slice(slot.row, slot.row + 1), slice(row, row + 1)
        before, after = slot.block.entries(here, 0, slot.length), block.entries(there, 0, slot.length)
        for source, target in zip(before, after, strict=True):
            target[...] = source
        with self._lock:
            old, old_row = slot.block, slot.row
            if old.slots[old_row] is slot:
                slot.block, slot.row = block, row
                old.release(old_row)
            else:
                block.release(row)
