"""A `.pt2` archive as a file: opening it, and its identity.

An archive's *fingerprint* is the SHA-256 of its bytes. A *note* in a cache folder stores it together with the file's
state, so that a restart does not have to read archives.
"""

import hashlib
import json
import mmap
import os
import re
import struct
import time
import zipfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import decode_as
from cohabit.runtime.errors import ArchiveError

_MOST_DIRECTORY_BYTES = 4 << 20
"""Maximum bytes of the list of records, which is read before anything else; torch writes about 100 bytes per record."""
_NOTE_VERSION = 1
_SETTLED_NS = 100_000_000
"""A file that changed less than this before it was read may change again with the same timestamp: file times advance
with the kernel's clock tick."""


LOWERED_SUFFIX = ".lowered"
"""Suffix of a file that stands for an archive lowered on another machine, and contains the archive's fingerprint."""
_FINGERPRINT = re.compile(r"[0-9a-f]{64}\s*", re.ASCII)


_TORCHSCRIPT = (
    "is a TorchScript file, as torch.jit.save writes it, which is not supported; export the module itself with"
    " torch.export, or import it with cohabit import MODULE:FUNCTION"
)
_PICKLE = (
    "is a state_dict or another pickle of torch.save: it has no program; make the module that it belongs to with"
    " cohabit import FILE --factory MODULE:FUNCTION"
)
_SAFETENSORS = (
    "is a safetensors file: it has no program; make the module that it belongs to with"
    " cohabit import FILE --factory MODULE:FUNCTION"
)


_ONNX = "is an ONNX file; make a program of it with cohabit import FILE.onnx"
_GGUF = "is a GGUF file, which is not supported; import the Hugging Face folder that it was made from"


def _kind(path: Path, start: bytes) -> str | None:
    """Describe a file that is not a zip archive by its first bytes; None if they are unknown."""
    if path.suffix == ".onnx":
        return _ONNX
    if start.startswith(b"GGUF"):
        return _GGUF
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # pickle protocols
        return _PICKLE
    return _SAFETENSORS if start[8:10] == b'{"' else None


class _FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State of a file, changed by any write or replacement. Programs can set all times but `changed_ns`, the ctime."""

    device: int
    inode: int
    nbytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(fd: int) -> "_FileState":
        stat = os.fstat(fd)
        return _FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fingerprint of a file in this state, with this list of records.

    The list has the CRC-32 of each record. It tells files apart on file systems with coarse or made-up times.
    """

    path: str
    state: _FileState
    records: str
    fingerprint: str
    format_version: int = _NOTE_VERSION


_note_decoder = msgspec.json.Decoder(_Note)


class ArchiveFile:
    """An open archive. All reads go to the file that was opened, even if another one replaces it."""

    def __init__(self, path: Path) -> None:
        """Open an archive. Raises ArchiveError for a file that is not one, or whose list of records is too long."""
        self.path = path
        if path.suffix == LOWERED_SUFFIX:
            raise ArchiveError(
                f"{path.name}: it stands for an archive that was lowered elsewhere; serve the bundle's own folder, or"
                " copy the archive here"
            )
        if path.exists() and not path.is_file():
            raise ArchiveError(f"{path.name}: it is not a regular file")  # to open a FIFO waits for its writer
        try:
            self._file = path.open("rb")
        except FileNotFoundError as error:
            raise ArchiveError(f"{path.name}: no such file") from error
        except OSError as error:
            raise ArchiveError(f"{path.name}: it cannot be read: {error.strerror}") from error
        try:
            self._state = _FileState.of(self._file.fileno())
            self._read_ns = time.time_ns()
            self._refuse_large_directory()
            self.records = zipfile.ZipFile(self._file)
        except (zipfile.BadZipFile, OSError, struct.error) as error:
            kind = _kind(path, self._start())
            self._file.close()
            if kind is not None:
                raise ArchiveError(f"{path.name} {kind}") from error
            raise ArchiveError(f"{path.name}: not a .pt2 archive, or a truncated one: {error}") from error
        except BaseException:
            self._file.close()
            raise

    @property
    def other_kind(self) -> str | None:
        """Description and remedy of a zip archive of torch.save or torch.jit.save; None for a `.pt2` archive."""
        names = {name.partition("/")[2] for name in self.records.namelist()}
        if "models/model.json" in names or "data.pkl" not in names:
            return None
        if min(record.header_offset for record in self.records.infolist()) > 0:
            return None  # these are the records of an archive nested in this one, whose own list is cut off
        return _TORCHSCRIPT if "constants.pkl" in names else _PICKLE

    def _start(self) -> bytes:
        with suppress(OSError):
            self._file.seek(0)
            return self._file.read(16)
        return b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of the file's bytes; reads the whole file. Raises ArchiveError."""
        self._read_ns = time.time_ns()
        return self._digest()

    @cached_property
    def mapped(self) -> mmap.mmap:
        """The whole file in a private mapping; writable because torch asks for it, but never written."""
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)

    def refuse_change(self) -> None:
        """Raise ArchiveError if the file's bytes have changed since its fingerprint was taken."""
        state = _FileState.of(self._file.fileno())
        if state != self._state and self._digest() != self.fingerprint:  # a new hard link changes the state only
            raise ArchiveError(f"{self.path.name}: it was written while it was read; load the model again")

    def note(self, notes: Path) -> None:
        """Note the fingerprint in a folder, if the file has been unchanged for long enough. Ignores write errors."""
        settled_ns = self._state.changed_ns + _SETTLED_NS
        if self._read_ns < settled_ns:
            self._read_ns = time.time_ns()
            if self._read_ns < settled_ns or self._digest() != self.fingerprint:
                return
        note = _Note(str(self.path), self._state, self._list_of_records, self.fingerprint)
        with suppress(OSError):
            cache_file.write(_note_path(self.path, notes), msgspec.json.encode(note))

    def noted(self, notes: Path) -> str | None:
        """Return the fingerprint noted for the file's current state; None without one. It suffices to read the cache.

        Writes to the cache use `fingerprint`: a mapping can change bytes without a new file time.
        """
        try:
            note = decode_as(cache_file.read(_note_path(self.path, notes)), _note_decoder, "note", _NOTE_VERSION)
        except (FileNotFoundError, FormatError):
            return None
        found = str(self.path), self._state, self._list_of_records
        return note.fingerprint if (note.path, note.state, note.records) == found else None

    @cached_property
    def _list_of_records(self) -> str:
        listing = [(i.filename, i.file_size, i.CRC) for i in self.records.infolist()]
        return hashlib.sha256(json.dumps(listing).encode()).hexdigest()

    def _digest(self) -> str:
        try:
            self._file.seek(0)
            return hashlib.file_digest(self._file, "sha256").hexdigest()
        except OSError as error:
            raise ArchiveError(f"{self.path.name}: it cannot be read: {error.strerror}") from error

    def _refuse_large_directory(self) -> None:
        end = zipfile._EndRecData(self._file)  # type: ignore[attr-defined]
        nbytes = 0 if end is None else end[zipfile._ECD_SIZE]  # type: ignore[attr-defined]
        if nbytes > _MOST_DIRECTORY_BYTES:
            raise ArchiveError(
                f"{self.path.name}: its list of records has {nbytes} bytes, the limit is {_MOST_DIRECTORY_BYTES};"
                " a model has a record per parameter"
            )


def fingerprint(path: Path) -> str:
    """Return the fingerprint of an archive, which is read in full, or of the one that a file stands for.

    Raises ArchiveError.
    """
    if path.suffix == LOWERED_SUFFIX:
        return _stood_for(path)
    with ArchiveFile(path) as archive:
        return archive.fingerprint


def notes_of(weights: Path) -> Path:
    """Return the folder of the notes on archives, below the cache's folder of lowered models."""
    return weights / "archives"


def noted_fingerprint(path: Path, notes: Path) -> str | None:
    """Return the noted fingerprint of an archive, or that of the archive that a file stands for; None if not noted.

    Raises ArchiveError.
    """
    if path.suffix == LOWERED_SUFFIX:
        return _stood_for(path)
    with ArchiveFile(path) as archive:
        return archive.noted(notes)


def noted_archives(notes: Path) -> dict[Path, tuple[Path, str]]:
    """Return the notes on archives by the note's file: the archive's path when it was read, and its fingerprint."""
    found: dict[Path, tuple[Path, str]] = {}
    for path in sorted(notes.glob("*.json")):
        with suppress(FileNotFoundError, FormatError):
            note = decode_as(cache_file.read(path), _note_decoder, "note", _NOTE_VERSION)
            found[path] = Path(note.path), note.fingerprint
    return found


def _stood_for(path: Path) -> str:
    with path.open("rb") as file:
        text = file.read(100).decode(errors="replace")
    if not _FINGERPRINT.fullmatch(text):
        raise ArchiveError(f"{path.name} is damaged: it has no fingerprint of an archive")
    return text.strip()


def _note_path(path: Path, notes: Path) -> Path:
    """Return the path of a file's only note, which is overwritten when the file changes."""
    return notes / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
