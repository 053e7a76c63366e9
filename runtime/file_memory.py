"""Memory for what lowering computes: files without names, which the kernel can write out where memory is short."""

import ctypes
import os
import tempfile
from pathlib import Path

import torch

_libc = ctypes.CDLL(None)


def file_memory(nbytes: int, folder: Path) -> torch.Tensor:
    """Return bytes in a file of their own, which ends with them. Raises OSError, also for a full disk."""
    release_free_memory()
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)


def release_free_memory() -> None:
    """Give the system back what was freed and the C library has kept, if it can do that (glibc's can)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
