"""Codecs give back what they were given: every bit in 16 bits where that is exact, and 8 bits as written down here."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cohabit.runtime.lowering.encoding.codec import (
    BLOCK,
    CODECS,
    PART,
    Bytes,
    Codec,
    decoding,
    encode,
    encoded_bytes,
    exact_codec,
)

COUNTS = st.one_of(
    st.integers(1, 3 * BLOCK),
    st.integers(-2 * BLOCK, 2 * BLOCK).map(lambda n: PART + n),
    st.integers(1, 5 * PART),
)
SPECIAL = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0, 1e-40, -65504.0, 2.0**-24])


def raw(numbers: torch.Tensor) -> Bytes:
    return numbers.contiguous().view(torch.uint8).numpy()


def numbers_of(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, generator=generator) * 10 ** torch.randint(-3, 3, (count,), generator=generator).float()
    )


def expected(codec: Codec, numbers: torch.Tensor) -> torch.Tensor:
    """What decoding returns, computed number by number."""
    if codec == "plain":
        return numbers
    if codec != "int8":
        return numbers.to(getattr(torch, codec)).float()
    decoded = numbers.clone()
    for first in range(0, len(numbers), BLOCK):
        block = numbers[first : first + BLOCK]
        scale = block.abs().max() / 127
        decoded[first : first + BLOCK] = (block / scale).round() * scale if scale else 0.0
    return decoded


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CODECS), COUNTS, st.integers(0, 99), st.booleans(), st.sampled_from([1, 2]))
def test_numbers_are_decoded_beside_and_over_their_encoded_bytes(
    codec: Codec, count: int, seed: int, in_place: bool, threads: int
) -> None:
    numbers = numbers_of(count, seed)
    encoded = encode(codec, raw(numbers))
    assert len(encoded) == encoded_bytes(codec, 4 * count)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        if in_place:  # as in a segment: pieces begin at multiples of 64 bytes, and encoded ones end the memory
            memory = np.zeros(max(-(-4 * count // 64) * 64, -(-len(encoded) // 4) * 4), np.uint8)
            start = len(memory) - -(-len(encoded) // 4) * 4
            memory[start : start + len(encoded)] = encoded
            found = memory[: 4 * count]
            decoding(codec, memory[start : start + len(encoded)], found, in_place=True)()
        else:
            found = np.zeros(4 * count, np.uint8)
            decoding(codec, encoded, found)()
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.from_numpy(found).view(torch.float32), expected(codec, numbers))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["bfloat16", "float16"]), st.integers(1, 5000), st.integers(0, 99), st.booleans())
def test_what_16_bits_can_hold_is_recognized_and_keeps_every_bit(
    kind: Codec, count: int, seed: int, special: bool
) -> None:
    dtype = getattr(torch, kind)
    numbers = numbers_of(count, seed).to(dtype).float()
    if special:
        numbers = torch.cat([numbers, SPECIAL.to(dtype).float()])
    codec = exact_codec(raw(numbers))
    assert codec in ("bfloat16", "float16")
    found = np.zeros(4 * len(numbers), np.uint8)
    decoding(codec, encode(codec, raw(numbers)), found)()
    assert np.array_equal(found, raw(numbers)), "every bit, of zeros, too"


@pytest.mark.parametrize("position", [0, 77, 4999])
def test_one_number_that_needs_more_bits_keeps_all_plain(position: int) -> None:
    numbers = numbers_of(5000, 0).half().float()
    numbers[position] = 1 / 3
    assert exact_codec(raw(numbers)) == "plain"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_nan_stays_plain_because_torch_converts_its_bits_in_more_than_one_way(kind: torch.dtype) -> None:
    numbers = numbers_of(100, 0).to(kind).float()
    numbers[50] = torch.nan
    assert exact_codec(raw(numbers)) == "plain"


def test_numbers_beyond_float16_s_range_are_not_taken_for_it() -> None:
    numbers = torch.full((100,), 65504.0 * 2)
    numbers[0] = 1 + 2.0**-9  # which bfloat16 rounds
    assert exact_codec(raw(numbers)) == "plain"
