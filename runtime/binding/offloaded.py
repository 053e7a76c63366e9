"""State of one tensor that leaves memory while a program runs.

All tensors derived from it, views included, share one torch storage. The storage is emptied when the tensor is evicted
and filled when it is swapped in, so views see the new bytes and nothing is rebuilt.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from cohabit.runtime.binding.spills import Spill
from cohabit.runtime.lowering.slots import Frame
from cohabit.runtime.lowering.weights import Piece, dtype_of
from cohabit.runtime.memory import DeviceArena, HostStore, SpillBuffer


class ParameterSource:
    """A parameter's bytes in a host store, as the buffer that fills its storage."""

    def __init__(self, store: HostStore[Any], segment: int, arena: DeviceArena[Any]) -> None:
        self.pinned = store.pinned(segment)
        self._store = store
        self._segment = segment
        self._arena = arena

    def save(self, source: torch.Tensor) -> None:
        raise AssertionError("a parameter has a host copy at all times")

    def load(self, destination: torch.Tensor) -> None:
        """Copy the parameter's bytes to a flat tensor of the device."""
        self._store.copy(self._segment, self._arena.over(destination))()

    def close(self) -> None:
        """Do nothing: the store has another owner."""


class OffloadedTensor:
    """One tensor of the current run that leaves memory. The caller keeps the lanes' order."""

    def __init__(
        self, spill: Spill, buffer: SpillBuffer, device: torch.device, storage: torch.UntypedStorage | None = None
    ) -> None:
        """`storage` is a weight's existing storage, if any. It is emptied: `buffer` has its bytes."""
        self.spill = spill
        self._buffer = buffer
        self._users = [i.users if i.frees_storage else 0 for i in spill.intervals]
        self._storage: torch.UntypedStorage | None = None
        self._nbytes = 0
        """Bytes of the storage; fewer than planned if an inference is smaller than the largest of its bucket."""
        self._interval = 0
        self._users_left = 0
        self._lock = threading.Lock()
        if spill.is_weight:  # its storage persists: the program's calls have views of it
            own = torch.empty(spill.nbytes, dtype=torch.uint8, device=device).untyped_storage()
            self._storage = own if storage is None else storage
            self._nbytes = spill.nbytes
            self._storage.resize_(0)

    def view(self, piece: Piece) -> torch.Tensor:
        """Return a weight in this storage, which may be empty at present."""
        assert self._storage is not None
        dtype = dtype_of(piece.dtype)
        value = torch.empty(0, dtype=dtype, device=self._storage.device)
        with self.sized():
            return value.set_(self._storage, piece.offset // dtype.itemsize, piece.shape, piece.stride)

    @contextmanager
    def sized(self) -> Iterator[None]:
        """Resize a weight's storage temporarily, without its bytes: torch creates no view of an empty one."""
        assert self._storage is not None
        self._storage.resize_(self._nbytes)
        yield
        self._storage.resize_(0)

    @property
    def storage_key(self) -> int | None:
        """Identity of its storage; None before there is one."""
        return None if self._storage is None else self._storage._cdata

    @property
    def moves(self) -> bool:
        """Whether it leaves memory during a run, so that its address changes."""
        return len(self.spill.intervals) > 1

    @property
    def is_ready(self) -> bool:
        """Whether a resident is in memory at the start of a run. No copy may be in progress."""
        return self._storage is not None and self._interval == 0 and self._storage.nbytes() == self._nbytes

    def reset(self) -> None:
        """Begin outside of memory; a weight's storage is emptied. No copy may be in progress."""
        self._interval = -1
        if self.spill.is_weight and self._storage is not None:
            self._storage.resize_(0)

    def start(self, frame: Frame) -> None:
        """Begin a run with the tensors that are in memory at its start. Compute lane.

        A copy that restores a resident weight may be in progress. It begins that weight's first interval.
        """
        if not self.spill.at_start:  # leftovers of the previous run do not count in this one
            self.reset()
        elif self.spill.slot is not None:  # an input: the frame has its own copy
            self._interval, self._users_left = 0, self._users[0]
            self._take(frame)

    def adopt(self, interval: int, frame: Frame) -> None:
        """Take the storage from the result of the op that creates the tensor. Compute lane, right after that op.

        If the op's result is never read, it may be freed already: then nothing is copied.
        """
        self._interval, self._users_left = interval, self._users[interval]
        self._take(frame)

    def _take(self, frame: Frame) -> None:
        assert self.spill.slot is not None
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
        if self.spill.is_weight and self.spill.at_start and self._interval == len(self._users) - 1:
            self._interval = 0  # a resident's last interval is the first one of the next run
        self._users_left = self._users[self._interval]

    def forget(self, frame: Frame | None = None) -> None:
        """Drop the reference to an activation's storage. Compute lane, after the last op that uses it."""
        if not self.spill.is_weight:
            self._storage = None

    def close(self) -> None:
        """Release an activation's host buffer; a weight's outlives its programs. No copy may be in progress."""
        if not self.spill.is_weight:
            self._buffer.close()
