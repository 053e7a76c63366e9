"""Where a training's tensors are when they are not in memory: in RAM, or in a file without a name."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cohabit.runtime.host.pages import Bytes
from cohabit.runtime.host.spill_buffers import file_spill_buffers, ram_spill_buffers
from cohabit.runtime.memory import Copy, SpillBuffer, StoreKind


class StateStore:
    """A host store whose every tensor has a buffer of its own, since state changes."""

    staged = False
    check_tables: Callable[[], None] | None = None

    def __init__(self, kind: StoreKind, folder: Path) -> None:
        self.kind = kind
        self._folder = folder

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        """Return buffers of these sizes. Raises MemoryExceeded where the disk is full."""
        if not sizes:
            return []
        return ram_spill_buffers(sizes) if self.kind == "ram" else file_spill_buffers(self._folder, sizes)

    def copy(self, segment: int, destination: Bytes) -> Copy:
        raise AssertionError("a training's tensors are filled from their buffers")

    def pinned(self, segment: int) -> torch.Tensor | None:
        return None

    def table(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is no table: a step reads no rows in the store")

    def close(self) -> None:
        """Do nothing: buffers end with their last reference."""
