"""Where a training's tensors are when they are not in memory: in RAM, pinned where a device copies it, or in a file."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cohabit.runtime.memory import Copy, SpillBuffer, StoreKind


class StateStore:
    """A host store whose every tensor has a buffer of its own, since state changes."""

    staged = False
    check_tables: Callable[[], None] | None = None

    def __init__(self, kind: StoreKind, make_buffers: Callable[[Sequence[int]], list[SpillBuffer]]) -> None:
        self.kind = kind
        self._make_buffers = make_buffers

    def spill_buffers(self, sizes: Sequence[int]) -> list[SpillBuffer]:
        """Return buffers of these sizes. Raises MemoryExceeded where there is too little disk, or memory to pin."""
        return self._make_buffers(sizes) if sizes else []

    def copy(self, segment: int, destination: Any) -> Copy:
        raise AssertionError("a training's tensors are filled from their buffers")

    def link_bytes(self, segment: int) -> int:
        raise AssertionError("a training's tensors are filled from their buffers")

    def pinned(self, segment: int) -> torch.Tensor | None:
        return None

    def table(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is not a table: a step reads no rows in the store")

    def close(self) -> None:
        """Do nothing: buffers end with their last reference."""
