"""The state of one spilled activation while a program runs.

All tensors made of an activation, views included, share one torch storage. The storage is emptied when the activation
leaves and filled when it comes back, so views see the new bytes and nothing has to be made anew.
"""

import threading

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.memory import SpillBuffer
from cohabit.runtime.offload.spills import Spill


class OffloadedActivation:
    """One spilled activation of the current run. The caller keeps the lanes' order."""

    def __init__(self, spill: Spill, buffer: SpillBuffer) -> None:
        self.spill = spill
        self._buffer = buffer
        self._users = [0 if i.is_last else 1 + i.swap_outs for i in spill.intervals]
        """Users that must finish before the storage is emptied: the interval's last reader and its swap-outs."""
        self._storage: torch.UntypedStorage | None = None
        self._nbytes = 0
        """Of the storage: less than the plan's, where an inference is smaller than the largest of its bucket."""
        self._interval = 0
        self._users_left = 0
        self._lock = threading.Lock()

    def begin(self, frame: Frame) -> None:
        """Take the storage from the result of the op. Compute lane, right after that op.

        An op whose result is never read may have freed it already: then nothing is copied.
        """
        leaves = pytree.tree_leaves(frame[self.spill.slot])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._storage = tensors[self.spill.leaf].untyped_storage() if tensors else None
        self._nbytes = 0 if self._storage is None else self._storage.nbytes()
        self._interval, self._users_left = 0, self._users[0]

    def save(self) -> None:
        """Copy the bytes out. Swap-out lane."""
        if self._storage is not None:
            self._buffer.save(self._bytes)
            self.release()

    def release(self, frame: Frame | None = None) -> None:
        """Count one user of the interval as finished; the last one empties the storage."""
        with self._lock:
            self._users_left -= 1
            if self._users_left == 0 and self._storage is not None:
                self._storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storage and fill it. Swap-in lane, after all users of the interval before."""
        if self._storage is not None:
            self.refill()
            self._buffer.load(self._bytes)

    def copy_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (destination, source) of the swap-out, for devices that issue copies."""
        return self._pinned, self._bytes

    def copy_back(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (destination, source) of the swap-in, for devices that issue copies."""
        return self._bytes, self._pinned

    @property
    def _pinned(self) -> torch.Tensor:
        assert self._buffer.pinned is not None, "a buffer that copies by itself"
        return self._buffer.pinned[: self._nbytes]

    @property
    def _bytes(self) -> torch.Tensor:
        """The storage's bytes as a flat tensor."""
        assert self._storage is not None, "an activation that has not been made"
        flat = torch.empty(0, dtype=torch.uint8, device=self._storage.device)
        return flat.set_(self._storage, 0, (self._storage.nbytes(),), (1,))

    def empty(self) -> None:
        """Release the bytes, in the order of the stream that uses them."""
        assert self._storage is not None
        self._storage.resize_(0)

    def refill(self) -> None:
        """Allocate the bytes again; the caller fills them."""
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
