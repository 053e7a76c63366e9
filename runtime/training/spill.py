"""Holds the bytes of evicted storages: in RAM, pinned for a GPU, or in an unnamed file."""

import ctypes
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch._C import StorageBase

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import aligned
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.stores.direct import open_direct, read_fully, write_fully
from cohabit.runtime.stores.pages import Bytes, anonymous_memory

_BLOCK_BYTES = 4096
_PIECE_BYTES = 4 << 20
"""Size of one read or write, and of each thread's aligned buffer: torch's storages may be unaligned."""


_SLAB_BYTES = 64 << 20
"""Size of the pieces in which host memory is pinned, which takes long."""

_address: Callable[[Any], int] = StorageBase.data_ptr  # type: ignore[attr-defined]
"""Torch's original: `outside.py` replaces this method of `UntypedStorage`."""


class SpillSlot(Protocol):
    """Holds one storage's bytes. Two threads may use different slots at the same time."""

    def save(self, storage: Any) -> None: ...

    def load(self, storage: Any) -> None: ...


class SpillStore(Protocol):
    """Allocates slots, and reuses released ones for storages of the same size. The caller holds a lock."""

    def take(self, nbytes: int) -> SpillSlot: ...

    def give_back(self, slot: SpillSlot, nbytes: int) -> None: ...


def bytes_of(storage: Any) -> torch.Tensor:
    """Return a storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _RamSlot:
    def __init__(self, nbytes: int) -> None:
        self._memory = np.frombuffer(anonymous_memory(nbytes), np.uint8)[:nbytes]

    def save(self, storage: Any) -> None:
        np.copyto(self._memory, _bytes_at(_address(storage), len(self._memory)))  # releases the GIL

    def load(self, storage: Any) -> None:
        np.copyto(_bytes_at(_address(storage), len(self._memory)), self._memory)


class RamSpill:
    """Keeps bytes in RAM. For a process on a CPU this saves no memory."""

    def __init__(self) -> None:
        self._free: dict[int, list[SpillSlot]] = defaultdict(list)

    def take(self, nbytes: int) -> SpillSlot:
        free = self._free[nbytes]
        return free.pop() if free else _RamSlot(nbytes)

    def give_back(self, slot: SpillSlot, nbytes: int) -> None:
        self._free[nbytes].append(slot)


class _PinnedSlot:
    """Its copies are issued to the current stream, and run later."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    def save(self, storage: Any) -> None:
        with torch._C._DisableTorchDispatch():
            self._memory.copy_(bytes_of(storage), non_blocking=True)

    def load(self, storage: Any) -> None:
        with torch._C._DisableTorchDispatch():
            bytes_of(storage).copy_(self._memory, non_blocking=True)


class PinnedSpill:
    """Keeps bytes of a GPU's memory in pinned host memory, which is taken in large pieces."""

    def __init__(self) -> None:
        self._free: dict[int, list[SpillSlot]] = defaultdict(list)
        self._slab = self._pinned(0)

    def take(self, nbytes: int) -> SpillSlot:
        """Return a slot. Raises MemoryExceeded if the host has no memory to pin."""
        free = self._free[nbytes]
        if free:
            return free.pop()
        if len(self._slab) < nbytes:
            self._slab = self._pinned(max(nbytes, _SLAB_BYTES))
        memory, self._slab = self._slab[:nbytes], self._slab[aligned(nbytes, _BLOCK_BYTES) :]
        return _PinnedSlot(memory)

    def give_back(self, slot: SpillSlot, nbytes: int) -> None:
        self._free[nbytes].append(slot)

    @staticmethod
    def _pinned(nbytes: int) -> torch.Tensor:
        try:
            with torch._C._DisableTorchDispatch():
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=nbytes > 0)
        except RuntimeError as error:
            raise MemoryExceeded(
                f"the host has no {format_bytes(nbytes)} to pin for tensors that leave the GPU"
                f" ({str(error).splitlines()[0]}); set store='file', or raise the budget"
            ) from error


class _FileSlot:
    def __init__(self, file: "FileSpill", offset: int, nbytes: int) -> None:
        self._file, self._offset, self._nbytes = file, offset, nbytes

    def save(self, storage: Any) -> None:
        piece = self._file.piece()
        for start in range(0, self._nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, self._nbytes - start)]
            _copy_from(storage, start, part)
            write_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self._offset + start)

    def load(self, storage: Any) -> None:
        if os.getpid() != self._file.process_id:
            raise UnsupportedModel(
                "budget: a forked process reads a tensor that was out when it was forked, from a file in which its"
                " parent goes on writing; start it by 'spawn', or set store='ram'"
            )
        piece = self._file.piece()
        for start in range(0, self._nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, self._nbytes - start)]
            read_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self._offset + start)
            _copy_to(storage, start, part)


def _copy_from(storage: Any, start: int, part: Bytes) -> None:
    """Copy a storage's bytes from `start` on, and wait until they are there."""
    if storage.device.type == "cpu":
        np.copyto(part, _bytes_at(_address(storage) + start, len(part)))
    else:
        with torch._C._DisableTorchDispatch():
            torch.from_numpy(part).copy_(bytes_of(storage)[start : start + len(part)])


def _copy_to(storage: Any, start: int, part: Bytes) -> None:
    if storage.device.type == "cpu":
        np.copyto(_bytes_at(_address(storage) + start, len(part)), part)
    else:
        with torch._C._DisableTorchDispatch():
            bytes_of(storage)[start : start + len(part)].copy_(torch.from_numpy(part))


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
        self.process_id = os.getpid()
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
