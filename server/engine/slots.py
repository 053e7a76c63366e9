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
class StateSlot:
    """A sequence's row in the memory of every growing state."""

    block: int
    """Index of the block that has the row. A reference would be part of a cycle, which keeps memory after an unload."""
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


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Block:
    states: tuple[_Rows, ...]
    slots: list[StateSlot | None] = field(default_factory=list)
    """By row."""

    def entries(self, rows: slice, start: int, end: int) -> list[Array]:
        return [rows_of.entries(rows, start, end) for rows_of in self.states]

    def release(self, row: int) -> None:
        self.slots[row] = None
        for rows_of in self.states:
            rows_of.release(row)


@dataclass(frozen=True, slots=True)
class SlotWindow:
    """Adjacent rows that hold the slots of an execution."""

    block: int
    start: int
    size: int

    def has(self, slot: StateSlot) -> bool:
        return slot.block == self.block and self.start <= slot.row < self.start + self.size


class StateSlots:
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
        if not self._blocks:
            self._add_block()
        return sum(rows.nbytes(length) for rows in self._blocks[0].states)

    def take(self) -> StateSlot:
        """Return a free slot without entries: the first of all."""
        with self._lock:
            return self._take(lambda slot: True)

    def release(self, slot: StateSlot) -> None:
        """Release a slot's memory. Its entries read as zeros from now on."""
        with self._lock:
            self._blocks[slot.block].release(slot.row)

    def is_held(self, slot: StateSlot) -> bool:
        """Whether a slot has not been released."""
        return self._blocks[slot.block].slots[slot.row] is slot

    def entries(self, slot: StateSlot, start: int, end: int) -> list[Array]:
        """Return views of entries, [1, ...] for each growing state."""
        return self._blocks[slot.block].entries(slice(slot.row, slot.row + 1), start, end)

    def entries_in(self, window: SlotWindow, length: int) -> list[Array]:
        """Return views of the first entries of a window's rows, for each growing state."""
        return self._blocks[window.block].entries(slice(window.start, window.start + window.size), 0, length)

    def window(self, slots: Sequence[StateSlot], is_spare: Callable[[StateSlot], bool]) -> SlotWindow:
        """Return the smallest window of a planned size that holds the slots.

        Moves slots to rows that are free, or that have spare slots. Other slots move only if there is no window
        without that.
        """
        sizes = [size for size in self._batches if size >= len(slots)] or [len(slots)]
        first = min(slots, key=lambda slot: slot.row)
        window = SlotWindow(first.block, first.row, sizes[0])
        if all(map(window.has, slots)):
            return window
        with self._lock:
            window, rows = self._least_moves(slots, sizes, is_spare)
        outside = [slot for slot in slots if not window.has(slot)]
        for slot, row in zip(outside, rows, strict=False):
            other = self._blocks[window.block].slots[row]
            if other is not None:
                with self._lock:
                    away = self._take(lambda slot: not window.has(slot))
                self._move(other, away.block, away.row)
            self._move(slot, window.block, row)
        return window

    def _least_moves(
        self, slots: Sequence[StateSlot], sizes: Sequence[int], is_spare: Callable[[StateSlot], bool]
    ) -> tuple[SlotWindow, list[int]]:
        """Return a window, and its rows for slots outside of it: free ones, then those whose slots may be moved."""
        for only_spare in (True, False):
            for size in sizes:
                found: list[tuple[int, SlotWindow, list[int]]] = []
                for block in {slot.block for slot in slots}:
                    held = self._blocks[block].slots
                    for start in range(len(held)):
                        window = SlotWindow(block, start, size)
                        rows = {row: held[row] for row in range(start, min(start + size, len(held)))}
                        free = [row for row, other in rows.items() if other is None]
                        others = [
                            row
                            for row, other in rows.items()
                            if other is not None and other not in slots and (not only_spare or is_spare(other))
                        ]
                        outside = sum(not window.has(slot) for slot in slots)
                        if outside <= len(free) + len(others):
                            moves = outside + max(outside - len(free), 0)
                            found.append((moves, window, [*free, *others]))
                if found:
                    return min(found, key=lambda one: one[0])[1:]
        raise AssertionError("a block has as many rows as the largest batch")

    def _take(self, suits: Callable[[StateSlot], bool]) -> StateSlot:
        """Return the first free slot that suits, in a new block if there is none."""
        free = (
            slot
            for block, each in enumerate(self._blocks)
            for row, held in enumerate(each.slots)
            if held is None and suits(slot := StateSlot(block, row))
        )
        slot = next(free, None) or StateSlot(self._add_block(), 0)
        self._blocks[slot.block].slots[slot.row] = slot
        return slot

    def _add_block(self) -> int:
        """Add a block. Windows may extend beyond its last slot, over rows that stay zero."""
        rows = self._batches[-1]
        states = tuple(
            _Rows(tuple(size or self._most_length for size in shape), axis, dtype, 2 * rows - 1)
            for shape, axis, dtype in self._states
        )
        self._blocks.append(_Block(states, [None] * rows))
        return len(self._blocks) - 1

    def _move(self, slot: StateSlot, block: int, row: int) -> None:
        """Move a slot to another row, unless another thread releases it meanwhile. Copies without the lock."""
        target, source = self._blocks[block], self._blocks[slot.block]
        with self._lock:
            target.slots[row] = slot
        here, there = slice(slot.row, slot.row + 1), slice(row, row + 1)
        for before, after in zip(
            source.entries(here, 0, slot.length), target.entries(there, 0, slot.length), strict=True
        ):
            after[...] = before
        with self._lock:
            if source.slots[slot.row] is slot:
                source.release(slot.row)
                slot.block, slot.row = block, row
            else:
                target.release(row)
