"""Sizes and rates as people write them: 64MiB, 8GiB, 82MB, 25%, 400MB/s."""

import math
import re

import msgspec

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}iB": 1 << (10 * power) for power, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}B": int(1000**power) for power, prefix in enumerate("KMGT", 1)},
}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z%]*)", re.ASCII)
_LARGEST_BYTES = 1 << 60


class FixedSize(msgspec.Struct, frozen=True, tag=True):
    nbytes: int

    def of(self, weights_bytes: int) -> int:
        return self.nbytes


class ShareOfWeights(msgspec.Struct, frozen=True, tag=True):
    """A share of the bytes of all models' parameters together."""

    share: float

    def of(self, weights_bytes: int) -> int:
        return math.ceil(self.share * weights_bytes)


MemorySize = FixedSize | ShareOfWeights


def parse_size(text: str) -> int:
    """Return the bytes that `text` means. Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"'{text}' is not a size; write it like 64MiB, 8GiB or 82MB")
    nbytes = round(float(match[1]) * _UNITS[match[2]])
    if not 1 <= nbytes <= _LARGEST_BYTES:
        raise ValueError(f"'{text}' is out of range; it must be between 1 byte and {_LARGEST_BYTES >> 40} TiB")
    return nbytes


def write_size(nbytes: int) -> str:
    """Return the inverse of `parse_size`, in the largest binary unit that needs no fraction."""
    power = next(p for p in (4, 3, 2, 1, 0) if nbytes % (1 << 10 * p) == 0)
    return f"{nbytes >> 10 * power}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_memory(text: str) -> MemorySize:
    """Read a size, or a percentage of the weights. Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] != "%":
        return FixedSize(parse_size(text))
    share = float(match[1]) / 100
    if not 0 < share <= 100:
        raise ValueError(f"'{text}' is out of range; a share of the weights lies above 0% and up to 10000%")
    return ShareOfWeights(share)


def parse_bandwidth(text: str) -> int:
    """Return bytes per second from a form like 400MB/s. Raises ValueError."""
    return parse_size(text.strip().removesuffix("/s"))
