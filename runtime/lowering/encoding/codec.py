"""Codecs: store and copy float32 weights in 16 or 8 bits, while ops compute in float32.

A codec works on consecutive numbers in memory, whatever the layout: packed weights are encoded as packed. Decoding uses
torch's vectorized conversions, in parts small enough to stay in the copying thread and in its processor's cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

Codec = Literal["plain", "bfloat16", "float16", "int8"]
"""`plain` bytes are stored as they are. `int8` has a float32 scale per block of `BLOCK` numbers."""
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)
BLOCK: Final = 64
PART: Final = 480 * BLOCK
"""Numbers decoded at a time. From 32,768 on, torch splits a conversion among threads."""

HALVES: Final[dict[Codec, torch.dtype]] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtype of each 16-bit codec."""
_SCALE_BYTES: Final = 4
_PART_BLOCKS: Final = PART // BLOCK
_PART_BYTES: Final = _PART_BLOCKS * _SCALE_BYTES + PART
"""Bytes of a whole int8 part: its scales, then its numbers."""
_GROUP: Final = 8
"""Number of int8 parts that one thread converts, then scales: they stay in the processor's L2 cache."""
_MOST: Final = 127
_COMPARED: Final = 1 << 20
"""Numbers compared at a time."""

Bytes = npt.NDArray[np.uint8]


def encoded_bytes(codec: Codec, nbytes: int) -> int:
    """Return the encoded size of `nbytes` bytes of float32."""
    if codec == "plain":
        return nbytes
    numbers = nbytes // 4
    return 2 * numbers if codec in HALVES else numbers + -(-numbers // BLOCK) * _SCALE_BYTES


def exact_codec(raw: Bytes) -> Codec:
    """Return the 16-bit codec that keeps every bit of float32 numbers, or `plain` if there is none.

    NaN has none: torch converts its bits in more than one way.
    """
    numbers = torch.from_numpy(raw).view(torch.float32)
    if not _has_low_bits(numbers, 0x0000FFFF):
        return "plain" if bool(numbers.isnan().any()) else "bfloat16"
    if _has_low_bits(numbers, 0x00001FFF):  # a float16 has 10 bits of mantissa
        return "plain"
    same = (torch.equal(part.half().float(), part) for part in torch.split(numbers, _COMPARED))
    return "float16" if all(same) else "plain"


def _has_low_bits(numbers: torch.Tensor, mask: int) -> bool:
    return any(bool((part & mask).any()) for part in torch.split(numbers.view(torch.int32), _COMPARED))


def encode(codec: Codec, raw: Bytes) -> Bytes:
    """Encode float32 numbers to `encoded_bytes` bytes. A whole number of parts can be encoded part by part."""
    if codec == "plain":
        return raw
    numbers = torch.from_numpy(raw).view(torch.float32)
    if codec in HALVES:
        return numbers.to(HALVES[codec]).view(torch.uint8).numpy()
    return np.concatenate([_quantized(part) for part in torch.split(numbers, PART)])


def _quantized(numbers: torch.Tensor) -> Bytes:
    """Return one part: the scales of its blocks, then its numbers as multiples of them."""
    blocks = -(-len(numbers) // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: len(numbers)] = numbers
    padded = padded.view(blocks, BLOCK)
    scales = padded.abs().amax(1, keepdim=True) / _MOST
    multiples = (padded / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    own = multiples.view(-1)[: len(numbers)]
    return np.concatenate([scales.view(torch.uint8).view(-1).numpy(), own.view(torch.uint8).numpy()])


@dataclass(frozen=True, slots=True)
class Decoding:
    """Decodes float32 numbers from their encoded bytes into their destination; can be called repeatedly."""

    codec: Codec
    encoded: torch.Tensor
    """uint8."""
    numbers: torch.Tensor
    in_place: bool
    """Whether the numbers may overlap the encoded bytes. No number lies behind the encoded bytes of a later one."""

    def __call__(self) -> None:
        if self.codec == "plain":
            np.copyto(self.numbers.numpy(), self.encoded.numpy())  # numpy sees an overlap
        elif self.codec == "int8":
            self._scale_blocks()
        else:
            self._convert()

    def _convert(self) -> None:
        encoded = self.encoded.view(HALVES[self.codec])
        if not self.in_place and torch.get_num_threads() == 1:
            self.numbers.copy_(encoded)
            return
        targets, parts = torch.split(self.numbers, PART), torch.split(encoded, PART)
        clear = min(len(parts), self._clear(2 * PART))
        if clear:
            torch._foreach_copy_(targets[:clear], parts[:clear])
        for target, part in zip(targets[clear:], parts[clear:], strict=True):
            target.copy_(part.clone())

    def _scale_blocks(self) -> None:
        whole = len(self.numbers) // PART
        multiples, scales, targets = _whole_parts(self.encoded, self.numbers)
        clear = min(whole, self._clear(_PART_BYTES))
        # In place, a part's numbers may overlap the scales of the part before.
        at_once = 1 if self.in_place or torch.get_num_threads() > 1 else _GROUP
        for first in range(0, clear, at_once):
            group = slice(first, min(first + at_once, clear))
            targets[group].copy_(multiples[group]).mul_(scales[group])
        for k in range(clear, whole):
            own, scale = multiples[k].clone(), scales[k].clone()
            targets[k].copy_(own).mul_(scale)
        last = self.encoded[whole * _PART_BYTES :]
        for blocks in _blocks_of_rest(last.clone() if self.in_place else last, self.numbers[whole * PART :]):
            blocks.targets.copy_(blocks.multiples).mul_(blocks.scales)

    def _clear(self, part_bytes: int) -> int:
        """Return the number of leading parts whose numbers end before their own encoded bytes begin.

        Part k is written up to byte (k + 1) * 4 * PART of the numbers; its bytes begin at k * part_bytes.
        """
        if not self.in_place:
            return len(self.numbers) // PART + 1
        ahead = self.encoded.data_ptr() - self.numbers.data_ptr() - 4 * PART
        return ahead // (4 * PART - part_bytes) + 1 if ahead >= 0 else 0


class Blocks(NamedTuple):
    """Views of int8 numbers; `scales` broadcasts over `multiples`."""

    multiples: torch.Tensor
    scales: torch.Tensor
    targets: torch.Tensor
    """float32."""


def int8_blocks(encoded: torch.Tensor, numbers: torch.Tensor) -> list[Blocks]:
    """Return views that cover a tensor in int8: one of its whole parts, and at most two of the rest."""
    whole = len(numbers) // PART
    parts = [_whole_parts(encoded, numbers)] if whole else []
    return [*parts, *_blocks_of_rest(encoded[whole * _PART_BYTES :], numbers[whole * PART :])]


def _whole_parts(encoded: torch.Tensor, numbers: torch.Tensor) -> Blocks:
    whole, split = len(numbers) // PART, _PART_BLOCKS * _SCALE_BYTES
    parts = encoded[: whole * _PART_BYTES].view(whole, _PART_BYTES)
    return Blocks(
        parts[:, split:].view(torch.int8).view(whole, _PART_BLOCKS, BLOCK),
        parts[:, :split].view(torch.float32).unsqueeze(2),
        numbers[: whole * PART].view(whole, _PART_BLOCKS, BLOCK),
    )


def _blocks_of_rest(encoded: torch.Tensor, numbers: torch.Tensor) -> Iterator[Blocks]:
    """Yield the blocks of an incomplete part: those of `BLOCK` numbers, then the last one if it is shorter."""
    split, even = -(-len(numbers) // BLOCK) * _SCALE_BYTES, len(numbers) // BLOCK * BLOCK
    scales, multiples = encoded[:split].view(torch.float32), encoded[split:].view(torch.int8)
    if even:
        blocks = multiples[:even].view(-1, BLOCK), numbers[:even].view(-1, BLOCK)
        yield Blocks(blocks[0], scales[: even // BLOCK, None], blocks[1])
    if even < len(numbers):
        yield Blocks(multiples[even : len(numbers)], scales[-1], numbers[even:])


def decoding(codec: Codec, source: Bytes, destination: Bytes, *, in_place: bool = False) -> Decoding:
    """Prepare to fill `destination` with the float32 numbers, or plain bytes, that `source` encodes."""
    with torch.inference_mode(False):  # the decoding thread may be in another mode than this one
        encoded, numbers = torch.from_numpy(source), torch.from_numpy(destination)
        return Decoding(codec, encoded, numbers if codec == "plain" else numbers.view(torch.float32), in_place)
