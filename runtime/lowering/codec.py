"""Codecs: how the bytes of float32 weights are stored and copied, in 16 or 8 bits, while ops compute with float32.

A codec works on consecutive numbers as they lie in memory, whatever the layout: packed weights are encoded as packed.
Decoding is done by torch's own vectorized conversions, in parts small enough to stay in the thread that copies and in
its processor's cache.
"""

from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

Codec = Literal["plain", "bfloat16", "float16", "int8"]
"""`plain` bytes are stored as they are. `int8` has a float32 scale for every block of `BLOCK` numbers."""
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)
BLOCK: Final = 64
PART: Final = 480 * BLOCK
"""Numbers that are decoded at a time. From 32,768 on torch divides a conversion among threads."""

_TYPES: Final[dict[Codec, torch.dtype]] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SCALE_BYTES: Final = 4
_PART_BLOCKS: Final = PART // BLOCK
_PART_BYTES: Final = _PART_BLOCKS * _SCALE_BYTES + PART
"""Of a whole part in int8: its scales, then its numbers."""
_GROUP: Final = 4
"""Parts in int8 that are converted, then scaled: they stay in a processor's second cache."""
_MOST: Final = 127

Bytes = npt.NDArray[np.uint8]


def encoded_bytes(codec: Codec, nbytes: int) -> int:
    """Return what `nbytes` bytes of float32 take in a codec."""
    if codec == "plain":
        return nbytes
    numbers = nbytes // 4
    return 2 * numbers if codec in _TYPES else numbers + -(-numbers // BLOCK) * _SCALE_BYTES


def exact_codec(raw: Bytes) -> Codec:
    """Return the 16-bit codec that keeps every bit of float32 numbers, or `plain` if there is none."""
    numbers = torch.from_numpy(raw).view(torch.float32)
    if _has_low_bits(numbers, 0x0000FFFF) is False:
        return "bfloat16"
    if _has_low_bits(numbers, 0x00001FFF):  # a float16 has 10 bits of mantissa
        return "plain"
    parts = torch.split(numbers, 1 << 20)
    same = (torch.equal(p.half().float().view(torch.int32), p.view(torch.int32)) for p in parts)
    return "float16" if all(same) else "plain"


def _has_low_bits(numbers: torch.Tensor, mask: int) -> bool:
    return any(bool((part & mask).any()) for part in torch.split(numbers.view(torch.int32), 1 << 20))


def encode(codec: Codec, raw: Bytes) -> Bytes:
    """Return float32 numbers in a codec, `encoded_bytes` of them. A whole number of parts can be encoded one by one."""
    if codec == "plain":
        return raw
    numbers = torch.from_numpy(raw).view(torch.float32)
    if codec in _TYPES:
        return numbers.to(_TYPES[codec]).view(torch.uint8).numpy()
    return np.concatenate([_quantized(part) for part in torch.split(numbers, PART)])


def _quantized(numbers: torch.Tensor) -> Bytes:
    """One part: the scales of its blocks, then its numbers as multiples of them."""
    blocks = -(-len(numbers) // BLOCK)
    padded = torch.zeros(blocks * BLOCK)
    padded[: len(numbers)] = numbers
    padded = padded.view(blocks, BLOCK)
    scales = padded.abs().amax(1, keepdim=True) / _MOST
    multiples = (padded / torch.where(scales > 0, scales, 1.0)).round().to(torch.int8)
    own = multiples.view(-1)[: len(numbers)]
    return np.concatenate([scales.view(torch.uint8).view(-1).numpy(), own.view(torch.uint8).numpy()])


def decode(codec: Codec, source: Bytes, destination: Bytes, *, in_place: bool = False) -> None:
    """Fill the destination with the float32 numbers that the source encodes.

    With `in_place` both may overlap: no number may lie behind bytes that encode a later one.
    """
    if codec == "plain":
        np.copyto(destination, source)  # numpy sees an overlap
        return
    encoded, numbers = torch.from_numpy(source), torch.from_numpy(destination).view(torch.float32)
    if codec == "int8":
        _decode_blocks(encoded, numbers, in_place=in_place)
        return
    targets, parts = torch.split(numbers, PART), torch.split(encoded.view(_TYPES[codec]), PART)
    clear = min(len(parts), _clear_of(source, destination, 2 * PART)) if in_place else len(parts)
    if clear:
        torch._foreach_copy_(targets[:clear], parts[:clear])
    for target, part in zip(targets[clear:], parts[clear:], strict=True):
        target.copy_(part.clone())


def _clear_of(source: Bytes, destination: Bytes, part_bytes: int) -> int:
    """Return how many of the first parts are written before the place where their own bytes begin.

    Part k is written up to byte (k + 1) * 4 * PART of the destination; its bytes begin at k * part_bytes.
    """
    ahead = int(source.ctypes.data) - int(destination.ctypes.data) - 4 * PART
    return max(0, ahead // (4 * PART - part_bytes) + 1) if ahead >= 0 else 0


def _decode_blocks(encoded: torch.Tensor, numbers: torch.Tensor, *, in_place: bool) -> None:
    whole = len(numbers) // PART
    blocks = encoded[: whole * _PART_BYTES].view(whole, _PART_BYTES)
    split = _PART_BLOCKS * _SCALE_BYTES
    scales = blocks[:, :split].view(torch.float32).unsqueeze(2).unbind(0)
    multiples = blocks[:, split:].view(torch.int8).view(whole, _PART_BLOCKS, BLOCK).unbind(0)
    targets = numbers[: whole * PART].view(whole, _PART_BLOCKS, BLOCK).unbind(0)
    clear, step = whole, _GROUP
    if in_place:  # a part's numbers may lie over the scales of the one before it
        clear = min(whole, _clear_of(encoded.numpy(), numbers.view(torch.uint8).numpy(), _PART_BYTES))
        step = 1
    for first in range(0, clear, step):
        group = slice(first, min(first + step, clear))
        torch._foreach_copy_(targets[group], multiples[group])
        torch._foreach_mul_(targets[group], scales[group])
    for k in range(clear, whole):
        own_scales, own = scales[k].clone(), multiples[k].clone()
        targets[k].copy_(own).mul_(own_scales)
    if rest := len(numbers) - whole * PART:
        last, count = encoded[whole * _PART_BYTES :].clone(), -(-rest // BLOCK)
        split = count * _SCALE_BYTES
        each = last[:split].view(torch.float32).repeat_interleave(BLOCK)[:rest]
        torch.mul(last[split:].view(torch.int8), each, out=numbers[whole * PART :])
