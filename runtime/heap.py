"""Controls how much freed memory glibc's heap keeps."""

import ctypes
import mmap
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 8 << 20
"""Freed memory to keep, in bytes: enough for what a process allocates repeatedly, except large activations."""
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES = 256 << 10, (1 << 31) - 1
"""Bounds of the kept bytes; the second is the largest number that mallopt accepts."""

_libc = ctypes.CDLL(None)


def release_free_memory() -> None:
    """Return freed memory that the C library keeps to the system, if the library supports it."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


class _MallInfo(ctypes.Structure):
    """What mallinfo2(3) returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int:
    """Return the bytes that the process has allocated from the C library; 0 if it does not tell."""
    info = getattr(_libc, "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _MallInfo
    found = info()
    return int(found.uordblks) + int(found.hblkhd)


def resident_bytes() -> int:
    """Return the process's resident memory; 0 if the system does not tell."""
    with suppress(OSError), open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE
    return 0


def keep_freed_memory(nbytes: int) -> None:
    """Let the C library keep at most about this much freed memory, in one heap that all threads share.

    By default it keeps tens of MiB. Returned memory costs page faults when it is needed again.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        kept = min(max(nbytes, _LEAST_KEPT_BYTES), _MOST_KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, kept)
        mallopt(_M_TRIM_THRESHOLD, kept)
        mallopt(_M_ARENA_MAX, 1)
