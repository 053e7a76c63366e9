"""The weights file: a model's parameters in plan order, ready to be copied or read into the arena.

Parameters are grouped into *segments*, the units of swapping: weights that the same ops read, piece after piece, padded
to O_DIRECT's block size. Pieces may be encoded (`runtime.lowering.encoding.codec`); their segment then has fewer bytes
in the file than in memory. Embedding tables follow the segments and are never swapped.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cohabit.planner import cache_file
from cohabit.planner.errors import FormatError
from cohabit.planner.graph import aligned, decode_as, fingerprint
from cohabit.runtime.lowering.encoding.codec import CODECS, PART, Codec, encode, encoded_bytes
from cohabit.runtime.lowering.packing import is_packed, layout_of, raw_bytes, stored_bytes

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
_DESCRIPTION_VERSION = 5

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


class Manifest(msgspec.Struct, frozen=True):
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
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


class Description(msgspec.Struct, frozen=True):
    """The description file of a weights file: its manifest, and the CRC-32 of each of its ranges."""

    manifest: Manifest
    checksums: tuple[int, ...]
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


def write(
    path: Path,
    manifest: Manifest,
    weights: Mapping[str, torch.Tensor],
    tables: Mapping[str, torch.Tensor],
    refuse_change: Callable[[], None] = lambda: None,
) -> None:
    """Write the weights file and, last, its description, each with an atomic rename.

    `refuse_change` is called when all weights have been read; if it raises, nothing is kept.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with cache_file.replacing(path) as fd:
        os.ftruncate(fd, manifest.file_bytes)
        for segment in manifest.segments:
            for piece, position in zip(segment.pieces, segment.file_offsets, strict=True):
                _write_tensor(fd, weights[piece.name], segment.offset + position, piece.codec)
        for table in manifest.tables:
            _write_tensor(fd, tables[table.name].contiguous(), table.offset)
        refuse_change()
    cache_file.write(description_path(path), msgspec.json.encode(Description(manifest, _checksums(path, manifest))))


def read(path: Path) -> Manifest | None:
    """Read and verify a whole weights file. Returns its manifest, or None if it is missing or damaged."""
    try:
        description = _described(path)
        manifest = description.manifest
        whole = path.stat().st_size == manifest.file_bytes and _checksums(path, manifest) == description.checksums
    except (OSError, FormatError):
        return None
    return manifest if whole else None


def manifest_of(path: Path) -> Manifest:
    """Return a weights file's manifest without reading the file. Raises FileNotFoundError and FormatError."""
    return _described(path).manifest


def known_checksums(path: Path, manifest: Manifest) -> tuple[int, ...] | None:
    """Return the CRC-32 of each range of a weights file as written; None without a matching description."""
    try:
        description = _described(path)
    except (OSError, FormatError):
        return None
    return description.checksums if description.manifest == manifest else None


def checksum(fd: int, offset: int, nbytes: int) -> int:
    """Return the CRC-32 of a range of a file. Bytes beyond its end are left out. Raises OSError."""
    value = 0
    for start in range(0, nbytes, _COPY_BYTES):
        value = zlib.crc32(os.pread(fd, min(_COPY_BYTES, nbytes - start), offset + start), value)
    return value


def _checksums(path: Path, manifest: Manifest) -> tuple[int, ...]:
    with path.open("rb", buffering=0) as file:
        return tuple(checksum(file.fileno(), offset, nbytes) for offset, nbytes in manifest.ranges)


def _described(path: Path) -> Description:
    raw = cache_file.read(description_path(path))
    return decode_as(raw, _decoder, "weights description", _DESCRIPTION_VERSION)


def description_path(path: Path) -> Path:
    return path.with_suffix(".json")


def _write_tensor(fd: int, tensor: torch.Tensor, offset: int, codec: Codec = "plain") -> None:
    raw = bytes_of(tensor)
    for position in range(0, len(raw), _COPY_BYTES):
        part = encode(codec, raw[position : position + _COPY_BYTES])
        os.pwrite(fd, part.data, offset)
        offset += len(part)


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
