"""Sizes and rates as people write them: 64MiB, 8GiB, 82MB, 25%, 400MB/s."""

import math

import msgspec

from cohabit.planner.memory import parse_share, parse_size


class FixedSize(msgspec.Struct, frozen=True, tag=True):
    nbytes: int

    def of(self, weights_bytes: int) -> int:
        return self.nbytes


class ShareOfWeights(msgspec.Struct, frozen=True, tag=True):
    """A fraction of the total bytes of all models' parameters."""

    share: float

    def of(self, weights_bytes: int) -> int:
        return math.ceil(self.share * weights_bytes)


MemorySize = FixedSize | ShareOfWeights


def write_size(nbytes: int) -> str:
    """Write a size for `parse_size`, in the largest binary unit that needs no fraction."""
    power = next(p for p in (4, 3, 2, 1, 0) if nbytes % (1 << 10 * p) == 0)
    return f"{nbytes >> 10 * power}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def parse_memory(text: str) -> MemorySize:
    """Read a size, or a percentage of the weights. Raises ValueError."""
    share = parse_share(text)
    if share is None:
        return FixedSize(parse_size(text))
    if not 0 < share <= 100:
        raise ValueError(f"'{text}' is out of range; a share of the weights lies above 0% and up to 10000%")
    return ShareOfWeights(share)


def parse_bandwidth(text: str) -> int:
    """Read a bandwidth such as 400MB/s, in bytes per second. Raises ValueError."""
    return parse_size(text.strip().removesuffix("/s"))
