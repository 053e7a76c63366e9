"""A `.pt2` archive as a file: opening it, and detecting changes."""

import hashlib
import json
import struct
import zipfile
from pathlib import Path

from runtime.errors import ArchiveError


def fingerprint(path: Path) -> str:
    """Return the hex SHA-256 over the names, sizes and checksums of an archive's records. Raises ArchiveError."""
    with open_archive(path) as archive:
        listing = [(i.filename, i.file_size, i.CRC) for i in archive.infolist()]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def open_archive(path: Path) -> zipfile.ZipFile:
    """Raises ArchiveError."""
    try:
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArchiveError(f"{path.name}: no such file") from error
    except (zipfile.BadZipFile, OSError, struct.error) as error:
        raise ArchiveError(f"{path.name}: not a .pt2 archive, or a truncated one: {error}") from error
