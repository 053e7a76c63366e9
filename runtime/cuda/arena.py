"""The arena on a CUDA device: one allocation, handed out as views."""

import math

import torch

from cohabit.runtime.cuda.api import Driver
from cohabit.runtime.memory import require_inside


class CudaArena:
    """Device memory that is taken once, outside of torch's allocator."""

    def __init__(self, driver: Driver, nbytes: int) -> None:
        self.nbytes = nbytes
        self.device = driver.device
        self._driver = driver
        self._bytes = driver.allocate(nbytes)

    def close(self) -> None:
        """Release the memory. No view of it may be used any more, and no pool may have its bytes."""
        memory, self._bytes = self._bytes, torch.empty(0, dtype=torch.uint8, device=self.device)
        self._driver.free(memory)

    def bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        """The given bytes. Raises MemoryExceeded outside of the arena."""
        require_inside(self, offset, nbytes)
        return self._bytes[offset : offset + nbytes]

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """The flat tensor itself."""
        return flat

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A dense tensor over the arena's bytes. Raises MemoryExceeded outside of the arena."""
        own = self.bytes(offset, math.prod(shape) * dtype.itemsize)
        if not own.numel():
            return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)
        return own.view(dtype).as_strided(shape, stride, own.storage_offset() // dtype.itemsize)
