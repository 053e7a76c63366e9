"""State of one tensor that leaves memory while a program runs.

All tensors derived from it, views included, share one torch storage. The storage is emptied when the tensor is evicted
and filled when it is swapped in, so views see the new bytes and nothing is rebuilt.
"""

import threading

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.binding.spills import Spill
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import SpillBuffer


class OffloadedTensor:
    """One tensor of the current run that leaves memory. The caller keeps the lanes' order."""

    def __init__(self, spill: Spill, buffer: SpillBuffer) -> None:
        self.spill = spill
        self._buffer = buffer
        self._users = [i.users if i.frees_storage else 0 for i in spill.intervals]
        self._storage: torch.UntypedStorage | None = None
        self._nbytes = 0
        """Bytes of the storage; fewer than planned if an inference is smaller than the largest of its bucket."""
        self._interval = 0
        self._users_left = 0
        self._lock = threading.Lock()

    def adopt(self, frame: Frame) -> None:
        """Take the storage from the result of the op that creates the tensor.

        Compute lane, right after that op. If the op's result is never read, it may be freed already:
        then nothing is copied.
        """
        self._interval, self._users_left = 0, self._users[0]
        leaves = pytree.tree_leaves(frame[self.spill.slot])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._storage = tensors[self.spill.leaf].untyped_storage() if tensors else None
        self._nbytes = 0 if self._storage is None else self._storage.nbytes()

    def save(self) -> None:
        """Copy the bytes out. Swap-out lane."""
        if self._storage is not None:
            self._buffer.save(self._bytes)
            self.finish_use()

    def finish_use(self, frame: Frame | None = None) -> None:
        """Count one user of the interval as finished; the last one empties the storage."""
        with self._lock:
            self._users_left -= 1
            if self._users_left == 0 and self._storage is not None:
                self._storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storage and fill it. Swap-in lane, after all users of the previous interval."""
        if self._storage is not None:
            self.allocate()
            self._buffer.load(self._bytes)

    def copy_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (destination, source) of the swap-out, for devices that issue copies."""
        return self.pinned, self._bytes

    def copy_back(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (destination, source) of the swap-in, for devices that issue copies."""
        return self._bytes, self.pinned

    @property
    def pinned(self) -> torch.Tensor:
        """The host buffer's bytes, for devices that issue copies."""
        assert self._buffer.pinned is not None, "a buffer that copies by itself"
        return self._buffer.pinned[: self._nbytes]

    @property
    def _bytes(self) -> torch.Tensor:
        """The storage's bytes as a flat tensor."""
        assert self._storage is not None, "a tensor that has not been made"
        flat = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return flat.set_(self._storage, 0, (self._storage.nbytes(),), (1,))

    def deallocate(self) -> None:
        """Release the bytes, in stream order."""
        assert self._storage is not None
        self._storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the bytes again; the caller fills them. Begins the next interval."""
        assert self._storage is not None
        self._storage.resize_(self._nbytes)
        self._interval += 1
        self._users_left = self._users[self._interval]

    def forget(self, frame: Frame | None = None) -> None:
        """Drop the reference to the storage. Compute lane, after the last op that uses it."""
        self._storage = None

    def close(self) -> None:
        """Release the host buffer. No copy may be in progress."""
        self._buffer.close()
