"""A `.pt2` archive as a file: opening it, and its identity.

An archive's *fingerprint* is the SHA-256 of its bytes. It is noted in a folder of the cache, with the state of the file
that was read for it, so that a restart reads no archives.
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
"""Size of the list of records, which is read before anything else; torch writes about a hundred bytes per record."""
_NOTE_VERSION = 1
_SETTLED_NS = 100_000_000
"""A file that changed less than this before it was read may change again with the same time, which is that of a tick of
the kernel's clock."""


LOWERED_SUFFIX = ".lowered"
"""Of a file that stands for an archive which was lowered on another machine: it has the archive's fingerprint."""
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


def _kind_of_start(start: bytes) -> str | None:
    """Say what a file is that is no zip archive, by its first bytes; None if that is not known."""
    if start[:1] == b"\x80" and start[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):  # a protocol of pickle
        return _PICKLE
    return _SAFETENSORS if start[8:10] == b'{"' else None


class _FileState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes when a file is written or replaced. Programs can set every time but `changed_ns`, the ctime."""

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

    The list has the CRC-32 of each record. It tells files apart on file systems whose times are coarse or invented.
    """

    path: str
    state: _FileState
    records: str
    fingerprint: str
    format_version: int = _NOTE_VERSION


_note_decoder = msgspec.json.Decoder(_Note)


class ArchiveFile:
    """An open archive. All of it is read from the file that was opened, even if another one takes its place."""

    def __init__(self, path: Path) -> None:
        """Raises ArchiveError for a file that is not an archive, or has too long a list of records."""
        self.path = path
        if path.suffix == LOWERED_SUFFIX:
            raise ArchiveError(
                f"{path.name}: it stands for an archive that was lowered elsewhere; serve the bundle's own folder, or"
                " copy the archive here"
            )
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
            kind = _kind_of_start(self._start())
            self._file.close()
            if kind is not None:
                raise ArchiveError(f"{path.name} {kind}") from error
            raise ArchiveError(f"{path.name}: not a .pt2 archive, or a truncated one: {error}") from error
        except BaseException:
            self._file.close()
            raise

    @property
    def other_kind(self) -> str | None:
        """What the file is and what to do with it, if it is a zip archive that torch.save or torch.jit.save wrote."""
        names = {name.partition("/")[2] for name in self.records.namelist()}
        if "models/model.json" in names or "data.pkl" not in names:
            return None
        if min(record.header_offset for record in self.records.infolist()) > 0:
            return None  # the list of records is that of an archive inside of this one, whose own is cut off
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
        """The hex SHA-256 of the file's bytes, which are read for it. Raises ArchiveError."""
        self._read_ns = time.time_ns()
        return self._digest()

    @cached_property
    def mapped(self) -> mmap.mmap:
        """The whole file in a private mapping: writable for torch's sake, and never written."""
        return mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_COPY)

    def refuse_change(self) -> None:
        """Raise ArchiveError if the file is not as it was when its fingerprint was taken."""
        state = _FileState.of(self._file.fileno())
        if state != self._state and self._digest() != self.fingerprint:  # a new hard link is no other content
            raise ArchiveError(f"{self.path.name}: it was written while it was read; load the model again")

    def note(self, notes: Path) -> None:
        """Keep the fingerprint in a folder, if the file has been as it is for long enough and the folder takes it."""
        settled_ns = self._state.changed_ns + _SETTLED_NS
        if self._read_ns < settled_ns:
            self._read_ns = time.time_ns()
            if self._read_ns < settled_ns or self._digest() != self.fingerprint:
                return
        note = _Note(str(self.path), self._state, self._list_of_records, self.fingerprint)
        with suppress(OSError):
            cache_file.write(_note_path(self.path, notes), msgspec.json.encode(note))

    def noted(self, notes: Path) -> str | None:
        """Return the fingerprint that was noted when the file was as it is now. It is good enough to read the cache.

        What is written to the cache goes by `fingerprint`: bytes can change without a new time, through a mapping.
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
    """Return the fingerprint of an archive, which is read for it, or of the one that a file stands for.

    Raises ArchiveError.
    """
    if path.suffix == LOWERED_SUFFIX:
        return _stood_for(path)
    with ArchiveFile(path) as archive:
        return archive.fingerprint


def notes_of(weights: Path) -> Path:
    """Return the folder of the notes on archives, for the cache's folder of lowered models."""
    return weights / "archives"


def noted_fingerprint(path: Path, notes: Path) -> str | None:
    """Return the fingerprint of an archive if it is noted, or of the one that a file stands for.

    Raises ArchiveError.
    """
    if path.suffix == LOWERED_SUFFIX:
        return _stood_for(path)
    with ArchiveFile(path) as archive:
        return archive.noted(notes)


def noted_archives(notes: Path) -> dict[Path, tuple[Path, str]]:
    """Return what is noted of archives, by the note's file: their path when they were read, and their fingerprint."""
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
    """A file has one note, which is written again when it changes."""
    return notes / f"{hashlib.sha256(os.fsencode(path)).hexdigest()[:32]}.json"
