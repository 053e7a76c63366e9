"""Memory protocols: the device's arena, a model's parameters in the host, and buffers for spilled activations."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, Protocol, TypeVar

import torch

from cohabit.planner.errors import format_bytes
from cohabit.runtime.errors import MemoryExceeded

StoreKind = Literal["ram", "file"]
Copy = Callable[[], None]

Destination = TypeVar("Destination")
"""Target of a copy: a numpy array on the CPU, a tensor on CUDA."""
Destination_co = TypeVar("Destination_co", covariant=True)
Destination_contra = TypeVar("Destination_contra", contravariant=True)


class DeviceArena(Protocol[Destination_co]):
    """All device memory that models may use, allocated once."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def bytes(self, offset: int, nbytes: int) -> Destination_co:
        """Return a view of these bytes, as the target of a copy. Raises MemoryExceeded outside of the arena."""
        ...

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a dense tensor over the arena's bytes. Raises MemoryExceeded outside of the arena."""
        ...

    def close(self) -> None: ...


def require_inside(arena: DeviceArena[Any], offset: int, nbytes: int) -> None:
    """Raise MemoryExceeded for bytes outside of an arena."""
    if offset < 0 or nbytes < 0 or offset + nbytes > arena.nbytes:
        raise MemoryExceeded(
            f"bytes {offset} to {offset + nbytes} lie outside of the arena of {format_bytes(arena.nbytes)}"
        )


class SpillBuffer(Protocol):
    """Host memory for one spilled activation. Its bytes, or fewer, are passed as a flat tensor of the device."""

    @property
    def pinned(self) -> torch.Tensor | None:
        """Pinned memory for copies that the device issues; None if `save` and `load` make the copies."""
        ...

    def save(self, source: torch.Tensor) -> None:
        """Copy an activation's bytes out."""
        ...

    def load(self, destination: torch.Tensor) -> None:
        """Copy the bytes back."""
        ...

    def close(self) -> None:
        """Release the memory now. No copy may be in progress."""
        ...


class HostStore(Protocol[Destination_contra]):
    """One model's parameters in host memory, or in their file."""

    @property
    def kind(self) -> StoreKind: ...

    @property
    def staged(self) -> bool:
        """Whether copies to the device pass through a staging ring, which host code fills."""
        ...

    def copy(self, segment: int, destination: Destination_contra) -> Copy:
        """Prepare to fill the destination with a segment. The returned call makes the copy.

        A smaller destination gets the segment's first stored bytes, which serves to measure the link.
        """
        ...

    def source(self, index: int) -> Hashable:
        """Return where the bytes of a segment, or of a table after these, are stored: equal for the same bytes."""
        ...

    def table(self, name: str) -> torch.Tensor:
        """Return an embedding table, which the device reads in place."""
        ...

    @property
    def check_tables(self) -> Callable[[], None] | None:
        """Check to call before and after each gather, which raises StoreChanged. None if tables are in memory."""
        ...

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        """Return buffers of these sizes for activations that leave memory while a program runs.

        Raises MemoryExceeded if the host lacks the memory.
        """
        ...

    def close(self) -> None: ...
