"""An input that a model is exported with, as `--input` declares it. Importing this does not import torch."""

import re
from dataclasses import dataclass

_DECLARED = re.compile(r"([^:]+):([A-Za-z0-9]+):(-?[0-9]+(?:,-?[0-9]+)*)")


@dataclass(frozen=True, slots=True)
class DeclaredInput:
    """`dims` has -1 in front where the batch goes, and behind it where a dynamic sequence length goes."""

    name: str
    datatype: str
    """KServe's name."""
    dims: tuple[int, ...]
    bound: int | None = None
    """Examples of integers are below it; None where that is not known."""

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return tuple(dim if dim >= 0 else length if position else batch for position, dim in enumerate(self.dims))


def parse_input(text: str) -> DeclaredInput:
    """Read NAME:TYPE:DIM,DIM,... Raises ValueError."""
    match = _DECLARED.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not an input; write it like image:FP32:-1,3,224,224")
    dims = tuple(map(int, match[3].split(",")))
    if min(dims[1:], default=0) < 0 or dims[0] < -1:
        raise ValueError(f"'{text}': only the first dimension may be -1, which is the batch")
    return DeclaredInput(match[1], match[2].upper(), dims)
