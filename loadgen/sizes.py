"""Byte sizes as people write them: 82MiB, 1.5GiB, or a share of the weights."""

import math
import re
import zipfile
from pathlib import Path

from loadgen.errors import UsageError

_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B|%|)\s*")


def parse_memory(text: str, weights_bytes: int) -> int:
    """Return the bytes that `text` means: a size with a unit, or a percentage of `weights_bytes`."""
    match = _SIZE.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise UsageError(
            f"--memory {text}: give a size such as 82MiB or 1.5GiB, or a share of the weights such as 30%"
        )
    number, unit = float(match[1]), match[2]
    return math.ceil(number / 100 * weights_bytes if unit == "%" else number * _UNITS[unit])


def repository_weight_bytes(repository: Path) -> int:
    """Add up the weights in all `.pt2` files of a repository."""
    return sum(weight_bytes(path) for path in repository.glob("*/*/model.pt2"))


def weight_bytes(path: Path) -> int:
    """Add up the weights in one `.pt2` archive, without reading them."""
    with zipfile.ZipFile(path) as archive:
        return sum(i.file_size for i in archive.infolist() if "/data/weights/weight_" in i.filename)


def in_mib(nbytes: int) -> str:
    return f"{nbytes / (1 << 20):.1f} MiB"
