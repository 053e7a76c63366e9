"""Anonymous host memory, moved into huge pages and released without the interpreter lock."""

import ctypes
import mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_MADV_COLLAPSE = 25
"""Linux 6.1; Python's mmap does not have it."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Private zeroed pages, at least one; they take memory once they are touched."""
    return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_pages_are_off() -> bool:
    """Whether the system says that it gives no huge pages to anonymous memory."""
    try:
        return "[never]" in HUGE_PAGES_SETTING.read_text()
    except OSError:  # hidden in some containers
        return False


def use_huge_pages(region: Bytes) -> None:
    """Move a region that has been written into huge pages, which are copied faster; a system without keeps it as it is.

    Asking for them before the first write is not the same: each page fault then clears 2 MiB, and other threads wait.
    """
    _libc.madvise(region.ctypes.data, region.nbytes, _MADV_COLLAPSE)


def release_pages(region: Bytes) -> None:
    """Release a region's pages now; views that still exist read zeros.

    Python's own calls hold the interpreter lock meanwhile, for a third of a second per 4 GiB; this one does not.
    """
    _libc.madvise(region.ctypes.data, region.nbytes, mmap.MADV_DONTNEED)
