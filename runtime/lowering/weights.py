"""The weights file: a model's parameters in plan order, ready to be copied or read into the arena.

Parameters are grouped into *segments*, the units of swapping: weights that the same ops read, piece after piece, padded
to O_DIRECT's block size. Pieces may be encoded (`runtime.lowering.encoding.codec`); their segment then has fewer bytes
in the file than in memory. Embedding tables follow the segments and are never swapped.

Segments and tables that another model of the cache has already are not written again (`runtime.pieces`): the file's
description says where each of them is.
"""

import hashlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import aligned, decode_as, fingerprint
from cohabit.runtime import pieces
from cohabit.runtime.lowering.encoding.codec import CODECS, PART, Codec, encode, encoded_bytes
from cohabit.runtime.lowering.packing import is_packed, layout_of, raw_bytes, stored_bytes
from cohabit.runtime.pieces import HELD, Place, WrittenPiece

BLOCK_BYTES = 4096
PIECE_ALIGNMENT = 256
"""Alignment of pieces in a segment, for any device. CUDA's libraries choose kernels by the alignment of their operands;
from 256 bytes on, all choose the same."""
PACKED_ALIGNMENT = 64
"""Alignment of pieces in a segment, if pieces may be packed for oneDNN."""
COALESCE_BYTES = 256 << 10
"""Neighbouring segments are joined up to this size, because small copies are dominated by latency."""
LARGE_BYTES = 8 << 20
"""A segment has at most one weight of at least this size, even if the same ops read several: large ranges are hard to
free."""
FORMAT_VERSION = 4
_DESCRIPTION_VERSION = 6

_COPY_BYTES = 128 * 4 * PART
"""Bytes of a tensor that are written at a time: whole parts of a codec."""
_ENCODED_ALIGNMENT = 4
"""Alignment of an encoded piece in the file, for its scales."""


class Piece(msgspec.Struct, frozen=True):
    """One tensor inside a segment; `offset` counts from the segment's start in memory, strides in elements.

    Packed pieces have a `layout`; their `nbytes` may exceed the product of shape and dtype size.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    layout: str | None = None
    codec: Codec = "plain"

    @property
    def file_bytes(self) -> int:
        """Bytes in the file if the segment is encoded: its pieces follow each other without further padding."""
        return aligned(encoded_bytes(self.codec, self.nbytes), _ENCODED_ALIGNMENT)


class Segment(msgspec.Struct, frozen=True):
    """`nbytes` of memory, at `offset` of the file; both are multiples of BLOCK_BYTES."""

    offset: int
    nbytes: int
    pieces: tuple[Piece, ...]

    @property
    def is_encoded(self) -> bool:
        return any(p.codec != "plain" for p in self.pieces)

    @property
    def codec(self) -> Codec:
        """The codec of most of the segment's bytes."""
        return max(CODECS, key=lambda c: sum(p.nbytes for p in self.pieces if p.codec == c))

    @property
    def file_bytes(self) -> int:
        """Bytes in the file, a multiple of BLOCK_BYTES."""
        return aligned(sum(p.file_bytes for p in self.pieces), BLOCK_BYTES) if self.is_encoded else self.nbytes

    @property
    def file_offsets(self) -> tuple[int, ...]:
        """Offset of each piece in the file, from the segment's start there.

        Encoded segments have their padding in front. They are read into the end of the memory that they are decoded to;
        with this padding, every piece is decoded before it is overwritten.
        """
        if not self.is_encoded:
            return tuple(p.offset for p in self.pieces)
        sizes = [p.file_bytes for p in self.pieces]
        padding = self.file_bytes - sum(sizes)
        return tuple(padding + sum(sizes[:k]) for k in range(len(sizes)))

    @property
    def name(self) -> str:
        more = f"+{len(self.pieces) - 1}" if len(self.pieces) > 1 else ""
        return f"{self.pieces[0].name}{more}"


class Table(msgspec.Struct, frozen=True):
    """An embedding table that stays in the host store, where ops read it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """Layout of one weights file."""

    archive: str
    segments: tuple[Segment, ...]
    tables: tuple[Table, ...]
    machine: str | None = None
    """The machine that packed pieces are valid for; None if pieces are never packed."""
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> str:
        return fingerprint(self)

    @cached_property
    def layout(self) -> str:
        """Fingerprint without the archive: the same for models that differ in the values of their weights only."""
        return fingerprint(msgspec.structs.replace(self, archive=self.archive.partition("/")[2]))

    @property
    def segment_bytes(self) -> int:
        return sum(s.nbytes for s in self.segments)

    @property
    def table_bytes(self) -> int:
        return sum(t.nbytes for t in self.tables)

    @property
    def file_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.ranges)

    @property
    def memory_offsets(self) -> tuple[int, ...]:
        """Start of each segment if all lie in memory one after the other, followed by their end."""
        return tuple(accumulate((s.nbytes for s in self.segments), initial=0))

    @property
    def ranges(self) -> Iterator[tuple[int, int]]:
        """Offset and size of each segment, then of each table with its padding; together the whole file."""
        yield from ((s.offset, s.file_bytes) for s in self.segments)
        yield from ((t.offset, aligned(t.nbytes, BLOCK_BYTES)) for t in self.tables)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no type {name}")
    return dtype


class Description(msgspec.Struct, frozen=True):
    """The description of a weights file: its manifest, and the CRC-32 and place of each of its ranges."""

    manifest: Manifest
    checksums: tuple[int, ...]
    files: tuple[str, ...]
    """Files with the ranges, from the description's folder; an empty name is the weights file itself."""
    places: tuple[Place, ...]
    format_version: int = _DESCRIPTION_VERSION


_decoder = msgspec.json.Decoder(Description)


@dataclass(frozen=True, slots=True)
class WeightUse:
    """A weight and the ops that read it, by their indices."""

    name: str
    tensor: torch.Tensor
    readers: tuple[int, ...]
    codec: Codec = "plain"

    @property
    def nbytes(self) -> int:
        return stored_bytes(self.tensor)


def lay_out(
    archive: str, uses: Sequence[WeightUse], tables: Mapping[str, torch.Tensor], machine: str | None = None
) -> Manifest:
    """Group weights into segments, in the order in which ops first read them; unread weights come last."""
    last = 1 + max((r for use in uses for r in use.readers), default=0)
    groups: dict[tuple[int, ...], list[WeightUse]] = {}
    for use in sorted(uses, key=lambda u: (u.readers or (last,), u.name)):
        groups.setdefault(use.readers, []).append(use)
    segments: list[Segment] = []
    offset, alignment = 0, PIECE_ALIGNMENT if machine is None else PACKED_ALIGNMENT
    for group in _coalesce([part for same in groups.values() for part in _parted(same)], alignment):
        segment = _segment(offset, group, alignment)
        segments.append(segment)
        offset += segment.file_bytes
    placed: list[Table] = []
    for name, table in tables.items():
        placed.append(Table(name, dtype_name(table.dtype), tuple(table.shape), offset, table.nbytes))
        offset += aligned(table.nbytes, BLOCK_BYTES)
    return Manifest(archive, tuple(segments), tuple(placed), machine)


def _parted(group: list[WeightUse]) -> list[list[WeightUse]]:
    """Return one segment for all weights except the second and further large ones, which get a segment each."""
    apart = {use.name: use for use in [u for u in group if u.nbytes >= LARGE_BYTES][1:]}
    return [[use for use in group if use.name not in apart], *([use] for use in apart.values())]


def _coalesce(groups: list[list[WeightUse]], alignment: int) -> list[list[WeightUse]]:
    joined: list[list[WeightUse]] = []
    size = COALESCE_BYTES
    for group in groups:
        nbytes = sum(aligned(u.nbytes, alignment) for u in group)
        if joined and size + nbytes <= COALESCE_BYTES:
            joined[-1] = joined[-1] + group
            size += nbytes
        else:
            joined.append(group)
            size = nbytes
    return joined


def _segment(offset: int, group: Sequence[WeightUse], alignment: int) -> Segment:
    pieces: list[Piece] = []
    position = 0
    for use in group:
        t = use.tensor
        stride, layout = ((), layout_of(t)) if is_packed(t) else (tuple(t.stride()), None)
        pieces.append(
            Piece(
                name=use.name,
                dtype=dtype_name(t.dtype),
                shape=tuple(t.shape),
                stride=stride,
                offset=position,
                nbytes=use.nbytes,
                layout=layout,
                codec=use.codec,
            )
        )
        position += aligned(use.nbytes, alignment)
    segment = Segment(offset, aligned(position, BLOCK_BYTES), tuple(pieces))
    if segment.file_bytes < segment.nbytes:
        return segment
    plain = tuple(msgspec.structs.replace(piece, codec="plain") for piece in pieces)
    return Segment(offset, segment.nbytes, plain)


@dataclass(frozen=True, slots=True)
class StoredRange:
    """A segment or table in its file."""

    path: Path
    offset: int
    nbytes: int
    checksum: int | None
    """CRC-32 as written; None without a description."""
    digest: str


def write(
    path: Path,
    manifest: Manifest,
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    refuse_change: Callable[[], None] = lambda: None,
) -> None:
    """Write the ranges that no other model of the cache has and, last, the description, each with an atomic rename.

    `refuse_change` is called when all weights have been read; if it raises, nothing is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    contents: list[Callable[[], Iterator[pieces.Block]]] = [
        *(partial(_segment_blocks, segment, weights) for segment in manifest.segments),
        *(partial(_table_blocks, tables[table.name]) for table in manifest.tables),
    ]
    named = [_named(blocks) for blocks in contents]
    written = [
        WrittenPiece(digest, nbytes, blocks)
        for (_, digest), (_, nbytes), blocks in zip(named, manifest.ranges, contents, strict=True)
    ]
    with pieces.locked(path.parent.parent) as folder:
        reused = pieces.find(folder, written)
        packs = list(dict.fromkeys(pack for pack, _ in reused.values()))
        files = [f"../{pieces.FOLDER}/{pack}" for pack in packs]
        places = {n: Place(packs.index(pack), o, written[n].digest) for n, (pack, o) in reused.items()}
        own = {n: piece for n, piece in enumerate(written) if n not in reused}
        file = path.with_suffix(f".{secrets.token_hex(8)}.bin") if reused else path
        if own or not reused:
            end = 0
            with cache_file.replacing(file) as fd:
                for n, piece in own.items():
                    places[n] = Place(len(files), end, piece.digest)
                    _write_blocks(fd, piece.blocks(), end)
                    end += piece.nbytes
                os.ftruncate(fd, end)
                refuse_change()
            files.append(file.name if reused else "")
            pieces.add(folder, file, {piece.digest: places[n].offset for n, piece in own.items()})
        refuse_change()
        checksums = tuple(checksum for checksum, _ in named)
        description = Description(manifest, checksums, tuple(files), tuple(places[n] for n in sorted(places)))
        cache_file.write(description_path(path), msgspec.json.encode(description))
        for other in path.parent.glob(f"{path.stem}*{path.suffix}"):
            if other.name not in files and (other != path or "" not in files):
                other.unlink()


def _segment_blocks(segment: Segment, weights: Mapping[str, torch.Tensor]) -> Iterator[pieces.Block]:
    """Yield a segment's bytes as stored."""
    end = 0
    for piece, position in zip(segment.pieces, segment.file_offsets, strict=True):
        yield np.zeros(position - end, np.uint8)
        end = position
        raw = bytes_of(weights[piece.name])
        for start in range(0, len(raw), _COPY_BYTES):
            part = encode(piece.codec, raw[start : start + _COPY_BYTES])
            yield part
            end += len(part)
    yield np.zeros(segment.file_bytes - end, np.uint8)


def _table_blocks(table: torch.Tensor) -> Iterator[pieces.Block]:
    raw = bytes_of(table.contiguous())
    for start in range(0, len(raw), _COPY_BYTES):
        yield raw[start : start + _COPY_BYTES]
    yield np.zeros(aligned(len(raw), BLOCK_BYTES) - len(raw), np.uint8)


def _named(blocks: Callable[[], Iterator[pieces.Block]]) -> tuple[int, str]:
    """Return the CRC-32 and the digest of a range."""
    crc, digest = 0, hashlib.blake2b(digest_size=32)
    for block in blocks():
        crc = zlib.crc32(block.data, crc)
        digest.update(block.data)
    return crc, digest.hexdigest()


def _write_blocks(fd: int, blocks: Iterator[pieces.Block], offset: int) -> None:
    for block in blocks:
        os.pwrite(fd, block.data, offset)
        offset += block.nbytes


def read(path: Path) -> Manifest | None:
    """Read and verify all ranges of a weights file, except those in use that were verified before.

    Returns its manifest, or None if anything is missing or damaged.
    """
    try:
        description = _described(path)
        return description.manifest if _is_whole(_ranges_of(path, description)) else None
    except (OSError, FormatError):
        return None


def _is_whole(ranges: Sequence[StoredRange]) -> bool:
    with open_files(ranges) as files:
        states = {path: pieces.state_of(fd) for path, fd in files.items()}
        for r in ranges:
            fd = files[r.path]
            if not HELD.is_verified(fd, r.offset, r.digest) and checksum(fd, r.offset, r.nbytes) != r.checksum:
                return False
        for path, fd in files.items():
            HELD.record(fd, states[path])
    return True


@contextmanager
def open_files(ranges: Iterable[StoredRange]) -> Iterator[dict[Path, int]]:
    """Open the files of some ranges, for the block. Raises OSError."""
    with ExitStack() as stack:
        paths = dict.fromkeys(r.path for r in ranges)
        yield {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in paths}


def manifest_of(path: Path) -> Manifest:
    """Return a weights file's manifest without reading the file. Raises FileNotFoundError and FormatError."""
    return _described(path).manifest


def files_of(path: Path) -> list[Path]:
    """Return the files with a weights file's bytes, then its description. Raises FileNotFoundError and FormatError."""
    return [*(_file(path, name) for name in _described(path).files), description_path(path)]


def stored_ranges(path: Path, manifest: Manifest) -> list[StoredRange]:
    """Return where the segments, then the tables, are stored.

    Without a matching description, they are in the file itself, and have no checksums.
    """
    try:
        description = _described(path)
    except (OSError, FormatError):
        description = None
    if description is None or description.manifest != manifest:
        return [StoredRange(path, offset, nbytes, None, "") for offset, nbytes in manifest.ranges]
    return _ranges_of(path, description)


def _ranges_of(path: Path, description: Description) -> list[StoredRange]:
    known = zip(description.places, description.manifest.ranges, description.checksums, strict=True)
    return [
        StoredRange(_file(path, description.files[place.file]), place.offset, nbytes, crc, place.digest)
        for place, (_, nbytes), crc in known
    ]


def _file(path: Path, name: str) -> Path:
    return Path(os.path.normpath(path.parent / name)) if name else path


def sweep(cache: Path) -> int:
    """Remove packs that no description names, and copy the others without pieces that none names.

    `cache` is the folder of lowered models. Open files stay as they are. Returns the bytes of disk space released.
    """
    with pieces.locked(cache) as folder:
        users: dict[str, list[tuple[Path, Description]]] = {}
        for path in cache.glob("*/weights-*.json"):
            with suppress(OSError, FormatError):
                description = _described(path)
                for name in description.files:
                    users.setdefault(name.rpartition("/")[2], []).append((path, description))
        released = 0
        for path in sorted(folder.glob("*.bin")):
            status = path.stat()
            if status.st_nlink > 1:  # its first model exists, and names all of it
                continue
            named = {
                place.offset: (nbytes, place.digest)
                for _, description in users.get(path.name, ())
                for place, (_, nbytes) in zip(description.places, description.manifest.ranges, strict=True)
                if description.files[place.file].endswith(path.name)
            }
            kept_bytes = sum(nbytes for nbytes, _ in named.values())
            if kept_bytes == status.st_size:
                continue
            if named:
                new, offsets = pieces.repack(folder, path.name, named)
                for other, description in users[path.name]:
                    _rename(other, description, path.name, new, offsets)
            path.unlink()
            released += status.st_size - kept_bytes
        pieces.remove_from_index(folder)
    return released


def _rename(path: Path, description: Description, old: str, new: str, offsets: Mapping[int, int]) -> None:
    """Write a description whose pieces in one pack are in another one, at other offsets."""
    index = next(n for n, name in enumerate(description.files) if name.endswith(old))
    description = _described(path)  # it may have been renamed for another pack
    places = [
        msgspec.structs.replace(place, offset=offsets[place.offset]) if place.file == index else place
        for place in description.places
    ]
    files = [f"../{pieces.FOLDER}/{new}" if n == index else name for n, name in enumerate(description.files)]
    changed = msgspec.structs.replace(description, places=tuple(places), files=tuple(files))
    cache_file.write(path, msgspec.json.encode(changed))


def checksum(fd: int, offset: int, nbytes: int) -> int:
    """Return the CRC-32 of a range of a file. Bytes beyond its end are left out. Raises OSError."""
    value = 0
    for start in range(0, nbytes, _COPY_BYTES):
        value = zlib.crc32(os.pread(fd, min(_COPY_BYTES, nbytes - start), offset + start), value)
    return value


def _described(path: Path) -> Description:
    raw = cache_file.read(description_path(path))
    return decode_as(raw, _decoder, "weights description", _DESCRIPTION_VERSION)


def description_path(path: Path) -> Path:
    return path.with_suffix(".json")


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of the bytes of a packed or dense tensor."""
    if tensor.numel() == 0:
        return np.empty(0, np.uint8)
    return raw_bytes(tensor) if is_packed(tensor) else dense_bytes(tensor)


def dense_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a view of the bytes of a dense tensor."""
    start = tensor.storage_offset() * tensor.element_size()
    own = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), start, (tensor.nbytes,), (1,))
    return own.numpy()
