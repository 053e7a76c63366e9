"""The C library's heap (glibc's): what it keeps of freed memory."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 256 << 10

_libc = ctypes.CDLL(None)


def release_free_memory() -> None:
    """Give the system back what was freed and the C library has kept, if it can do that."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_heap_small() -> None:
    """Have the C library give large blocks back as soon as they are freed, and share one heap among threads.

    By default it keeps tens of MiB of freed activations. Each new block then costs page faults.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_ARENA_MAX, 1)
