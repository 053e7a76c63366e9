"""Memory budget of one inference of one model, and parsing of sizes."""

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
_LEAST_WITHOUT_UNIT = 1 << 20
"""Smaller numbers of bytes without a unit are rejected as mistakes."""


class Memory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A workspace, used during an inference, and a partition, which keeps its contents between inferences."""

    workspace_bytes: int
    partition_bytes: int = 0
    workspace_lasts: bool = msgspec.field(default=False, name="counted")
    """Whether the workspace keeps its contents between inferences, too, because nothing else uses it, as in a training
    step. Then residents need no addresses in a partition."""

    @property
    def nbytes(self) -> int:
        return self.workspace_bytes + self.partition_bytes

    @property
    def lasting_pool_bytes(self) -> int:
        """Bytes that residents without an address may take."""
        return self.workspace_bytes if self.workspace_lasts else 0

    @property
    def lasting_bytes(self) -> int:
        """Bytes that residents may take."""
        return self.partition_bytes + self.lasting_pool_bytes


def single_budget(nbytes: int) -> Memory:
    """Return one budget for everything: a workspace that lasts."""
    return Memory(nbytes, workspace_lasts=True)


def parse_size(text: str) -> int:
    """Parse a size such as 64MiB, 8GiB, 82MB or 2000000 into bytes. Raises ValueError."""
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"'{text}' is not a size; write it like 64MiB, 8GiB or 82MB")
    nbytes = round(float(match[1]) * _UNITS[match[2]])
    if not match[2] and 0 < nbytes < _LEAST_WITHOUT_UNIT:
        raise ValueError(
            f"'{text}' has no unit, and would be {nbytes} bytes; write {match[1]}MiB or {match[1]}GiB, or {match[1]}B"
        )
    if not 1 <= nbytes <= _LARGEST_BYTES:
        raise ValueError(f"'{text}' is out of range; it must be between 1 byte and {_LARGEST_BYTES >> 40} TiB")
    return nbytes


def parse_share(text: str) -> float | None:
    """Return 0.25 for 25%; None if `text` is not a percentage."""
    match = _NUMBER.fullmatch(text.strip())
    return float(match[1]) / 100 if match is not None and match[2] == "%" else None
