"""Anonymous memory of the host: whole regions, taken with few page faults and given back beside other threads."""

import ctypes
import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Private zeroed pages, at least one; they take memory once they are touched."""
    return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def large_region(nbytes: int) -> Bytes:
    """Memory that will be written as a whole: in huge pages where the system has them."""
    mapping = anonymous_memory(nbytes)
    with suppress(OSError, AttributeError):  # a system without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapping, np.uint8)


def give_back(region: Bytes) -> None:
    """Free a region's pages now; whoever still has a view reads zeros.

    Python's own ways hold the interpreter meanwhile, which is a third of a second for 4 GiB; this one does not.
    """
    _libc.madvise(region.ctypes.data, region.nbytes, mmap.MADV_DONTNEED)
