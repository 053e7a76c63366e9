"""Copies of encoded segments: they cross the link as they are stored, and kernels of the same stream decode them.

What is encoded arrives in a staging buffer of the stream, as many pieces at once as it holds. Decoding takes the
device's memory a hundredth of the time that the link takes. Numbers are those that the host would decode: 16 bits are
widened exactly, 8 bits are multiplied once by their scale.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cohabit.runtime.cuda.api import STAGING_BYTES, Driver
from cohabit.runtime.lowering.encoding.codec import HALVES, PART, Codec, encoded_bytes, int8_blocks
from cohabit.runtime.lowering.weights import Segment

_DIRECT_BYTES = 1 << 20
"""Plain pieces from this size on are copied to their place; smaller ones arrive with their encoded neighbours."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Some of a piece's numbers: where they are in the host's bytes, and where they go."""

    codec: Codec
    start: int
    nbytes: int
    """Encoded."""
    destination: torch.Tensor
    """Bytes in the arena."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def is_direct(self) -> bool:
        return self.codec == "plain" and self.nbytes >= _DIRECT_BYTES


@dataclass(frozen=True, slots=True)
class _Transfer:
    """A copy, and the kernels that decode what has arrived; without kernels it goes to its place."""

    source: torch.Tensor
    destination: torch.Tensor
    kernels: Sequence[Callable[[], object]] = ()

    def decode(self) -> None:
        for kernel in self.kernels:
            kernel()


class EncodedCopy:
    """Copies and decodes segments that follow one another in pinned memory, each time that it is called."""

    def __init__(
        self, driver: Driver, host: torch.Tensor, segments: Sequence[Segment], destination: torch.Tensor
    ) -> None:
        """`host`: the weights file's bytes, pinned. `destination`: the segments' memory, one after the other."""
        self._driver = driver
        self._host = host
        self._groups = list(_grouped(list(_parts(segments, destination))))
        self._prepared: dict[int, list[_Transfer]] = {}
        """By the address of the staging buffer."""

    def __call__(self) -> None:
        driver = self._driver
        for transfer in self._transfers(driver.staging()):
            driver.copy(transfer.destination, transfer.source)
            if transfer.kernels:
                driver.decode(transfer.decode)

    def _transfers(self, staging: torch.Tensor) -> list[_Transfer]:
        known = self._prepared.get(staging.data_ptr())
        if known is None:
            with torch.inference_mode(False):  # issued by threads in either mode
                known = [self._transfer(group, staging) for group in self._groups]
            self._prepared[staging.data_ptr()] = known
        return known

    def _transfer(self, group: Sequence[_Part], staging: torch.Tensor) -> _Transfer:
        source = self._host[group[0].start : group[-1].end]
        if group[0].is_direct:
            return _Transfer(source, group[0].destination)
        arrived = staging[: source.nbytes]
        return _Transfer(source, arrived, _kernels(group, arrived))


def _parts(segments: Sequence[Segment], destination: torch.Tensor) -> Iterator[_Part]:
    """Yield what a copy consists of, each part small enough for the staging buffer."""
    begin = 0
    for segment in segments:
        if not segment.is_encoded:
            yield _Part("plain", segment.offset, segment.nbytes, destination[begin : begin + segment.nbytes])
        else:
            for piece, offset in zip(segment.pieces, segment.file_offsets, strict=True):
                own = destination[begin + piece.offset : begin + piece.offset + piece.nbytes]
                yield from _divided(piece.codec, segment.offset + offset, own)
        begin += segment.nbytes


def _divided(codec: Codec, start: int, destination: torch.Tensor) -> Iterator[_Part]:
    """Divide a piece into whole parts of its codec, as many at once as the staging buffer holds."""
    step = destination.nbytes if codec == "plain" else STAGING_BYTES // encoded_bytes(codec, 4 * PART) * 4 * PART
    for first in range(0, destination.nbytes, step or 1):
        own = destination[first : first + step]
        yield _Part(codec, start + encoded_bytes(codec, first), encoded_bytes(codec, own.nbytes), own)


def _grouped(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield parts that cross the link in one copy."""
    group: list[_Part] = []
    for part in parts:
        if group and (part.is_direct or group[0].is_direct or part.end - group[0].start > STAGING_BYTES):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _kernels(group: Sequence[_Part], arrived: torch.Tensor) -> list[Callable[[], object]]:
    """Return calls that decode parts: one for all of each 16-bit type, and for what is plain; one or more per int8."""
    kernels: list[Callable[[], object]] = []
    pairs: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for part in group:
        encoded = arrived[part.start - group[0].start :][: part.nbytes]
        if part.codec == "int8":
            own = int8_blocks(encoded, part.destination.view(torch.float32))
            kernels += [partial(torch.mul, b.multiples, b.scales, out=b.targets) for b in own]
        elif part.codec == "plain":
            dtype = torch.int32 if part.nbytes % 4 == 0 else torch.uint8
            pairs.setdefault(dtype, []).append((part.destination.view(dtype), encoded.view(dtype)))
        else:
            dtype = HALVES[part.codec]
            pairs.setdefault(dtype, []).append((part.destination.view(torch.float32), encoded.view(dtype)))
    for both in pairs.values():
        targets, sources = zip(*both, strict=True)
        kernels.append(partial(torch._foreach_copy_, targets, sources))
    return kernels
