"""An input that a model is exported with, as `--input` declares it. Importing this module does not import torch."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

_DEFAULT_LARGEST = 512
_DECLARED = re.compile(r"([^:]+):([A-Za-z0-9]+):(-?[0-9]+(?:,-?[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """`dims` has -1 first for the batch, and -1 elsewhere for dynamic dimensions."""

    name: str
    datatype: str
    """KServe's name."""
    dims: tuple[int, ...]
    bound: int | None = None
    """Exclusive upper bound of integer examples; None if unknown."""

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return tuple(dim if dim >= 0 else length if position else batch for position, dim in enumerate(self.dims))


def largest_size(inputs: Sequence[DeclaredInput], asked: int | None) -> int:
    """Return the maximum size of the dynamic dimensions other than the batch; 0 if there are none."""
    if not any(dim < 0 for given in inputs for dim in given.dims[1:]):
        return 0
    return asked or _DEFAULT_LARGEST


def parse_input(text: str) -> DeclaredInput:
    """Read NAME:TYPE:DIM,DIM,... Raises ValueError."""
    match = _DECLARED.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not an input; write it like image:FP32:-1,3,224,224")
    dims = tuple(map(int, match[3].split(",")))
    if min(dims) < -1 or 0 in dims:
        raise ValueError(f"'{text}': a dimension is a size, or -1: the first is then the batch, others are dynamic")
    return DeclaredInput(match[1], match[2].upper(), dims)
