"""Memory pools of torch's allocator with segments from given bytes, by two native callbacks made in Python.

The callbacks run under the allocator's lock and take the interpreter's: a thread that holds the interpreter and frees
a CUDA tensor while another one allocates in a pool would wait for ever. So only the thread that owns the device may
hold CUDA tensors of torch's allocator. Once a pool has its segments, nothing is called back any more.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from planner.free_list import FreeList

_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class CarvedPool:
    """A `torch.cuda.MemPool` over a range of device memory. Tensors belong to the stream that they were made on."""

    def __init__(self, memory: torch.Tensor, large_bytes: int) -> None:
        """Seed the pool with one large segment, which must fit, for tensors of the current stream."""
        self._memory = memory
        self._free = FreeList(memory.data_ptr(), memory.nbytes)
        self.refused_bytes: int | None = None
        """The size of the last segment that did not fit."""
        # Torch keeps the addresses, not the objects: they live as long as the pool.
        self._callbacks = (_Allocate(self._take), _Free(self._release))
        take, release = (ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in self._callbacks)
        self._allocator = torch._C._cuda_customAllocator(take, release)
        self._pool: Any = torch.cuda.MemPool(self._allocator)
        if large_bytes:
            with self.allocating():
                torch.empty(large_bytes, dtype=torch.uint8, device=memory.device)
        assert self.refused_bytes is None

    @property
    def id(self) -> tuple[int, int]:
        assert self._pool is not None
        own: tuple[int, int] = self._pool.id
        return own

    @property
    def held_bytes(self) -> int:
        assert self._pool is not None
        blocks = (block for segment in self._pool.snapshot() for block in segment["blocks"])
        return sum(int(block["size"]) for block in blocks if block["state"] == "active_allocated")

    @contextmanager
    def allocating(self) -> Iterator[None]:
        assert self._pool is not None
        with torch.cuda.use_mem_pool(self._pool):
            yield

    def close(self) -> None:
        """Release the segments. No tensor or graph of the pool may be left."""
        self._pool = None

    def _take(self, nbytes: int, device: int, stream: int | None) -> int | None:
        address = self._free.take(nbytes)
        if address is None:
            self.refused_bytes = nbytes
        return address

    def _release(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._free.release(address, nbytes)
