"""Arena of a CUDA device: one allocation, shared out as views."""

import math

import torch

from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.memory import require_inside


class CudaArena:
    """Device memory allocated once, outside torch's allocator."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = driver.device
        self._driver = driver
        self._bytes = driver.allocate(nbytes)

    def close(self) -> None:
        """Release the memory. Its views become invalid; its pools must be closed before."""
        memory, self._bytes = self._bytes, torch.empty(0, dtype=torch.uint8, device=self.device)
        self._driver.free(memory)

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a view of these bytes. Raises MemoryExceeded outside the arena."""
        require_inside(self, offset, nbytes)
        return self._bytes[offset : offset + nbytes]

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a dense tensor over the arena's bytes. Raises MemoryExceeded outside the arena."""
        own = self.bytes(offset, math.prod(shape) * dtype.itemsize)
        if not own.numel():
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        return own.view(dtype).as_strided(shape, stride, own.storage_offset() // dtype.itemsize)
