"""The state of a file, to detect changes."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FileState:
    """Changes when a file is written or replaced."""

    inode: int
    nbytes: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> "FileState | None":
        """Read a file's state; None if it cannot be read."""
        try:
            stat = os.stat(path)
        except OSError:
            return None
        return FileState(stat.st_ino, stat.st_size, stat.st_mtime_ns)
