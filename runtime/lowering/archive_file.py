"""A `.pt2` archive as a file: opening it, and detecting changes."""

import hashlib
import json
import re
import struct
import zipfile
from pathlib import Path

from cohabit.runtime.errors import ArchiveError

_MOST_DIRECTORY_BYTES = 4 << 20
"""Size of the list of records, which is read before anything else; torch writes about a hundred bytes per record."""


LOWERED_SUFFIX = ".lowered"
"""Of a file that stands for an archive which was lowered on another machine: it has the archive's fingerprint."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}\s*", re.ASCII)


def fingerprint(path: Path) -> str:
    """Return the hex SHA-256 over the names, sizes and checksums of an archive's records. Raises ArchiveError."""
    if path.suffix == LOWERED_SUFFIX:
        with path.open("rb") as file:
            text = file.read(100).decode(errors="replace")
        if not _FINGERPRINT.fullmatch(text):
            raise ArchiveError(f"{path.name} is damaged: it has no fingerprint of an archive")
        return text.strip()
    with open_archive(path) as archive:
        listing = [(i.filename, i.file_size, i.CRC) for i in archive.infolist()]
    return hashlib.sha256(json.dumps(listing).encode()).hexdigest()


def open_archive(path: Path) -> zipfile.ZipFile:
    """Raises ArchiveError."""
    if path.suffix == LOWERED_SUFFIX:
        raise ArchiveError(
            f"{path.name}: it stands for an archive that was lowered elsewhere; serve the bundle's own folder, or copy"
            " the archive here"
        )
    try:
        _refuse_large_directory(path)
        return zipfile.ZipFile(path)
    except FileNotFoundError as error:
        raise ArchiveError(f"{path.name}: no such file") from error
    except (zipfile.BadZipFile, OSError, struct.error) as error:
        raise ArchiveError(f"{path.name}: not a .pt2 archive, or a truncated one: {error}") from error


def _refuse_large_directory(path: Path) -> None:
    with path.open("rb") as file:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
    nbytes = 0 if end is None else end[zipfile._ECD_SIZE]  # type: ignore[attr-defined]
    if nbytes > _MOST_DIRECTORY_BYTES:
        raise ArchiveError(
            f"{path.name}: its list of records has {nbytes} bytes, the limit is {_MOST_DIRECTORY_BYTES};"
            " a model has a record per parameter"
        )
