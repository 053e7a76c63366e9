"""What programs are bound to, whatever the device: its memory, and the host copies that fill it."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

import torch

StoreKind = Literal["ram", "file"]
Copy = Callable[[], None]

Room = TypeVar("Room")
"""What a copy fills: a numpy array on the CPU, a tensor on CUDA."""
Room_co = TypeVar("Room_co", covariant=True)
Room_contra = TypeVar("Room_contra", contravariant=True)


class Memory(Protocol[Room_co]):
    """The arena: all device memory that models may use, taken once."""

    @property
    def nbytes(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def bytes(self, offset: int, nbytes: int) -> Room_co:
        """The given bytes, for a copy to fill. Raises MemoryExceeded outside of the arena."""
        ...

    def tensor(
        self, offset: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> torch.Tensor:
        """A dense tensor over the arena's bytes. Raises MemoryExceeded outside of the arena."""
        ...

    def close(self) -> None: ...


class Place(Protocol):
    """Room in the host for one activation, whose bytes come as a flat tensor of the device."""

    @property
    def room(self) -> torch.Tensor | None:
        """Pinned memory, where the device copies by itself: then nobody calls `save` or `load`."""
        ...

    def save(self, source: torch.Tensor) -> None:
        """Copy an activation's bytes here."""
        ...

    def load(self, destination: torch.Tensor) -> None:
        """Copy them back."""
        ...

    def close(self) -> None:
        """Give the room back now. No copy may be under way."""
        ...


class Source(Protocol[Room_contra]):
    """One model's host copy."""

    @property
    def kind(self) -> StoreKind: ...

    def copy(self, segment: int, destination: Room_contra) -> Copy:
        """Prepare to fill the destination from a segment's start on. Whoever issues copies makes the call."""
        ...

    def table(self, name: str) -> torch.Tensor:
        """An embedding table, to be read in place by the device."""
        ...

    def places(self, sizes: Sequence[int]) -> list[Place]:
        """Room for activations of these sizes that leave memory while a program runs.

        Raises MemoryExceeded where the host has no room.
        """
        ...

    def close(self) -> None: ...
