"""Memory for what lowering computes: files without names, which the kernel can write out where memory is short."""

import os
import tempfile
from pathlib import Path

import torch

from runtime.heap import release_free_memory


def file_memory(nbytes: int, folder: Path) -> torch.Tensor:
    """Return bytes in a file of their own, which ends with them. Raises OSError, also for a full disk."""
    release_free_memory()
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return torch.from_file(f"/proc/self/fd/{file.fileno()}", shared=True, size=nbytes, dtype=torch.uint8)
