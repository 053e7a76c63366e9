"""Holds the bytes of evicted storages: in RAM, or in an unnamed file."""

import ctypes
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Protocol

import numpy as np

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import aligned
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.stores.direct import open_direct, read_fully, write_fully
from cohabit.runtime.stores.pages import Bytes, anonymous_memory

_BLOCK_BYTES = 4096
_PIECE_BYTES = 4 << 20
"""Size of one read or write, and of each thread's aligned buffer: torch's storages may be unaligned."""


class SpillSlot(Protocol):
    """Holds one storage's bytes. Two threads may use different slots at the same time."""

    def save(self, address: int) -> None: ...

    def load(self, address: int) -> None: ...


class SpillStore(Protocol):
    """Allocates slots, and reuses released ones for storages of the same size. The caller holds a lock."""

    def take(self, nbytes: int) -> SpillSlot: ...

    def give_back(self, slot: SpillSlot, nbytes: int) -> None: ...


def bytes_at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _RamSlot:
    def __init__(self, nbytes: int) -> None:
        self._memory = np.frombuffer(anonymous_memory(nbytes), np.uint8)[:nbytes]

    def save(self, address: int) -> None:
        np.copyto(self._memory, bytes_at(address, len(self._memory)))  # releases the GIL

    def load(self, address: int) -> None:
        np.copyto(bytes_at(address, len(self._memory)), self._memory)


class RamSpill:
    """Keeps bytes in RAM, as pinned memory does for a GPU. For a process on a CPU this saves no memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[SpillSlot]] = defaultdict(list)

    def take(self, nbytes: int) -> SpillSlot:
        free = self._free[nbytes]
        return free.pop() if free else _RamSlot(nbytes)

    def give_back(self, slot: SpillSlot, nbytes: int) -> None:
        self._free[nbytes].append(slot)


class _FileSlot:
    def __init__(self, file: "FileSpill", offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes = file, offset, nbytes

    def save(self, address: int) -> None:
        piece = self._file.piece()
        source = bytes_at(address, self._nbytes)
        for start in range(0, self._nbytes, _PIECE_BYTES):
            part = source[start : start + _PIECE_BYTES]
            np.copyto(piece[: len(part)], part)
            write_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self._offset + start)

    def load(self, address: int) -> None:
        piece = self._file.piece()
        destination = bytes_at(address, self._nbytes)
        for start in range(0, self._nbytes, _PIECE_BYTES):
            part = destination[start : start + _PIECE_BYTES]
            read_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self._offset + start)
            np.copyto(part, piece[: len(part)])


class FileSpill:
    """Keeps bytes in a file, bypassing the page cache where the file system supports O_DIRECT.

    The file has no name, so it disappears however the process ends.
    """

    def __init__(self, folder: Path) -> None:
        handle, path = tempfile.mkstemp(dir=folder, prefix="cohabit-spill-")
        os.close(handle)
        self.descriptor = open_direct(Path(path), os.O_RDWR)
        os.unlink(path)
        weakref.finalize(self, os.close, self.descriptor)
        self._folder = folder
        self._end = 0
        self._free: dict[int, list[SpillSlot]] = defaultdict(list)
        self._buffers = threading.local()

    def take(self, nbytes: int) -> SpillSlot:
        """Return a slot. Raises MemoryExceeded if the disk is full."""
        free = self._free[nbytes]
        if free:
            return free.pop()
        length = aligned(nbytes, _BLOCK_BYTES)
        try:
            os.posix_fallocate(self.descriptor, self._end, length)
        except OSError as error:
            raise MemoryExceeded(
                f"{self._folder}: no room for {format_bytes(self._end + length)} of tensors that leave memory"
                f" ({error.strerror}); free some of the disk, choose another folder, or raise the budget"
            ) from error
        slot = _FileSlot(self, self._end, nbytes)
        self._end += length
        return slot

    def give_back(self, slot: SpillSlot, nbytes: int) -> None:
        self._free[nbytes].append(slot)

    def piece(self) -> Bytes:
        """Return the calling thread's aligned buffer."""
        if not hasattr(self._buffers, "piece"):
            self._buffers.piece = np.frombuffer(anonymous_memory(_PIECE_BYTES), np.uint8)
        piece: Bytes = self._buffers.piece
        return piece
