"""Memory pools of torch's allocator with segments from given bytes, by two native callbacks made in Python.

The callbacks run under the allocator's lock and take the interpreter's: a thread that holds the interpreter and frees
a CUDA tensor while another one allocates in a pool would wait for ever. So only the thread that owns the device may
hold CUDA tensors of torch's allocator. Once a pool has its segments, nothing is called back any more.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from cohabit.planner.free_list import FreeList

_cuda: Any = torch.cuda  # in large part without types
_ROUNDED_BYTES = 512
"""Torch's allocator rounds sizes to multiples of this."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_callbacks: dict["_Carver", tuple[object, object]] = {}
"""Of every carver whose segments torch has: it calls them when it releases the last ones, perhaps after the pool."""
_open: "WeakSet[CarvedPool]" = WeakSet()


def close_open_pools() -> None:
    """Close every pool, at the end of the process: torch must not release segments when the callbacks are gone."""
    for pool in list(_open):
        pool.close()


class _Carver:
    """Gives out segments of a range. Callbacks are made of it, and not of the pool, which would keep itself alive."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._free = FreeList(memory.data_ptr(), memory.nbytes)
        self.refused_bytes: int | None = None
        self.segments = 0

    def has(self, address: int) -> bool:
        return 0 <= address - self._memory.data_ptr() < self._memory.nbytes

    def take(self, nbytes: int, device: int, stream: int | None) -> int | None:
        address = self._free.take(nbytes)
        if address is None:
            self.refused_bytes = min(nbytes, self.refused_bytes or nbytes)
        else:
            self.segments += 1
        return address

    def release(self, address: int, nbytes: int, device: int, stream: int | None) -> None:
        self._free.release(address, nbytes)
        self.segments -= 1


class CarvedPool:
    """A `torch.cuda.MemPool` over a range of device memory. Tensors belong to the stream that they were made on."""

    def __init__(self, memory: torch.Tensor, large_bytes: int) -> None:
        """Seed the pool with one large segment, which must fit, for tensors of the current stream."""
        self._device = memory.device
        self._carver = carver = _Carver(memory)
        # Torch keeps the addresses, not the objects.
        _callbacks[carver] = callbacks = (_Allocate(carver.take), _Free(carver.release))
        # Their addresses are read without `ctypes.cast`, which makes a reference cycle.
        take, release = (ctypes.c_void_p.from_buffer(callback).value or 0 for callback in callbacks)
        self._allocator = torch._C._cuda_customAllocator(take, release)
        self._pool: Any = _cuda.MemPool(self._allocator)
        _open.add(self)
        if large_bytes:
            with self.allocating():
                torch.empty(large_bytes, dtype=torch.uint8, device=memory.device)
        assert self.refused_bytes is None

    @property
    def refused_bytes(self) -> int | None:
        """The size of the least segment that did not fit."""
        return self._carver.refused_bytes

    @property
    def id(self) -> tuple[int, int]:
        assert self._pool is not None
        own: tuple[int, int] = self._pool.id
        return own

    @property
    def use_count(self) -> int:
        """How many users torch counts: this object, graphs, and captures that have not ended."""
        assert self._pool is not None
        return int(self._pool.use_count())

    @property
    def held_bytes(self) -> int:
        return sum(nbytes for _, nbytes, state in self.layout if state == "active_allocated")

    @property
    def layout(self) -> tuple[tuple[int, int, str], ...]:
        """Address, size and state of each block. Torch's allocator joins free neighbours and takes the best fit."""
        # A snapshot of this pool alone releases a reference too many to the pool's number (pytorch/pytorch#196366):
        # from the 257th pool on, the process crashes. One of all pools does not.
        segments = [s for s in _cuda.memory_snapshot() if self._carver.has(s["address"])]
        blocks = (block for segment in segments for block in segment["blocks"])
        return tuple(sorted((int(b["address"]), int(b["size"]), str(b["state"])) for b in blocks))

    @contextmanager
    def allocating(self) -> Iterator[None]:
        assert self._pool is not None
        with _cuda.use_mem_pool(self._pool, self._device):
            yield

    @contextmanager
    def leaving(self, nbytes: int) -> Iterator[None]:
        """Fill free ranges until none is larger than `nbytes`. The block allocates in the pool."""
        held: list[torch.Tensor] = []
        while (largest := max((n for _, n, state in self.layout if state == "inactive"), default=0)) > nbytes:
            filled = max((largest - nbytes) // _ROUNDED_BYTES * _ROUNDED_BYTES, _ROUNDED_BYTES)
            held.append(torch.empty(filled, dtype=torch.uint8, device=self._device))
        try:
            yield
        finally:
            held.clear()

    def close(self) -> None:
        """Release the segments. No tensor or graph of the pool may be left."""
        self._pool = None
        _open.discard(self)
        if not self._carver.segments:
            _callbacks.pop(self._carver, None)
