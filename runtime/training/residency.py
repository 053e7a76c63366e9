"""Tracks which storages are in memory, evicts them and swaps them in.

Invariant: a storage with `is_out` has all of its bytes in its spill slot; any other storage has them in memory. An
interrupt between two lines therefore loses nothing, and `bring_all_in` restores all storages.
"""

import math
import queue
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, cast

from torch._C import StorageBase

from cohabit.runtime.training.spill import SpillSlot, SpillStore

LEAST_BYTES: Final = 16 << 10
"""Smaller storages stay: evicting them gains nothing, and torch's generators read theirs without an op."""
NEVER: Final = 1 << 62
"""`next_use` of a storage whose next use is unknown. As a number of bytes: no limit."""
_SMOOTHING: Final = 64
"""Ops over which a loop's pace is averaged."""
_MOST_COPIES: Final = 16
"""Maximum pending copies in each direction."""

_nbytes: Callable[[Any], int] = StorageBase.nbytes  # type: ignore[attr-defined]
_address: Callable[[Any], int] = StorageBase.data_ptr  # type: ignore[attr-defined]
_resize: Callable[[Any, int], Any] = StorageBase.resize_  # type: ignore[attr-defined]
"""Torch's originals: `outside.py` replaces these methods of `UntypedStorage`."""


class StorageRef(weakref.ref[Any]):
    """A weak reference whose callback is a C function: an interrupt in a Python callback would be swallowed."""

    __slots__ = ("tracked",)
    tracked: "Tracked"


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
        "copy", "is_clean", "is_dead", "is_out", "is_pinned", "key", "last_use", "nbytes", "next_use", "pace", "ref",
        "slot", "uses", "writes",
    )  # fmt: skip

    def __init__(self, storage: Any, deaths: deque[StorageRef]) -> None:
        self.key = id(storage)
        self.nbytes = _nbytes(storage)
        self.ref = StorageRef(storage, deaths.append)
        self.ref.tracked = self
        self.slot: SpillSlot | None = None
        self.is_out = self.is_dead = False
        self.is_clean = False
        """The slot's bytes equal those in memory."""
        self.is_pinned = not storage.resizable()
        """The bytes may be read without an op: they stay in memory."""
        self.copy: StorageCopy | None = None
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


class StorageCopy:
    """A copy made by the copy thread. Its reference keeps the storage alive meanwhile."""

    __slots__ = ("done", "error", "is_load", "storage", "tracked", "writes")

    def __init__(self, tracked: Tracked, storage: Any, is_load: bool) -> None:
        self.tracked, self.storage, self.is_load = tracked, storage, is_load
        self.writes = tracked.writes
        self.done = threading.Event()
        self.error: BaseException | None = None


class Residency:
    """Keeps the bytes of tracked storages within a limit. The caller holds a lock around every call."""

    def __init__(self, spill: SpillStore, limit_bytes: int | None = None) -> None:
        self.limit_bytes = NEVER if limit_bytes is None else limit_bytes
        self.used_bytes = self.peak_bytes = 0
        self.headroom_bytes = NEVER
        """Bytes that may be allocated before the process's memory is measured, if the budget is its total."""
        self.reserved_bytes = 0
        """Expected bytes of the results and scratch of running ops."""
        self.moved_bytes = 0
        """Bytes copied in and out so far."""
        self._spill = spill
        self._tracked: dict[int, Tracked] = {}
        self._here: OrderedDict[Tracked, None] = OrderedDict()
        """Evictable storages, least recently used first."""
        self._deaths: deque[StorageRef] = deque()
        self._copies: deque[StorageCopy] = deque()
        self._waiting: queue.SimpleQueue[StorageCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    # Tracking

    def find(self, storage: Any) -> Tracked | None:
        found = self._tracked.get(id(storage))
        # Python reuses the ids of dead storages.
        return found if found is not None and found.ref() is storage else None

    def track(self, storage: Any) -> Tracked | None:
        """Count a storage from now on. Returns None if it is too small, or on another device."""
        found = self.find(storage)
        if found is None and _nbytes(storage) >= LEAST_BYTES and storage.device.type == "cpu":
            found = Tracked(storage, self._deaths)
            self._tracked[found.key] = found
            self._allocated(found.nbytes)
            if not found.is_pinned:
                self._here[found] = None
        return found

    def bury(self) -> int:
        """Forget dead storages, and complete copies that have ended. Returns the bytes of memory freed."""
        before = self.used_bytes
        while self._deaths:
            tracked = self._deaths.popleft().tracked
            tracked.is_dead = True
            if self._tracked.get(tracked.key) is tracked:
                del self._tracked[tracked.key]
            self._here.pop(tracked, None)
            if not tracked.is_out:
                self.used_bytes -= tracked.nbytes
            self._release_slot(tracked)
        freed_bytes = before - self.used_bytes
        while self._copies and self._copies[0].done.is_set():
            self._complete(self._copies.popleft())
        return freed_bytes

    def use(self, tracked: Tracked) -> None:
        """Swap in a storage that an op reads, as `bring_in` does, and make it the most recently used."""
        if tracked.is_out or tracked.copy is not None:
            self.bring_in(tracked)
        if tracked in self._here:
            self._here.move_to_end(tracked)

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def changed(self, tracked: Tracked) -> None:
        """Mark the bytes in memory as newer than the slot's. May be called just before they are written."""
        tracked.is_clean = False
        tracked.writes += 1

    def resized(self, tracked: Tracked) -> None:
        """Update the counts for a storage that an op has resized."""
        storage = tracked.storage
        if storage is not None and not tracked.is_out and (now := _nbytes(storage)) != tracked.nbytes:
            self._wait(tracked)
            self._release_slot(tracked)
            self._allocated(now - tracked.nbytes)
            tracked.nbytes = now
            self.changed(tracked)
            if now < LEAST_BYTES:
                tracked.is_pinned = True
                self._here.pop(tracked, None)

    def pin(self, tracked: Tracked) -> None:
        """Swap in bytes that will be read or written without an op, and keep them in memory."""
        self.bring_in(tracked)
        tracked.is_pinned = True
        self.changed(tracked)
        self._here.pop(tracked, None)

    def unpin(self, tracked: Tracked) -> None:
        storage = tracked.storage
        if storage is not None and tracked.is_pinned and storage.resizable():
            tracked.is_pinned = False
            self.changed(tracked)
            self._here[tracked] = None

    @property
    def arriving_bytes(self) -> int:
        """Bytes of pending prefetches. `used_bytes` includes them, although they may not be in memory yet."""
        return sum(copy.tracked.nbytes for copy in self._copies if copy.is_load)

    # Synchronous copies

    def incoming_bytes(self, trackeds: Iterable[Tracked]) -> int:
        """Return the bytes that `use` would allocate for these storages."""
        return sum(tracked.nbytes for tracked in trackeds if tracked.is_out and tracked.copy is None)

    def bring_in(self, tracked: Tracked) -> None:
        """Swap a storage in. Raises MemoryExceeded if a full disk prevents evictions, and OSError for file errors."""
        self._wait(tracked)
        storage = tracked.storage
        if not tracked.is_out or storage is None:
            return
        tracked.uses += 1  # it must not be evicted to make room for itself
        try:
            self.make_room(tracked.nbytes)
            _resize(storage, tracked.nbytes)
            assert tracked.slot is not None
            tracked.slot.load(_address(storage))
            self._allocated(tracked.nbytes)
            self._arrived(tracked)
        finally:
            tracked.uses -= 1

    def make_room(self, nbytes: int) -> bool:
        """Evict storages until `nbytes` more fit into the limit. Returns whether they do."""
        nbytes += self.reserved_bytes
        while self.used_bytes + nbytes > self.limit_bytes:
            self.bury()
            if self.used_bytes + nbytes <= self.limit_bytes:
                break
            chosen = self._choose()
            if chosen is None and self._copies:
                copy = self._copies.popleft()
                copy.done.wait()
                self._complete(copy)
                continue
            if chosen is None:
                return False
            self._evict(chosen)
        return True

    def give_size(self, tracked: Tracked) -> None:
        """Give an evicted storage its size, without its bytes."""
        storage = tracked.storage
        if storage is not None and tracked.is_out:
            _resize(storage, tracked.nbytes)

    def take_size(self, tracked: Tracked) -> None:
        storage = tracked.storage
        if storage is not None and tracked.is_out and tracked.copy is None:
            _resize(storage, 0)

    def bring_all_in(self) -> None:
        """Swap in every storage, ignoring the limit, and stop tracking."""
        self.limit_bytes = self.headroom_bytes = NEVER
        self.bury()
        for tracked in list(self._tracked.values()):
            self.bring_in(tracked)
        self.bury()
        for tracked in self._tracked.values():
            self._release_slot(tracked)
        self._tracked.clear()
        self._here.clear()
        self.used_bytes = 0

    def _choose(self, after_s: float = -math.inf, *, idle: bool = False) -> Tracked | None:
        """Return the storage whose next use is farthest away, and farther than `after_s` seconds.

        Unknown uses are farthest, least recently used first. `idle`: only storages without a copy in progress.
        """
        chosen, farthest_s = None, after_s
        now_s = time.perf_counter()
        for tracked in self._here:
            if tracked.uses or (tracked.copy is not None and (idle or tracked.copy.is_load)):
                continue
            pace = tracked.pace
            if pace is None or tracked.next_use == NEVER or tracked.next_use < pace.position:
                return tracked
            wait_s = pace.wait_s(tracked.next_use, now_s)
            if wait_s > farthest_s:
                chosen, farthest_s = tracked, wait_s
        return chosen

    def _evict(self, tracked: Tracked) -> None:
        self._wait(tracked)
        storage = tracked.storage
        if storage is None:
            return
        if not tracked.is_out and not tracked.is_clean:
            if tracked.slot is None:
                tracked.slot = self._spill.take(tracked.nbytes)
            tracked.slot.save(_address(storage))
            self.moved_bytes += tracked.nbytes
            tracked.is_clean = True
        self._leave(tracked, storage)

    def _leave(self, tracked: Tracked, storage: Any) -> None:
        tracked.is_out = True
        _resize(storage, 0)
        if tracked in self._here:
            del self._here[tracked]
            self.used_bytes -= tracked.nbytes

    def _arrived(self, tracked: Tracked) -> None:
        tracked.is_out = False
        if not tracked.is_pinned:
            self._here[tracked] = None
        self.moved_bytes += tracked.nbytes

    def _allocated(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.headroom_bytes -= nbytes

    def _release_slot(self, tracked: Tracked) -> None:
        slot, tracked.slot = tracked.slot, None
        tracked.is_clean = False
        if slot is not None:
            self._spill.give_back(slot, tracked.nbytes)

    # Asynchronous copies, while ops run

    def start(self) -> None:
        self._thread = threading.Thread(target=self._copy_all, name="cohabit-budget", daemon=True)
        self._thread.start()

    def after_fork(self) -> None:
        """Continue without the copy thread, which a forked process lacks."""
        self.limit_bytes = self.headroom_bytes = NEVER
        self._thread = None
        while self._copies:
            copy = self._copies.popleft()
            if not copy.done.is_set():
                copy.error = InterruptedError()
            self._complete(copy)

    def stop(self) -> None:
        """Stop the copy thread once it has made the pending copies, then complete them."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
        while self._copies:
            self._complete(self._copies.popleft())

    def prefetch(self, tracked: Tracked) -> bool:
        """Start swapping a storage in, if it fits. Returns whether more prefetches may follow."""
        needed_bytes = self.reserved_bytes + tracked.nbytes
        if self.used_bytes + needed_bytes > self.limit_bytes or needed_bytes > self.headroom_bytes:
            return False
        if self._copies_of(True) >= _MOST_COPIES:
            return False
        storage = tracked.storage
        if storage is None or not tracked.is_out or tracked.copy is not None:
            return True
        _resize(storage, tracked.nbytes)
        self._allocated(tracked.nbytes)
        self._begin(tracked, storage, is_load=True)
        return True

    def write_ahead(self, needed_bytes: int, after_s: float) -> None:
        """Start saving storages whose next use is over `after_s` seconds away, to free `needed_bytes` in time."""
        leaving = sum(copy.tracked.nbytes for copy in self._copies if not copy.is_load)
        needed_bytes += self.reserved_bytes
        while self.used_bytes - leaving + needed_bytes > self.limit_bytes:
            chosen = self._choose(after_s, idle=True)
            if chosen is None or self._copies_of(False) >= _MOST_COPIES:
                return
            storage = chosen.storage
            if storage is None:
                return  # it has just died
            if chosen.is_clean:
                self._leave(chosen, storage)
                continue
            if chosen.slot is None:
                chosen.slot = self._spill.take(chosen.nbytes)
            leaving += chosen.nbytes
            self._begin(chosen, storage, is_load=False)

    def _copies_of(self, is_load: bool) -> int:
        return sum(copy.is_load == is_load for copy in self._copies)

    def _begin(self, tracked: Tracked, storage: Any, is_load: bool) -> None:
        copy = StorageCopy(tracked, storage, is_load)
        tracked.copy = copy
        self._copies.append(copy)
        self._waiting.put(copy)

    def _copy_all(self) -> None:
        while (copy := self._waiting.get()) is not None:
            slot = cast(SpillSlot, copy.tracked.slot)
            try:
                (slot.load if copy.is_load else slot.save)(_address(copy.storage))
            except BaseException as error:
                copy.error = error
            copy.done.set()
            del copy

    def _wait(self, tracked: Tracked) -> None:
        copy = tracked.copy
        if copy is not None:
            copy.done.wait()
            self._complete(copy)

    def _complete(self, copy: StorageCopy) -> None:
        """Apply a finished copy. The storage may have been used or written since the copy began."""
        tracked, storage = copy.tracked, copy.storage
        copy.storage = None
        if tracked.copy is not copy:
            return
        tracked.copy = None
        if copy.is_load:
            if copy.error is not None:  # the op that needs the bytes reads them again, and raises
                _resize(storage, 0)
                self.used_bytes -= tracked.nbytes
                return
            self._arrived(tracked)
            return
        if copy.error is not None or tracked.is_dead:
            return
        self.moved_bytes += tracked.nbytes
        if tracked.writes == copy.writes and not tracked.is_pinned:
            tracked.is_clean = True
            if not tracked.uses:
                self._leave(tracked, storage)


def used_by(trackeds: Collection[Tracked]) -> int:
    return sum(tracked.nbytes for tracked in trackeds)
