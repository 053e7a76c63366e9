"""The C library's heap (glibc's): what it keeps of freed memory."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 8 << 20
"""Enough for what a process frees and needs again besides large activations."""
_LEAST_KEPT_BYTES, _MOST_KEPT_BYTES = 256 << 10, (1 << 31) - 1
"""The second is the largest number that mallopt takes."""

_libc = ctypes.CDLL(None)


def release_free_memory() -> None:
    """Give the system back what was freed and the C library has kept, if it can do that."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory(nbytes: int) -> None:
    """Have the C library keep at most about this much freed memory, in one heap that all threads share.

    By default it keeps tens of MiB. What it gives back costs page faults when it is needed again.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        kept = min(max(nbytes, _LEAST_KEPT_BYTES), _MOST_KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, kept)
        mallopt(_M_TRIM_THRESHOLD, kept)
        mallopt(_M_ARENA_MAX, 1)
