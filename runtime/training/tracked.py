"""Storages that a budget counts, and copies of their bytes in progress."""

import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch._C import StorageBase

if TYPE_CHECKING:
    from cohabit.runtime.training.copies.spill import SpillSlot

LEAST_BYTES: Final = 16 << 10
"""Smaller storages stay: evicting them gains nothing, and torch's generators read theirs without an op."""
NEVER: Final = 1 << 62
"""`next_use` of a storage whose next use is unknown. As a number of bytes: no limit."""
_SMOOTHING: Final = 64
"""Ops over which a loop's pace is averaged."""

storage_nbytes: Callable[[Any], int] = StorageBase.nbytes  # type: ignore[attr-defined]
resize_storage: Callable[[Any, int], Any] = StorageBase.resize_  # type: ignore[attr-defined]
storage_address: Callable[[Any], int] = StorageBase.data_ptr  # type: ignore[attr-defined]
"""Torch's originals: `outside.py` replaces these methods of `UntypedStorage`."""


storage_uses: Callable[[int], int] = torch._C._storage_Use_Count
"""Number of tensors over a storage, given by its `_cdata`, and of its Python object."""


def _references() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


REFERENCES: Final = _references()
"""`sys.getrefcount` of the Python object of a tensor's storage that one variable holds."""


def has_bytes(storage: Any) -> bool:
    """Whether a storage has memory. That of a tensor of zeros that forward differentiation makes has none."""
    try:
        return storage_address(storage) != 0
    except RuntimeError:
        return False


class StorageRef(weakref.ref[Any]):
    """A weak reference whose callback is a C function: an interrupt in a Python callback would be swallowed."""

    __slots__ = ("tracked",)
    tracked: "Tracked | None"


class Pace:
    """Speed of one thread's loop: converts positions in its sequence of ops to times, comparable across threads."""

    __slots__ = ("last_s", "op_s", "position")

    def __init__(self) -> None:
        self.position = 0
        """Position of the running op. Next uses predicted at earlier positions did not happen."""
        self.op_s = 1e-6
        self.last_s = time.perf_counter()
        """Time at which the running op began."""

    def advance(self, position: int) -> None:
        """Begin the op at a position."""
        now_s = time.perf_counter()
        self.op_s += (now_s - self.last_s - self.op_s) / _SMOOTHING
        self.position, self.last_s = position, now_s

    def wait_s(self, position: int, now_s: float) -> float:
        """Return the expected time until an op: that of the ops before it, plus the time this loop has been idle.

        An idle loop, waiting or finished, is expected to stay idle for as long again.
        """
        return (position - self.position) * self.op_s + now_s - self.last_s


class Tracked:
    """A storage counted by the budget, in memory or out."""

    __slots__ = (
        "copy", "is_clean", "is_forgotten", "is_out", "is_pinned", "key", "last_use", "nbytes", "next_use",
        "pace", "ref", "slot", "stream", "uses", "writes",
    )  # fmt: skip

    def __init__(self, storage: Any, deaths: deque[StorageRef], stream: int) -> None:
        self.key = id(storage)
        self.nbytes = storage_nbytes(storage)
        self.ref = StorageRef(storage, deaths.append)
        self.ref.tracked = self
        self.slot: SpillSlot | None = None
        self.is_out = self.is_forgotten = False
        self.is_clean = False
        """The slot's bytes equal those in memory."""
        self.is_pinned = not storage.resizable()
        """The bytes may be read without an op: they stay in memory."""
        self.copy: StorageCopy | None = None
        self.stream = stream
        """Stream on which its memory was allocated."""
        self.writes = 0
        self.uses = 0
        """Number of uses by running ops."""
        self.pace: Pace | None = None
        """Pace of the loop that used it last."""
        self.next_use = NEVER
        """Predicted position in that loop's ops."""
        self.last_use = -1
        """Id of its last use in that loop; -1 if there is none."""

    @property
    def storage(self) -> Any | None:
        return self.ref()


class End(Protocol):
    """The end of a copy. `threading.Event` is one."""

    def is_set(self) -> bool:
        """Whether the copy has ended, or all later ops wait for its end."""
        ...

    def wait(self) -> object:
        """Make all later ops run after the copy."""
        ...


class StorageCopy:
    """A copy of a tracked storage, to be made or in progress. Its reference keeps the storage alive meanwhile."""

    __slots__ = ("end", "error", "is_load", "nbytes", "slot", "storage", "tracked", "writes")
    end: End
    """Set when the copy begins, if it runs beside ops."""

    def __init__(self, tracked: Tracked, storage: Any, is_load: bool) -> None:
        self.slot = cast("SpillSlot", tracked.slot)
        self.tracked, self.storage, self.nbytes, self.is_load = tracked, storage, tracked.nbytes, is_load
        self.writes = tracked.writes
        self.error: BaseException | None = None

    @property
    def is_leaving(self) -> bool:
        """Whether the storage leaves when the copy has ended, unless it is used or written before."""
        return not self.is_load and self.tracked.copy is self and self.tracked.writes == self.writes

    def make(self) -> None:
        (self.slot.load if self.is_load else self.slot.save)(self.storage)


class CopyWaits:
    """How often, and how long, a loop has waited for copies that run beside its ops."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def wait(self, copy: StorageCopy) -> None:
        if not copy.end.is_set():
            began_s = time.perf_counter()
            copy.end.wait()
            self.count += 1
            self.seconds += time.perf_counter() - began_s

    def clock_s(self) -> float:
        """Return the time of a clock that stands still while the loop waits."""
        return time.perf_counter() - self.seconds


def used_by(trackeds: Collection[Tracked]) -> int:
    return sum(tracked.nbytes for tracked in trackeds)
