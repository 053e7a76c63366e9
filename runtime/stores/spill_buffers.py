"""Spill buffers: host memory, or an unnamed file, for offloaded activations.

The file is read and written with O_DIRECT if its file system supports it, so that the page cache does not keep spilled
bytes in memory. O_DIRECT needs aligned memory, and activations need not be aligned, so their bytes pass through a small
aligned buffer.
"""

import ctypes
import os
import tempfile
import weakref
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from cohabit.planner.errors import format_bytes
from cohabit.planner.graph import aligned
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.memory import SpillBuffer
from cohabit.runtime.stores.direct import open_direct, read_fully, write_fully
from cohabit.runtime.stores.pages import Bytes, anonymous_memory, release_pages

BUFFER_BYTES = 1 << 20
"""Size of one read or write; a program has two such aligned buffers, one per direction."""


def ram_spill_buffers(sizes: Sequence[int]) -> list[SpillBuffer]:
    """Return buffers of these sizes in one region of memory."""
    starts = _starts(sizes)
    region = np.frombuffer(anonymous_memory(starts[-1]), np.uint8)
    return [RamSpillBuffer(region[at : at + nbytes]) for at, nbytes in zip(starts, sizes, strict=False)]


def file_spill_buffers(folder: Path, sizes: Sequence[int]) -> list[SpillBuffer]:
    """Return buffers of these sizes in one file in a folder. Raises MemoryExceeded if the disk is full."""
    starts = _starts(sizes)
    file = _ScratchFile(folder, starts[-1])
    return [_FileSpillBuffer(file, at) for at in starts[:-1]]


def bytes_of(flat: torch.Tensor) -> Bytes:
    """Return a view of a tensor's bytes, valid while the tensor exists.

    `Tensor.numpy` would forbid resizing the storage.
    """
    return np.ctypeslib.as_array((ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr()))


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return the start of each buffer, a multiple of the block size, followed by the end of the last one."""
    return list(accumulate((aligned(n, BLOCK_BYTES) for n in sizes), initial=0))


class RamSpillBuffer:
    pinned: torch.Tensor | None = None

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def save(self, source: torch.Tensor) -> None:
        np.copyto(self._memory[: source.nbytes], bytes_of(source))

    def load(self, destination: torch.Tensor) -> None:
        np.copyto(bytes_of(destination), self._memory[: destination.nbytes])

    def close(self) -> None:
        release_pages(self._memory)


class _ScratchFile:
    """An unnamed file, which the system deletes when this process ends, even by a crash."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        handle, path = tempfile.mkstemp(dir=folder, prefix="activations-")
        self.fd = open_direct(Path(path), os.O_RDWR)
        weakref.finalize(self, os.close, self.fd)
        os.close(handle)
        os.unlink(path)
        try:
            os.posix_fallocate(self.fd, 0, max(nbytes, 1))
        except OSError as error:
            raise MemoryExceeded(
                f"{folder}: no space for {format_bytes(nbytes)} of offloaded activations ({error.strerror}); free disk"
                " space, or give the model more memory"
            ) from error
        self.outgoing = np.frombuffer(anonymous_memory(BUFFER_BYTES), np.uint8)
        self.incoming = np.frombuffer(anonymous_memory(BUFFER_BYTES), np.uint8)


class _FileSpillBuffer:
    """Saved by the swap-out lane's thread, loaded by the swap-in lane's."""

    pinned = None

    def __init__(self, file: _ScratchFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def save(self, source: torch.Tensor) -> None:
        bytes_, buffer = bytes_of(source), self._file.outgoing
        for start in range(0, len(bytes_), BUFFER_BYTES):
            part = bytes_[start : start + BUFFER_BYTES]
            np.copyto(buffer[: len(part)], part)
            write_fully(self._file.fd, buffer[: aligned(len(part), BLOCK_BYTES)], self._offset + start)

    def load(self, destination: torch.Tensor) -> None:
        bytes_, buffer = bytes_of(destination), self._file.incoming
        for start in range(0, len(bytes_), BUFFER_BYTES):
            part = bytes_[start : start + BUFFER_BYTES]
            read_fully(self._file.fd, buffer[: aligned(len(part), BLOCK_BYTES)], self._offset + start)
            np.copyto(part, buffer[: len(part)])

    def close(self) -> None:
        """Do nothing: the file's blocks are released with the last buffer."""
