"""Pages of host memory: anonymous memory, huge pages, and libraries' code. All are released without the GIL."""

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

HUGE_PAGES_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

_MADV_COLLAPSE = 25
"""Since Linux 6.1; Python's mmap module lacks it."""

_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<rights>\S{4}) \S+ \S+ \d+ *(?P<path>.*)")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def anonymous_memory(nbytes: int) -> mmap.mmap:
    """Return private zeroed pages, at least one. They occupy memory once touched."""
    return mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def huge_pages_are_off() -> bool:
    """Whether the system disables huge pages for anonymous memory."""
    try:
        return "[never]" in HUGE_PAGES_SETTING.read_text()
    except OSError:  # hidden in some containers
        return False


def use_huge_pages(region: Bytes) -> None:
    """Move a written region into huge pages, which are copied faster. No effect on systems without them.

    Requesting them before the first write is worse: each page fault then clears 2 MiB, and other threads wait.
    """
    _libc.madvise(region.ctypes.data, region.nbytes, _MADV_COLLAPSE)


def release_pages(region: Bytes) -> None:
    """Release a region's pages now. Views that still exist read zeros.

    Does not hold the GIL. Python's own calls hold it for a third of a second per 4 GiB.
    """
    _libc.madvise(region.ctypes.data, region.nbytes, mmap.MADV_DONTNEED)


def occupied_bytes(region: Bytes) -> int:
    """Return the bytes of a region's pages that are in memory. The region is page-aligned and anonymous."""
    pages = np.zeros(-(-region.nbytes // mmap.PAGESIZE), np.uint8)
    _libc.mincore(region.ctypes.data, region.nbytes, pages.ctypes.data)
    return int(np.count_nonzero(pages & 1)) * mmap.PAGESIZE


def release_code_pages() -> None:
    """Release the pages of this process's executables and libraries. Pages that are used again are reread from disk.

    Loading a library runs the initializers of all its parts once, and reads the pages around each. Two thirds of
    torch's pages are never touched again.
    """
    for path, start, nbytes in list(_unmodified_code()):
        _libc.madvise(start, nbytes, mmap.MADV_DONTNEED)
        with suppress(OSError):  # the file was replaced since it was loaded
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def _unmodified_code() -> Iterator[tuple[str, int, int]]:
    """Yield file, address and bytes of each code mapping without private pages, such as a debugger's breakpoints."""
    found: tuple[str, int, int] | None = None
    with suppress(OSError), Path("/proc/self/smaps").open() as smaps:  # hidden in some containers
        for line in smaps:
            if (mapping := _MAPPING.match(line)) is not None:
                start, end = int(mapping["start"], 16), int(mapping["end"], 16)
                is_code = mapping["rights"] == "r-xp" and mapping["path"].startswith("/")
                found = (mapping["path"], start, end - start) if is_code else None
            elif found is not None and line.split() == ["Anonymous:", "0", "kB"]:
                yield found
