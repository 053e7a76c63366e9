"""Host stores: hold the parameters that are not in the arena.

`RamStore` keeps the weights file's bytes in host memory; segments and tables that several models share are there once.
`FileStore` leaves them on disk and reads them with O_DIRECT where the file system supports it, so that the page cache
holds no second copy. Both keep encoded segments encoded; copies decode them.
"""

import mmap
import os
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from cohabit.runtime.errors import StoreChanged
from cohabit.runtime.lowering.encoding.codec import Decoding, decoding, encoded_bytes
from cohabit.runtime.lowering.weights import (
    Manifest,
    Segment,
    StoredRange,
    Table,
    checksum,
    dtype_of,
    open_files,
    stored_ranges,
)
from cohabit.runtime.memory import Copy, HostStore, SpillBuffer, StoreKind
from cohabit.runtime.pieces import HELD, FileState, HeldPiece, PieceKey, key_of, state_of
from cohabit.runtime.stores.direct import open_direct, read_fully
from cohabit.runtime.stores.pages import Bytes, anonymous_memory, release_pages, use_huge_pages
from cohabit.runtime.stores.spill_buffers import file_spill_buffers, ram_spill_buffers

_SETTLED_NS = 100_000_000
"""A file that changed less than this ago may change again with the same times."""

Store = HostStore[Bytes]
"""One model's host copy. Its copies run in the calling thread, without holding the GIL."""


def open_store(
    kind: StoreKind, path: Path, manifest: Manifest, *, verify_reads: bool = False, unmap_tables: bool = False
) -> "RamStore | FileStore":
    """Open a weights file. With `verify_reads`, all bytes read are compared with checksums; raises StoreChanged.

    With `unmap_tables`, a file store's tables leave the process's memory after each gather.
    """
    if kind == "ram":
        return RamStore(path, manifest, verify_reads=verify_reads)
    return FileStore(path, manifest, verify_reads=verify_reads, unmap_tables=unmap_tables)


class RamStore:
    """The whole weights file in anonymous memory. What other open stores have in memory already is not read again."""

    kind: StoreKind = "ram"
    staged = False
    check_tables = None

    def __init__(self, path: Path, manifest: Manifest, *, verify_reads: bool = False) -> None:
        self.manifest = manifest
        ranges = stored_ranges(path, manifest)
        with open_files(ranges) as files, HELD.reading:
            keys = [key_of("ram", files[r.path], r.offset, r.digest) for r in ranges]
            taken = [HELD.take(key) if key.digest else None for key in keys]
            missing = [n for n, piece in enumerate(taken) if piece is None]
            region = np.frombuffer(anonymous_memory(sum(ranges[n].nbytes for n in missing)), np.uint8)
            try:
                read_ranges(path, manifest, ranges, files, region, missing, verify_reads=verify_reads)
            except BaseException:
                self._release((key, piece) for key, piece in zip(keys, taken, strict=True) if piece is not None)
                raise
            use_huge_pages(region)
            end = 0
            for n in missing:
                content = region[end : end + ranges[n].nbytes]
                taken[n] = piece = HeldPiece(content, HELD.verified(files[ranges[n].path]))
                end += ranges[n].nbytes
                if keys[n].digest:
                    HELD.add(keys[n], piece)
        self._held = [(key, piece) for key, piece in zip(keys, taken, strict=True) if piece is not None]

    def copy(self, segment: int, destination: Bytes) -> Copy:
        s = self.manifest.segments[segment]
        source = self._content(segment)
        if s.is_encoded and destination.nbytes >= s.nbytes:
            return partial(_decode, decodings(s, source, destination))
        return lambda: np.copyto(destination, source[: destination.nbytes])

    def source(self, index: int) -> Hashable:
        key = self._held[index][0]
        return key if key.digest else (self, index)

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self.manifest, name)
        return table_view(self._content(_index_of(self.manifest, table)), table, 0)

    def _content(self, index: int) -> Bytes:
        content = self._held[index][1].content
        assert content is not None
        return content

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return ram_spill_buffers(sizes)

    def close(self) -> None:
        held, self._held = self._held, []
        self._release(held)

    @staticmethod
    def _release(held: Iterable[tuple[PieceKey, HeldPiece]]) -> None:
        """Release pages that no other store uses."""
        for key, piece in held:
            if HELD.release(key, piece) and piece.content is not None:
                release_pages(piece.content)


class FileStore:
    """The files with the weights. Tables are mapped, so that a gather reads only the pages of its rows.

    A copy raises StoreChanged if it read other bytes than those written when the model was prepared. Its checksum is
    verified if its file's size or times have changed since the start or since it was last verified, and always with
    `verify_reads`. `check_tables` does the same for the tables; with `verify_reads`, tables are verified once and kept
    in memory instead. If a table is truncated between this check and a gather, the process ends.

    The page cache keeps what gathers have read, and the system reclaims it. A gather maps up to 2 MiB around each row,
    which count as the process's memory: with `unmap_tables` until the gather has ended, otherwise for good.
    """

    kind: StoreKind = "file"
    staged = False

    def __init__(
        self, path: Path, manifest: Manifest, *, verify_reads: bool = False, unmap_tables: bool = False
    ) -> None:
        self.manifest = manifest
        self._path = path
        self._verify_reads = verify_reads
        self._unmap_tables = unmap_tables
        self._ranges = stored_ranges(path, manifest)
        self._fds: dict[Path, int] = {}
        try:
            for r in self._ranges:
                if r.path not in self._fds:
                    self._fds[r.path] = open_direct(r.path, os.O_RDONLY)
        except OSError:
            self._close_files()
            raise
        self._states = [self._current_state(n) for n in range(len(self._ranges))]
        """Of each range's file, at the start or when the range was last verified."""
        self._held = [self._in_use(n) for n, r in enumerate(self._ranges) if r.digest]
        self._tables: dict[str, Bytes] = {}
        """Verified tables, in memory."""
        self._mapped: dict[Path, Bytes] = {}
        """Files with tables."""
        self.check_tables = None if verify_reads or not manifest.tables else self._check_tables

    def copy(self, segment: int, destination: Bytes) -> Copy:
        s, stored, fd = self.manifest.segments[segment], self._ranges[segment], self._fd(segment)
        is_encoded = s.is_encoded and destination.nbytes >= s.nbytes
        arriving = destination[s.nbytes - s.file_bytes : s.nbytes] if is_encoded else destination
        decoded = decodings(s, arriving, destination, in_place=True) if is_encoded else []

        def read() -> None:
            try:
                read_fully(fd, arriving, stored.offset)
            except OSError:
                if self._is_changed(segment):
                    raise self._changed(segment) from None
                raise
            if self._verify_reads or self._is_changed(segment):
                self._verify(segment, arriving)
            _decode(decoded)

        return read

    def source(self, index: int) -> Hashable:
        stored = self._ranges[index]
        return key_of("file", self._fd(index), stored.offset, stored.digest) if stored.digest else (self, index)

    def _verify(self, segment: int, read: Bytes) -> None:
        nbytes = self.manifest.segments[segment].file_bytes
        if read.nbytes >= nbytes:
            self._require_checksum(segment, lambda: zlib.crc32(read[:nbytes].data))
        elif self._is_changed(segment):  # only link measurements read less
            raise self._changed(segment)

    def _require_checksum(self, index: int, found: Callable[[], int]) -> None:
        """Verify a range. It need not be verified again until its file changes once more, if that can be told."""
        state = self._current_state(index)
        if found() != self._ranges[index].checksum:
            raise self._changed(index)
        if time.time_ns() > state[2] + _SETTLED_NS:
            self._states[index] = state

    def _changed(self, index: int) -> StoreChanged:
        """Drop the page cache's copy, so that the check at the next start reads the disk. Returns the error."""
        os.posix_fadvise(self._fd(index), 0, 0, os.POSIX_FADV_DONTNEED)
        return _store_changed(self._path, self.manifest, index)

    def _fd(self, index: int) -> int:
        return self._fds[self._ranges[index].path]

    def _in_use(self, index: int) -> tuple[PieceKey, HeldPiece]:
        fd, stored = self._fd(index), self._ranges[index]
        key = key_of("file", fd, stored.offset, stored.digest)
        if (piece := HELD.take(key)) is None:
            piece = HeldPiece(None, HELD.verified(fd))
            HELD.add(key, piece)
        return key, piece

    def _current_state(self, index: int) -> FileState:
        return state_of(self._fd(index))

    def _is_changed(self, index: int) -> bool:
        return self._current_state(index) != self._states[index]

    def table(self, name: str) -> torch.Tensor:
        table = find_table(self.manifest, name)
        if self._verify_reads:
            return table_view(self._verified_table(table), table, 0)
        stored = self._ranges[_index_of(self.manifest, table)]
        if stored.path not in self._mapped:
            with self._buffered(_index_of(self.manifest, table)) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            mapped.madvise(mmap.MADV_RANDOM)
            self._mapped[stored.path] = np.frombuffer(mapped, np.uint8)
        return table_view(self._mapped[stored.path], table, stored.offset)

    def _verified_table(self, table: Table) -> Bytes:
        if table.name not in self._tables:
            index = _index_of(self.manifest, table)
            nbytes = self._ranges[index].nbytes
            read = np.frombuffer(anonymous_memory(nbytes), np.uint8)[:nbytes]
            with self._buffered(index) as file:
                read_fully(file.fileno(), read, self._ranges[index].offset)
            self._require_checksum(index, lambda: zlib.crc32(read.data))
            self._tables[table.name] = read
        return self._tables[table.name]

    def _check_tables(self) -> None:
        """Unmap tables if asked to, and compare those whose file has changed since the last comparison."""
        if self._unmap_tables:
            for mapped in list(self._mapped.values()):
                release_pages(mapped)
        for index in range(len(self.manifest.segments), len(self._ranges)):
            if self._is_changed(index):
                stored = self._ranges[index]
                with self._buffered(index) as file:
                    fd = file.fileno()
                    self._require_checksum(index, partial(checksum, fd, stored.offset, stored.nbytes))

    def _buffered(self, index: int) -> BinaryIO:
        """Reopen the same file with the page cache, even if another file has its path now."""
        return open(f"/proc/self/fd/{self._fd(index)}", "rb")

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        return file_spill_buffers(self._path.parent, sizes)

    def close(self) -> None:
        held, self._held = self._held, []
        for key, piece in held:
            HELD.release(key, piece)
        self._close_files()

    def _close_files(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


def _store_changed(path: Path, manifest: Manifest, index: int) -> StoreChanged:
    """Return the error for a range with other bytes. Segments come first in `index`."""
    names = [*(f"segment {s.name}" for s in manifest.segments), *(f"table {t.name}" for t in manifest.tables)]
    return StoreChanged(
        f"{path.name} of {path.parent.name}: {names[index]} was changed after it was loaded, or the disk returned other"
        " bytes"
    )


def decodings(segment: Segment, source: Bytes, destination: Bytes, *, in_place: bool = False) -> list[Decoding]:
    """Prepare to decode a segment's pieces into memory. With `in_place`, the source is the end of the destination."""
    prepared = []
    for piece, offset in zip(segment.pieces, segment.file_offsets, strict=True):
        encoded = source[offset : offset + encoded_bytes(piece.codec, piece.nbytes)]
        own = destination[piece.offset : piece.offset + piece.nbytes]
        prepared.append(decoding(piece.codec, encoded, own, in_place=in_place))
    return prepared


def _decode(prepared: Sequence[Decoding]) -> None:
    for part in prepared:
        part()


def read_weights(path: Path, manifest: Manifest, destination: Bytes, *, verify_reads: bool) -> None:
    """Read a whole weights file. With `verify_reads`, raises StoreChanged if its checksums differ."""
    ranges = stored_ranges(path, manifest)
    with open_files(ranges) as files:
        whole = range(len(ranges))
        read_ranges(path, manifest, ranges, files, destination, whole, verify_reads=verify_reads)


def read_ranges(
    path: Path,
    manifest: Manifest,
    ranges: Sequence[StoredRange],
    files: Mapping[Path, int],
    destination: Bytes,
    wanted: Iterable[int],
    *,
    verify_reads: bool,
) -> None:
    """Read these ranges of open files, one after the other. With `verify_reads`, raises StoreChanged as above."""
    end = 0
    for n in wanted:
        own = destination[end : end + ranges[n].nbytes]
        read_fully(files[ranges[n].path], own, ranges[n].offset)
        if verify_reads and zlib.crc32(own.data) != ranges[n].checksum:
            raise _store_changed(path, manifest, n)
        end += ranges[n].nbytes


class Links:
    """A bus that carries one copy at a time in each direction."""

    def __init__(self) -> None:
        self.to_device = _Direction()
        self.to_host = _Direction()


class _Direction:
    """One direction of a bus."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.overslept_s = 0.0
        """Seconds by which the last copy ended too late because its thread slept too long."""


class LimitedStore:
    """A store with a slower link, for simulation: a copy sleeps until `bytes / bandwidth` have passed.

    Excess sleep is subtracted from the next copy, so that consecutive copies reach the bandwidth. Stores with the same
    `links` share the bandwidth: a copy waits for those of other threads.
    """

    staged = False

    def __init__(self, store: RamStore | FileStore, bandwidth_bytes_per_s: float, links: Links) -> None:
        self._store = store
        self.kind = store.kind
        self._bandwidth = bandwidth_bytes_per_s
        self._links = links

    def copy(self, segment: int, destination: Bytes) -> Copy:
        link = self._link(self._links.to_device)
        copy = self._store.copy(segment, destination)
        nbytes = min(destination.nbytes, self._store.manifest.segments[segment].file_bytes)
        return lambda: link.run(copy, nbytes)

    def source(self, index: int) -> Hashable:
        return self._store.source(index)

    def table(self, name: str) -> torch.Tensor:
        return self._store.table(name)

    @property
    def check_tables(self) -> Callable[[], None] | None:
        return self._store.check_tables

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        out, back = self._links.to_host, self._links.to_device
        buffers = self._store.spill_buffers(sizes)
        return [_LimitedSpillBuffer(buffer, self._link(out), self._link(back)) for buffer in buffers]

    def _link(self, direction: _Direction) -> "_SlowLink":
        return _SlowLink(self._bandwidth, direction)

    def close(self) -> None:
        self._store.close()


class _SlowLink:
    """A slow link for one prepared copy. It remembers how long the copy itself took last time."""

    def __init__(self, bandwidth_bytes_per_s: float, direction: _Direction) -> None:
        self._bandwidth = bandwidth_bytes_per_s
        self._direction = direction
        self._copy_s = 0.0

    def run(self, copy: Callable[[], None], nbytes: int) -> None:
        """Sleep, then copy: the bytes arrive at the end, so that a premature read gets wrong bytes."""
        with self._direction.lock:
            begin = time.perf_counter() - self._direction.overslept_s
            end = begin + nbytes / self._bandwidth
            overslept_s = _sleep_until(end - self._copy_s)
            start = time.perf_counter()
            copy()
            self._copy_s = time.perf_counter() - start
            late_s = time.perf_counter() - end
            self._direction.overslept_s = _sleep_until(end) if late_s < 0 else min(overslept_s, late_s)


class _LimitedSpillBuffer:
    """A spill buffer with a slower link in each direction."""

    pinned = None

    def __init__(self, buffer: SpillBuffer, out: _SlowLink, back: _SlowLink) -> None:
        self._buffer = buffer
        self._out = out
        self._back = back

    def save(self, source: torch.Tensor) -> None:
        self._out.run(lambda: self._buffer.save(source), source.nbytes)

    def load(self, destination: torch.Tensor) -> None:
        self._back.run(lambda: self._buffer.load(destination), destination.nbytes)

    def close(self) -> None:
        self._buffer.close()


def _sleep_until(end_s: float) -> float:
    """Sleep until `end_s`. Returns the seconds by which the sleep was too long."""
    if (rest := end_s - time.perf_counter()) <= 0:
        return 0.0
    time.sleep(rest)
    return max(0.0, time.perf_counter() - end_s)


def _index_of(manifest: Manifest, table: Table) -> int:
    """Return a table's index among the ranges."""
    return len(manifest.segments) + manifest.tables.index(table)


def find_table(manifest: Manifest, name: str) -> Table:
    """Return the embedding table of this name."""
    return next(t for t in manifest.tables if t.name == name)


def table_view(raw: Bytes, table: Table, offset: int) -> torch.Tensor:
    """Return a view of the table whose bytes begin at an offset."""
    own = torch.from_numpy(raw[offset : offset + table.nbytes])
    return own.view(dtype_of(table.dtype)).reshape(table.shape)
