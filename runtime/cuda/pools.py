"""Memory pools of torch's allocator over given bytes, through two native callbacks implemented in Python.

The callbacks run under the allocator's lock and take the GIL. A thread that holds the GIL and frees a CUDA tensor while
another one allocates in a pool would deadlock. So only the thread that owns the device may hold CUDA tensors of torch's
allocator. A pool that has its segments calls back no more.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

from cohabit.planner.free_list import FreeList

_cuda: Any = torch.cuda  # largely untyped
_ROUNDED_BYTES = 512
"""Rounding of torch's allocator."""
_Allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_Free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_callbacks: dict["_Carver", tuple[object, object]] = {}
"""Callbacks of carvers whose segments torch still holds. Torch may release the last ones after the pool is closed."""
_open: "WeakSet[CarvedPool]" = WeakSet()


def close_open_pools() -> None:
    """Close every pool, at process exit: torch must not release segments after the callbacks are gone."""
    for pool in list(_open):
        pool.close()


class _Carver:
    """Allocates segments of a range. The callbacks refer to it, since references to the pool would keep that alive."""

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
    """A `torch.cuda.MemPool` over a range of device memory. Tensors belong to the stream they were allocated on."""

    def __init__(self, memory: torch.Tensor, large_bytes: int) -> None:
        """Allocate one large segment for tensors of the current stream. It must fit."""
        self._device = memory.device
        self._carver = carver = _Carver(memory)
        # Torch keeps the addresses, not the objects.
        _callbacks[carver] = callbacks = (_Allocate(carver.take), _Free(carver.release))
        # `ctypes.cast` would make a reference cycle.
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
        """Size of the smallest refused allocation, even if the operator then used less; None if none was refused."""
        return self._carver.refused_bytes

    @property
    def id(self) -> tuple[int, int]:
        assert self._pool is not None
        own: tuple[int, int] = self._pool.id
        return own

    @property
    def use_count(self) -> int:
        """Torch's reference count: this object, graphs, and captures in progress."""
        assert self._pool is not None
        return int(self._pool.use_count())

    @property
    def held_bytes(self) -> int:
        """Bytes of live tensors, as the allocator counts them."""
        return sum(nbytes for _, nbytes, state in self.layout if state == "active_allocated")

    @property
    def layout(self) -> tuple[tuple[int, int, str], ...]:
        """Address, size and state of each block. Torch's allocator joins free neighbours and takes the best fit."""
        # A snapshot of this pool alone releases one reference too many to the pool's number (pytorch/pytorch#196366):
        # from the 257th pool on, the process crashes. A snapshot of all pools does not.
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
        """Fill free ranges until none is larger than `nbytes`. Called while allocating from the pool."""
        held: list[torch.Tensor] = []
        while (largest := max((n for _, n, state in self.layout if state == "inactive"), default=0)) > nbytes:
            filled = max((largest - nbytes) // _ROUNDED_BYTES * _ROUNDED_BYTES, _ROUNDED_BYTES)
            held.append(torch.empty(filled, dtype=torch.uint8, device=self._device))
        try:
            yield
        finally:
            held.clear()

    def close(self) -> None:
        """Release the segments. The pool's tensors and graphs must be released before."""
        self._pool = None
        _open.discard(self)
        if not self._carver.segments:
            _callbacks.pop(self._carver, None)
