"""Direct I/O: reads and writes files without the page cache, if their file system supports it."""

import os
from pathlib import Path

from cohabit.runtime.stores.pages import Bytes


def open_direct(path: Path, flags: int) -> int:
    """Return a descriptor that bypasses the page cache, unless the file system lacks O_DIRECT."""
    try:
        return os.open(path, flags | os.O_DIRECT)
    except (OSError, AttributeError):
        return os.open(path, flags)


def read_fully(fd: int, destination: Bytes, offset: int) -> None:
    """Fill the destination from an offset in the file. Raises OSError, also if the file ends too early."""
    view = destination.data
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(f"file ends at byte {offset + done}, {len(view) - done} bytes too early")
        done += count


def write_fully(fd: int, source: Bytes, offset: int) -> None:
    """Write the whole source at an offset in the file. Raises OSError."""
    view = source.data
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], offset + done)
