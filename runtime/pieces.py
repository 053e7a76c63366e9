"""Pieces of weights by content: a segment or table that several models have is stored once, and held once in memory.

A *pack* is a file with the pieces that one model brought. The folder `pieces` of a cache has a hard link to each pack,
which keeps it when its first model is removed, and an index: an empty file per piece, whose name has the digest, the
offset and the pack. A digest only finds a piece; it is reused after all its bytes were compared. Writers hold
`locked`. Whenever they are killed, each piece that a description names exists: packs are written before the
descriptions that name them, and removed after them.
"""

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt

from cohabit.planner import cache_file

FOLDER = "pieces"
"""Folder of the packs, among the folders of lowered models."""
LEAST_REUSED_BYTES = 64 << 10
"""Least bytes that a model reuses of a pack, because each pack is one more file to open."""
_COPIED_BYTES = 8 << 20

Block = npt.NDArray[np.uint8]
FileState = tuple[int, int, int]
"""Size of a file, and times of the last change of its contents and of its status, in nanoseconds."""


class Place(msgspec.Struct, frozen=True):
    """Where a piece is stored: index of the file, offset in bytes, and the digest of the piece's bytes."""

    file: int
    offset: int
    digest: str


class WrittenPiece(NamedTuple):
    """A piece to be written. `blocks` yields its bytes."""

    digest: str
    nbytes: int
    blocks: Callable[[], Iterator[Block]]


@contextmanager
def locked(cache: Path) -> Iterator[Path]:
    """Hold the lock on the packs of a folder of lowered models; yield the packs' folder."""
    folder = cache / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(fd)


def find(folder: Path, wanted: Sequence[WrittenPiece]) -> dict[int, tuple[str, int]]:
    """Return pack and offset of pieces that exist with the same bytes, by index in `wanted`.

    A pack with other bytes for a digest is damaged, and not used.
    """
    by_pack: dict[str, dict[int, int]] = {}
    entries = _entries(folder)
    for n, piece in enumerate(wanted):
        if (entry := entries.get(piece.digest)) is not None:
            _, offset, pack = entry.split("@")
            by_pack.setdefault(f"{pack}.bin", {})[n] = int(offset)
    found: dict[int, tuple[str, int]] = {}
    for pack, offsets in by_pack.items():
        if sum(wanted[n].nbytes for n in offsets) < LEAST_REUSED_BYTES:
            continue
        with suppress(OSError), (folder / pack).open("rb", buffering=0) as file:
            if all(_is_at(file.fileno(), offset, wanted[n].blocks()) for n, offset in offsets.items()):
                found |= {n: (pack, offset) for n, offset in offsets.items()}
    return found


def _is_at(fd: int, offset: int, blocks: Iterator[Block]) -> bool:
    for block in blocks:
        if not np.array_equal(np.frombuffer(os.pread(fd, block.nbytes, offset), np.uint8), block):
            return False
        offset += block.nbytes
    return True


def add(folder: Path, path: Path, offsets: Mapping[str, int]) -> None:
    """Make a file a pack, whose pieces, given as offsets by digest, other models may reuse.

    On file systems without links, each model keeps a copy.
    """
    if path.stat().st_size < LEAST_REUSED_BYTES:
        return
    pack = f"{path.name.partition('.')[0]}-{secrets.token_hex(8)}.bin"
    with suppress(OSError):
        os.link(path, folder / pack)
        _index(folder, pack, offsets)


def _entries(folder: Path) -> dict[str, str]:
    """Return the names of the index's files by digest."""
    names = [entry.name for entry in os.scandir(folder) if entry.name.count("@") == 2]
    return {name.partition("@")[0]: name for name in names}


def _index(folder: Path, pack: str, offsets: Mapping[str, int]) -> None:
    entries = _entries(folder)
    for digest, offset in offsets.items():
        name = f"{digest}@{offset}@{pack.removesuffix('.bin')}"
        (folder / name).touch()
        if (old := entries.get(digest, name)) != name:
            (folder / old).unlink()


def remove_from_index(folder: Path) -> None:
    """Remove the index entries of packs that are gone."""
    packs = {path.stem for path in folder.glob("*.bin")}
    for path in folder.iterdir():
        if "@" in path.name and path.name.rpartition("@")[2] not in packs:
            path.unlink()


def repack(folder: Path, pack: str, pieces: Mapping[int, tuple[int, str]]) -> tuple[str, dict[int, int]]:
    """Copy pieces of a pack, given as size and digest by offset, into a new one.

    Returns its name, and new offsets by old ones.
    """
    new, offsets, end = f"{pack.rpartition('-')[0]}-{secrets.token_hex(8)}.bin", dict[int, int](), 0
    with (folder / pack).open("rb", buffering=0) as old, cache_file.replacing(folder / new) as fd:
        for offset, (nbytes, _) in sorted(pieces.items()):
            offsets[offset] = end
            for start in range(0, nbytes, _COPIED_BYTES):
                block = os.pread(old.fileno(), min(_COPIED_BYTES, nbytes - start), offset + start)
                os.pwrite(fd, block, end + start)
            end += nbytes
    _index(folder, new, {pieces[offset][1]: moved for offset, moved in offsets.items()})
    return new, offsets


class PieceKey(NamedTuple):
    """A piece in use: how, and where its bytes are. The digest is there because inode numbers are used again."""

    store: Literal["ram", "file"]
    device: int
    inode: int
    offset: int
    digest: str


class HeldPiece:
    """A piece that open stores use."""

    def __init__(self, content: Block | None, verified: FileState | None) -> None:
        self.content = content
        """Its bytes if they are in memory."""
        self.verified = verified
        """State of its file when its checksum was verified; None if it was not."""
        self.users = 1


class HeldPieces:
    """Pieces in use by this process's stores: each is held and verified once. Any thread."""

    def __init__(self) -> None:
        self.reading = Lock()
        """Held while a store reads pieces into memory, so that no other reads the same ones."""
        self._pieces: WeakValueDictionary[PieceKey, HeldPiece] = WeakValueDictionary()
        self._verified: dict[tuple[int, int], FileState] = {}
        self._lock = Lock()

    def take(self, key: PieceKey) -> HeldPiece | None:
        """Return the piece with this key, for one more user; None if there is none."""
        with self._lock:
            if (piece := self._pieces.get(key)) is not None:
                piece.users += 1
            return piece

    def add(self, key: PieceKey, piece: HeldPiece) -> None:
        with self._lock:
            self._pieces[key] = piece

    def release(self, key: PieceKey, piece: HeldPiece) -> bool:
        """End a use of a piece. Returns whether it was the last one."""
        with self._lock:
            piece.users -= 1
            if not piece.users and self._pieces.get(key) is piece:
                del self._pieces[key]
            return not piece.users

    def is_verified(self, fd: int, offset: int, digest: str) -> bool:
        """Whether a piece is in use, and its file unchanged since its checksum was verified."""
        state = state_of(fd)
        keys = [key_of("ram", fd, offset, digest), key_of("file", fd, offset, digest)]
        with self._lock:
            return any((p := self._pieces.get(key)) is not None and p.verified == state for key in keys)

    def record(self, fd: int, state: FileState) -> None:
        """Record that a file's pieces had their checksums when it was in this state."""
        status = os.fstat(fd)
        with self._lock:
            self._verified[status.st_dev, status.st_ino] = state

    def verified(self, fd: int) -> FileState | None:
        """Return the state that was recorded for a file."""
        status = os.fstat(fd)
        with self._lock:
            return self._verified.get((status.st_dev, status.st_ino))

    @property
    def nbytes(self) -> int:
        """Bytes of the pieces in memory."""
        with self._lock:
            return sum(p.content.nbytes for p in self._pieces.values() if p.content is not None)


HELD = HeldPieces()


def key_of(store: Literal["ram", "file"], fd: int, offset: int, digest: str) -> PieceKey:
    status = os.fstat(fd)
    return PieceKey(store, status.st_dev, status.st_ino, offset, digest)


def state_of(fd: int) -> FileState:
    """Return a file's state, which any write changes."""
    status = os.fstat(fd)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns
