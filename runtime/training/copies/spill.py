"""Holds the bytes of evicted storages: in RAM, pinned for a GPU, or in an unnamed file.

Slots have capacities of a few classes, so that storages of varying sizes use the same slots. Slots that are free beyond
a share of the peak are given back to the system.
"""

import ctypes
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np
import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import aligned
from cohabit.runtime.errors import MemoryExceeded, UnsupportedModel
from cohabit.runtime.stores.direct import open_direct, read_fully, write_fully
from cohabit.runtime.stores.pages import Bytes, anonymous_memory
from cohabit.runtime.stores.pinned import PinnedMemory
from cohabit.runtime.training.tracked import storage_address, storage_nbytes

_BLOCK_BYTES = 4096
_PIECE_BYTES = 4 << 20
"""Size of one read or write, and of each thread's aligned buffer: torch's storages may be unaligned."""


_SLAB_BYTES, _LEAST_PINNED_BYTES = 64 << 20, 512 << 10
"""Size of a piece of pinned memory for several slots, since pinning takes long, and of the least slot with its own."""
_CLASSES: Final = 8
"""Capacities between a power of two and the next: a slot is at most an eighth larger than what it holds."""
_PINNED_CLASSES: Final = 128
"""The same for pinned memory. Its capacities are multiples of as many bytes."""
_PINNED_SURPLUS: Final = 100
"""A free pinned slot may exceed the tensor that gets it by the tensor's size divided by this."""
_MOST_UNPINNED: Final = 8
"""How often free slots are unpinned, which waits for the device, before larger ones are used instead."""
_FREE_SHARE: Final = 4
"""Free slots may take the peak of the used ones divided by this."""
_PUNCH_HOLE: Final = 0x03
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE of fallocate(2)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class SpillSlot(Protocol):
    """Holds one storage's bytes. Two threads may use different slots at the same time."""

    capacity: int

    def save(self, storage: Any) -> None: ...

    def load(self, storage: Any) -> None: ...


def capacity_for(nbytes: int, classes: int = _CLASSES, block_bytes: int = _BLOCK_BYTES) -> int:
    """Return the least capacity of a slot that holds `nbytes`."""
    step = max(1 << (max(nbytes - 1, 1).bit_length() - 1), block_bytes * classes) // classes
    return aligned(nbytes, step)


Slot = TypeVar("Slot", bound=SpillSlot)


class SpillStore(Generic[Slot]):
    """Allocates slots, reuses released ones, and gives them to the system when many are free.

    The caller holds a lock.
    """

    frees = True
    """Whether the memory of one slot can be given back."""

    def __init__(self) -> None:
        self._free: dict[int, list[Slot]] = defaultdict(list)
        self.used_bytes = self.free_bytes = self._peak_bytes = 0

    def _capacity(self, nbytes: int) -> int:
        """Return the capacity of the slot to take."""
        return capacity_for(nbytes)

    def _make(self, capacity: int) -> Slot:
        raise NotImplementedError

    def _drop(self, slot: Slot) -> None:
        """Give a free slot's memory back to the system."""

    def take(self, nbytes: int) -> Slot:
        capacity = self._capacity(nbytes)
        free = self._free[capacity]
        if free:
            self.free_bytes -= capacity
            slot = free.pop()
        else:
            slot = self._make(capacity)
        self.used_bytes += capacity
        self._peak_bytes = max(self._peak_bytes, self.used_bytes)
        return slot

    def give_back(self, slot: Slot) -> None:
        """Release a slot that `take` returned."""
        self.used_bytes -= slot.capacity
        self.free_bytes += slot.capacity
        self._free[slot.capacity].append(slot)
        if not self.used_bytes:
            self._peak_bytes -= self._peak_bytes // _FREE_SHARE  # a peak of long ago is forgotten
        while self.frees and self.used_bytes + self.free_bytes > self._peak_bytes + self._peak_bytes // _FREE_SHARE:
            capacity = max(capacity for capacity, free in self._free.items() if free)
            self.free_bytes -= capacity
            self._drop(self._free[capacity].pop())

    def close(self) -> None:
        """Give memory back that only the system can reuse. All copies have ended; slots still hold their bytes."""


def bytes_of(storage: Any) -> torch.Tensor:
    """Return a storage's bytes as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _bytes_at(address: int, nbytes: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class _RamSlot:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._memory = np.frombuffer(anonymous_memory(capacity), np.uint8)

    def save(self, storage: Any) -> None:
        nbytes = storage_nbytes(storage)
        np.copyto(self._memory[:nbytes], _bytes_at(storage_address(storage), nbytes))  # releases the GIL

    def load(self, storage: Any) -> None:
        nbytes = storage_nbytes(storage)
        np.copyto(_bytes_at(storage_address(storage), nbytes), self._memory[:nbytes])


class RamSpill(SpillStore[_RamSlot]):
    """Keeps bytes in RAM. For a process on a CPU this saves no memory. A slot's memory goes with the object."""

    def _make(self, capacity: int) -> _RamSlot:
        return _RamSlot(capacity)


class _PinnedSlot:
    """Its copies are issued to the current stream, and run later."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._tensor = torch.from_numpy(memory)
        self.capacity = len(memory)

    def save(self, storage: Any) -> None:
        with torch._C._DisableTorchDispatch():
            self._tensor[: storage_nbytes(storage)].copy_(bytes_of(storage), non_blocking=True)

    def load(self, storage: Any) -> None:
        with torch._C._DisableTorchDispatch():
            bytes_of(storage).copy_(self._tensor[: storage_nbytes(storage)], non_blocking=True)


class PinnedSpill(SpillStore[_PinnedSlot]):
    """Keeps bytes of a GPU's memory in pinned host memory: 1.02 bytes for each at most, and one piece for small slots.

    If sizes vary from step to step, slots of up to the double are used. A quarter of the peak may be free.

    Free slots are unpinned only when more memory is to be pinned, because that waits for the device.
    """

    frees = False

    def __init__(self, pinned: PinnedMemory, drain: Callable[[], None]) -> None:
        """`pinned` serves nothing else. `drain` waits until the device has made all copies."""
        super().__init__()
        self._pinned, self._drain = pinned, drain
        self._slab = np.empty(0, np.uint8)
        self._unpinned = 0

    def _capacity(self, nbytes: int) -> int:
        exact = capacity_for(nbytes, _PINNED_CLASSES, _PINNED_CLASSES)
        if self._free[exact]:
            return exact
        most = 2 * nbytes if self._unpinned > _MOST_UNPINNED else nbytes + nbytes // _PINNED_SURPLUS
        return min((c for c, free in self._free.items() if free and exact < c <= most), default=exact)

    def _make(self, capacity: int) -> _PinnedSlot:
        """Return a new slot. Raises MemoryExceeded if no more memory may be pinned."""
        if self.free_bytes > self._peak_bytes // _FREE_SHARE:
            self._unpin_free()
        if capacity >= _LEAST_PINNED_BYTES:
            return _PinnedSlot(self._taken(capacity))
        if len(self._slab) < capacity:
            self._slab = self._taken(_SLAB_BYTES)
        memory, self._slab = self._slab[:capacity], self._slab[capacity:]
        return _PinnedSlot(memory)

    def _taken(self, nbytes: int) -> Bytes:
        if not self._pinned.fits(nbytes):
            self._unpin_free()
        try:
            return self._pinned.take(nbytes, "tensors that leave the GPU")
        except MemoryExceeded as error:
            raise MemoryExceeded(f"{error}, set store='file', or raise the budget") from error

    def _unpin_free(self) -> None:
        """Unpin the free slots that have memory of their own."""
        slots = [slot for c, free in self._free.items() if c >= _LEAST_PINNED_BYTES for slot in free]
        if not slots:
            return
        self._drain()
        self._unpinned += 1
        for slot in slots:
            self._free[slot.capacity].remove(slot)
            self.free_bytes -= slot.capacity
            self._pinned.release(slot.memory)

    def close(self) -> None:
        self._free.clear()
        self.free_bytes = 0
        self._slab = np.empty(0, np.uint8)
        self._pinned.close()


class _FileSlot:
    def __init__(self, file: "FileSpill", offset: int, capacity: int) -> None:
        self._file, self.offset, self.capacity = file, offset, capacity

    def save(self, storage: Any) -> None:
        piece, nbytes = self._file.piece(), storage_nbytes(storage)
        for start in range(0, nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, nbytes - start)]
            _copy_from(storage, start, part)
            write_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self.offset + start)

    def load(self, storage: Any) -> None:
        if os.getpid() != self._file.process_id:
            raise UnsupportedModel(
                "budget: a forked process reads a tensor that was out when it was forked, from a file in which its"
                " parent goes on writing; start it by 'spawn', or set store='ram'"
            )
        piece, nbytes = self._file.piece(), storage_nbytes(storage)
        for start in range(0, nbytes, _PIECE_BYTES):
            part = piece[: min(_PIECE_BYTES, nbytes - start)]
            read_fully(self._file.descriptor, piece[: aligned(len(part), _BLOCK_BYTES)], self.offset + start)
            _copy_to(storage, start, part)


def _copy_from(storage: Any, start: int, part: Bytes) -> None:
    """Copy a storage's bytes from `start` on, and wait until they are there."""
    if storage.device.type == "cpu":
        np.copyto(part, _bytes_at(storage_address(storage) + start, len(part)))
    else:
        with torch._C._DisableTorchDispatch():
            torch.from_numpy(part).copy_(bytes_of(storage)[start : start + len(part)])


def _copy_to(storage: Any, start: int, part: Bytes) -> None:
    if storage.device.type == "cpu":
        np.copyto(_bytes_at(storage_address(storage) + start, len(part)), part)
    else:
        with torch._C._DisableTorchDispatch():
            bytes_of(storage)[start : start + len(part)].copy_(torch.from_numpy(part))


class FileSpill(SpillStore[_FileSlot]):
    """Keeps bytes in a file, bypassing the page cache where the file system supports O_DIRECT.

    The file has no name, so it disappears however the process ends.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        handle, path = tempfile.mkstemp(dir=folder, prefix="cohabit-spill-")
        os.close(handle)
        self.descriptor = open_direct(Path(path), os.O_RDWR)
        os.unlink(path)
        weakref.finalize(self, os.close, self.descriptor)
        self.process_id = os.getpid()
        self._folder = folder
        self._end = 0
        self._holes: dict[int, list[int]] = defaultdict(list)
        """Offsets of dropped slots, by capacity. Their blocks are the file system's again."""
        self._buffers = threading.local()

    def _make(self, capacity: int) -> _FileSlot:
        """Return a new slot. Raises MemoryExceeded if the disk is full."""
        holes = self._holes[capacity]
        offset = holes.pop() if holes else self._end
        try:
            os.posix_fallocate(self.descriptor, offset, capacity)
        except OSError as error:
            raise MemoryExceeded(
                f"{self._folder}: no room for {format_bytes(self.used_bytes + capacity)} of tensors that leave"
                f" memory ({error.strerror}); free some of the disk, choose another folder, or raise the budget"
            ) from error
        self._end = max(self._end, offset + capacity)
        return _FileSlot(self, offset, capacity)

    def _drop(self, slot: _FileSlot) -> None:
        # A file system without holes keeps the blocks, and the slot is used again.
        _libc.fallocate(self.descriptor, _PUNCH_HOLE, slot.offset, slot.capacity)
        self._holes[slot.capacity].append(slot.offset)

    def piece(self) -> Bytes:
        """Return the calling thread's aligned buffer."""
        if not hasattr(self._buffers, "piece"):
            self._buffers.piece = np.frombuffer(anonymous_memory(_PIECE_BYTES), np.uint8)
        piece: Bytes = self._buffers.piece
        return piece
