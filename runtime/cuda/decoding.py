"""Copies of encoded segments: they cross the link as stored, and kernels decode them on the device.

    link    | copy to slot 0 | copy to slot 1 | copy to slot 2 | ...
    swap_in |                | decode slot 0  | decode slot 1  | ...      to the plan's addresses

Copies run ahead through the slots of a staging buffer: one copy per segment, with kernels waiting for each, would cost
as much as encoding saves. Results equal the host's decoding: 16-bit values are widened exactly, 8-bit values are
multiplied once by their scale.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cohabit.runtime.cuda.driver import CudaDriver
from cohabit.runtime.cuda.staging import SLOT_BYTES, Staging
from cohabit.runtime.lowering.encoding.codec import HALVES, PART, Codec, encoded_bytes, int8_blocks
from cohabit.runtime.lowering.weights import Segment

_DIRECT_BYTES = 1 << 20
"""Plain parts of at least this size are copied directly to their destination; smaller ones pass through a slot."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a piece: its encoded bytes in the weights file, and its destination."""

    codec: Codec
    start: int
    nbytes: int
    """Encoded size."""
    destination: torch.Tensor
    """Bytes in the arena."""

    @property
    def end(self) -> int:
        return self.start + self.nbytes

    @property
    def is_direct(self) -> bool:
        return self.codec == "plain" and self.nbytes >= _DIRECT_BYTES


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A copy to a slot, and the kernels that decode it."""

    source: torch.Tensor
    arrived: torch.Tensor
    kernels: Sequence[Callable[[], object]]

    def decode(self) -> None:
        for kernel in self.kernels:
            kernel()


class EncodedCopy:
    """Callable that copies and decodes consecutive segments of pinned memory."""

    def __init__(
        self,
        driver: CudaDriver,
        host: torch.Tensor,
        segments: Sequence[Segment],
        destination: torch.Tensor,
        turn: int,
    ) -> None:
        """`host`: the weights file's bytes, pinned. `destination`: the segments' memory, consecutive.

        Copies with consecutive turns begin at different slots.
        """
        self._driver = driver
        self._host = host
        self._turn = turn
        self._groups = list(_grouped(list(_parts(segments, destination))))
        self._prepared: dict[int, _Arrival] = {}
        """By group, for the slot that it last had; not for captures, whose buffers are used once."""

    def __call__(self) -> None:
        staging = self._driver.staging()
        for number, group in enumerate(self._groups):
            if group[0].is_direct:
                self._driver.copy(group[0].destination, self._source(group))
            else:
                self._pass_through(staging, number)

    def _pass_through(self, staging: Staging, group: int) -> None:
        driver = self._driver
        with staging.turn:
            slot = staging.slots[(self._turn + group) % len(staging.slots)]
            if slot.free is None:  # first use: copies may run ahead from here on
                start = driver.event()
                driver.record(start)
                for unused in staging.slots:
                    unused.free = start
            assert slot.free is not None
            arrival, here = self._arrival(group, slot.memory, staging.captured), driver.event()
            with driver.on(staging.link):
                driver.wait(slot.free)
                driver.copy(arrival.arrived, arrival.source)
                driver.record(here)
            driver.wait(here)
            driver.decode(arrival.decode)
            slot.free = driver.event()
            driver.record(slot.free)

    def _arrival(self, group: int, slot: torch.Tensor, captured: bool) -> _Arrival:
        known = self._prepared.get(group)
        if known is None or known.arrived.data_ptr() != slot.data_ptr():
            with torch.inference_mode(False):  # threads both in and outside inference mode issue it
                source = self._source(self._groups[group])
                arrived = slot[: source.nbytes]
                known = _Arrival(source, arrived, _kernels(self._groups[group], arrived))
            if not captured:
                self._prepared[group] = known
        return known

    def _source(self, group: Sequence[_Part]) -> torch.Tensor:
        return self._host[group[0].start : group[-1].end]


def _parts(segments: Sequence[Segment], destination: torch.Tensor) -> Iterator[_Part]:
    """Yield the parts of a copy; encoded ones fit into a slot."""
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
    """Divide a piece into parts of whole codec blocks, each as large as fits into a slot. A plain piece is one part."""
    step = destination.nbytes if codec == "plain" else SLOT_BYTES // encoded_bytes(codec, 4 * PART) * 4 * PART
    for first in range(0, destination.nbytes, step or 1):
        own = destination[first : first + step]
        yield _Part(codec, start + encoded_bytes(codec, first), encoded_bytes(codec, own.nbytes), own)


def _grouped(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield groups of parts that cross the link in one copy: into a slot, or one large plain part directly."""
    group: list[_Part] = []
    for part in parts:
        if group and (part.is_direct or group[0].is_direct or part.end - group[0].start > SLOT_BYTES):
            yield group
            group = []
        group.append(part)
    if group:
        yield group


def _kernels(group: Sequence[_Part], arrived: torch.Tensor) -> list[Callable[[], object]]:
    """Return calls that decode parts: one per 16-bit type, one or two for plain parts, one or more per int8 part."""
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
