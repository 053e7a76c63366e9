"""Arena of the CPU backend: all memory that parameters may use, in one mapping."""

import math
import mmap
from contextlib import suppress

import numpy as np
import torch

from cohabit.runtime.memory import require_inside
from cohabit.runtime.stores.pages import Bytes, anonymous_memory


class CpuArena:
    """One anonymous, page-aligned mapping. Views keep the mapping alive; `close` releases its pages."""

    device = torch.device("cpu")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = anonymous_memory(nbytes)
        with suppress(OSError):  # no huge pages on this system; they make kernels' reads of parameters faster
            self._map.madvise(mmap.MADV_HUGEPAGE)

    def __enter__(self) -> "CpuArena":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the pages now. Remaining views read zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def bytes(self, offset: int, nbytes: int) -> Bytes:
        """Return these bytes as a writable array. Raises MemoryExceeded outside the arena."""
        require_inside(self, offset, nbytes)
        return np.frombuffer(self._map, np.uint8, count=nbytes, offset=offset)

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a dense tensor over the arena's bytes. Raises MemoryExceeded outside the arena."""
        count = math.prod(shape)
        require_inside(self, offset, count * dtype.itemsize)
        if count == 0:
            return torch.empty_strided(shape, stride, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).as_strided(shape, stride)
