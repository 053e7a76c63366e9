"""Which activations set the size of the workspace, and what fewer batch sizes would leave of it, in words."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cohabit.planner.errors import bucket_words, format_bytes

WORTH = 0.9
"""What takes more than this share of what larger batches take saves too little to be named."""


class Activations(NamedTuple):
    """What one model's activations and scratch take in one bucket."""

    model: str
    batch: int
    bucket: str
    """The batch, and the sizes of other dynamic dimensions."""
    nbytes: int


def workspace_words(found: Iterable[Activations]) -> str:
    """Say whose activations take most, and how much less smaller batches and sizes would take; empty without any."""
    every = sorted(found, key=lambda one: one.nbytes)
    if not every:
        return ""
    most = every[-1]
    words = f"{format_bytes(most.nbytes)} for activations of {most.model} at batch {bucket_words(most.bucket)}"
    batches = sorted({one.batch for one in every})
    less: list[str] = []
    last_bytes = most.nbytes
    for count in range(len(batches) - 1, 0, -1):
        nbytes = _most_bytes(every, batches[count - 1])
        if nbytes < WORTH * last_bytes:
            less.append(f"{format_bytes(nbytes)} with --batch-sizes {','.join(map(str, batches[:count]))}")
            last_bytes = nbytes
    if less:
        words += f"; {', '.join(less)} (for one model: max_batch_size of its config.pbtxt)"
    if "x" in most.bucket:
        words += "; less with smaller dynamic sizes (import with --max-sequence-length, or --shape-buckets)"
    return words


def _most_bytes(found: Sequence[Activations], most_batch: int) -> int:
    """Return the most bytes of batches up to one; models with larger batches only keep their smallest."""
    least = {one.model: min(other.batch for other in found if other.model == one.model) for one in found}
    return max(one.nbytes for one in found if one.batch <= max(most_batch, least[one.model]))
