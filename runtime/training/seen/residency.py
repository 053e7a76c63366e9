"""Tracks which storages are in memory, evicts them and swaps them in.

Invariant: a storage with `is_out` has all of its bytes in its spill slot; any other storage has them in memory. An
interrupt between two lines therefore loses nothing, and `bring_all_in` restores all storages.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from cohabit.runtime.training.copies.copying import Copier
from cohabit.runtime.training.copies.spill import SpillStore
from cohabit.runtime.training.tracked import (
    LEAST_BYTES,
    NEVER,
    StorageRef,
    Tracked,
    TrackedCopy,
    has_bytes,
    resize_storage,
    storage_nbytes,
)

_MOST_COPIES: Final = 16
"""Maximum pending copies in each direction."""


class Residency:
    """Keeps the bytes of tracked storages within a limit. The caller holds a lock around every call."""

    def __init__(self, device: torch.device, spill: SpillStore, copier: Copier) -> None:
        self.limit_bytes = NEVER
        self.used_bytes = self.peak_bytes = self.exceeded_bytes = 0
        self.headroom_bytes = NEVER
        """If the budget is a total: bytes that may be allocated before the process's memory is measured again."""
        self.measure: Callable[[int], None] | None = None
        """If the budget is a total: makes sure that the process may allocate a number of bytes."""
        self.alive_bytes = 0
        """Bytes of all counted storages, whether in memory or out."""
        self.noted: Callable[[], None] = lambda: None
        """Called when an op has run."""
        self.reserved_bytes = 0
        """Expected bytes of the results and scratch of running ops."""
        self.moved_bytes = 0
        """Bytes copied in and out so far."""
        self.device = device
        self.spill = spill
        self.copier = copier
        self._stream = 0
        """Stream of the op that is about to run, or has just run."""
        self._tracked: dict[int, Tracked] = {}
        self._evictable: OrderedDict[Tracked, None] = OrderedDict()
        """Evictable storages, least recently used first."""
        self._deaths: deque[StorageRef] = deque()
        self._copies: deque[TrackedCopy] = deque()

    # Tracking

    def find(self, storage: Any) -> Tracked | None:
        found = self._tracked.get(id(storage))
        # Python reuses the ids of dead storages.
        return found if found is not None and found.ref() is storage else None

    def nbytes_of(self, storage: Any) -> int:
        """Return the size that a storage has in memory."""
        found = self.find(storage)
        return storage_nbytes(storage) if found is None else found.nbytes

    def track(self, storage: Any) -> Tracked | None:
        """Count a storage from now on. Returns None if it is too small, or on another device."""
        found = self.find(storage)
        if found is not None or storage_nbytes(storage) < LEAST_BYTES or storage.device != self.device:
            return found
        if has_bytes(storage):
            found = Tracked(storage, self._deaths, self._stream)
            self._tracked[found.key] = found
            self.alive_bytes += found.nbytes
            self._allocated(found.nbytes)
            if not found.is_pinned:
                self._evictable[found] = None
        return found

    def adopt(self, storage: Any, stays: bool) -> None:
        """Count a storage that was allocated earlier, on an unknown stream. `stays`: others may read it without ops."""
        tracked = self.track(storage)
        if tracked is None:
            return
        if stays:
            tracked.is_pinned = True
            self._evictable.pop(tracked, None)
        self.copier.streams.share(storage)

    def collect_dead(self) -> int:
        """Forget dead storages, and complete copies that have ended. Returns the bytes of memory freed."""
        before = self.used_bytes
        while self._deaths:
            tracked = self._deaths.popleft().tracked
            tracked.is_dead = True
            self._evictable.pop(tracked, None)
            if tracked.is_counted:
                self.alive_bytes -= tracked.nbytes
            if not tracked.is_out and tracked.is_counted:
                self.used_bytes -= tracked.nbytes
            tracked.is_counted = False
            if self._tracked.get(tracked.key) is tracked:
                del self._tracked[tracked.key]
            self._release_slot(tracked)
        freed_bytes = before - self.used_bytes
        while self._copies and self._copies[0].end.is_set():
            self._complete(self._copies.popleft())
        return freed_bytes

    def use(self, tracked: Tracked) -> None:
        """Swap in a storage that an op reads, as `bring_in` does, and make it the most recently used."""
        if tracked.is_out or tracked.copy is not None:
            self.bring_in(tracked)
        if tracked.stream != self._stream:
            self.copier.streams.share(tracked.storage)
        if tracked in self._evictable:
            self._evictable.move_to_end(tracked)

    def note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.exceeded_bytes = max(self.exceeded_bytes, self.used_bytes - self.limit_bytes)
        self.noted()

    def changed(self, tracked: Tracked) -> None:
        """Mark the bytes in memory as newer than the slot's. May be called just before they are written."""
        tracked.writes += 1
        tracked.is_clean = False

    def resized(self, tracked: Tracked) -> None:
        """Update the counts for a storage that an op has resized."""
        storage = tracked.storage
        if storage is not None and not tracked.is_out and (now := storage_nbytes(storage)) != tracked.nbytes:
            self._wait(tracked)
            self._release_slot(tracked)
            self._allocated(now - tracked.nbytes)
            self.alive_bytes += now - tracked.nbytes
            tracked.nbytes = now
            self.changed(tracked)
            if now < LEAST_BYTES:
                tracked.is_pinned = True
                self._evictable.pop(tracked, None)

    def pin(self, tracked: Tracked) -> None:
        """Swap in bytes that will be read or written without an op, and keep them in memory."""
        self.enter_stream()
        self.bring_in(tracked)
        self.copier.settle()
        tracked.is_pinned = True
        self.changed(tracked)
        self._evictable.pop(tracked, None)

    def unpin(self, tracked: Tracked) -> None:
        storage = tracked.storage
        if storage is not None and tracked.is_pinned and storage.resizable():
            tracked.is_pinned = False
            self.changed(tracked)
            self._evictable[tracked] = None

    @property
    def arriving_bytes(self) -> int:
        """Bytes of pending prefetches. `used_bytes` includes them, although they may not be in memory yet."""
        return sum(copy.tracked.nbytes for copy in self._copies if copy.is_load)

    # Copies between two ops

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
            self.take_room(tracked.nbytes)
            self._allocate(tracked, storage)
            try:
                self.copier.make(TrackedCopy(tracked, storage, is_load=True))
            except BaseException:
                self._deallocate(tracked, storage)
                raise
            self._arrived(tracked)
            self.moved_bytes += tracked.nbytes
        finally:
            tracked.uses -= 1

    def take_room(self, nbytes: int) -> None:
        """Make room for bytes that are about to be allocated: within the limit, and within the process's total."""
        self.make_room(nbytes)
        if self.measure is not None and nbytes + self.reserved_bytes > self.headroom_bytes:
            self.measure(nbytes)

    def make_room(self, nbytes: int) -> bool:
        """Evict storages until `nbytes` more fit into the limit. Returns whether they do."""
        nbytes += self.reserved_bytes
        while self.used_bytes + nbytes > self.limit_bytes:
            self.collect_dead()
            if self.used_bytes + nbytes <= self.limit_bytes:
                break
            chosen = self._choose()
            if chosen is None and self._copies:
                copy = self._copies.popleft()
                copy.end.wait()
                self._complete(copy)
                continue
            if chosen is None:
                return False
            self._evict(chosen)
        return True

    def give_size(self, tracked: Tracked) -> None:
        """Give an evicted storage its size. Swaps in its bytes only where a size alone would take memory."""
        storage = tracked.storage
        if self.copier.takes_memory_at_once:
            self.bring_in(tracked)
        elif storage is not None and tracked.is_out:
            resize_storage(storage, tracked.nbytes)

    def take_size(self, tracked: Tracked) -> None:
        storage = tracked.storage
        if storage is not None and tracked.is_out and tracked.copy is None:
            resize_storage(storage, 0)

    def bring_all_in(self) -> None:
        """Swap in every storage, ignoring the limit, and stop tracking."""
        self.limit_bytes = self.headroom_bytes = NEVER
        self.enter_stream()
        self.collect_dead()
        for tracked in list(self._tracked.values()):
            self.bring_in(tracked)
        self.collect_dead()
        for tracked in self._tracked.values():
            self._release_slot(tracked)
            tracked.is_counted = False
        self._tracked.clear()
        self._evictable.clear()
        self.used_bytes = self.alive_bytes = 0

    def _choose(self, after_s: float = -math.inf, *, idle: bool = False) -> Tracked | None:
        """Return the storage whose next use is farthest away, and farther than `after_s` seconds.

        Unknown uses are farthest, least recently used first. `idle`: only storages without a copy in progress.
        """
        chosen, farthest_s = None, after_s
        now_s = time.perf_counter()
        for tracked in self._evictable:
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
                tracked.slot = self.spill.take(tracked.nbytes)
            self.copier.make(TrackedCopy(tracked, storage, is_load=False))
            self.moved_bytes += tracked.nbytes
            tracked.is_clean = True
        self._leave(tracked, storage)

    def _leave(self, tracked: Tracked, storage: Any) -> None:
        tracked.is_out = True
        resize_storage(storage, 0)
        if tracked in self._evictable:
            del self._evictable[tracked]
            self.used_bytes -= tracked.nbytes

    def _allocate(self, tracked: Tracked, storage: Any) -> None:
        resize_storage(storage, tracked.nbytes)
        tracked.stream = self._stream
        self._allocated(tracked.nbytes)

    def _deallocate(self, tracked: Tracked, storage: Any) -> None:
        resize_storage(storage, 0)
        self.used_bytes -= tracked.nbytes

    def _arrived(self, tracked: Tracked) -> None:
        tracked.is_out = False
        if not tracked.is_pinned:
            self._evictable[tracked] = None

    def _allocated(self, nbytes: int) -> None:
        self.used_bytes += nbytes
        self.headroom_bytes -= nbytes

    def _release_slot(self, tracked: Tracked) -> None:
        slot, tracked.slot = tracked.slot, None
        tracked.is_clean = False
        if slot is not None:
            self.spill.give_back(slot)

    # Copies while ops run

    def start(self) -> None:
        self.copier.start()
        self.enter_stream()

    def after_fork(self) -> None:
        """Continue without the copy thread, which a forked process lacks."""
        self.limit_bytes = self.headroom_bytes = NEVER
        while self._copies:
            copy = self._copies.popleft()
            if not copy.end.is_set():
                copy.error = InterruptedError()
            self._complete(copy)

    def stop(self) -> None:
        """Make the pending copies, and complete them."""
        self.copier.close()
        while self._copies:
            self._complete(self._copies.popleft())
        self.spill.close()

    def enter_stream(self) -> None:
        """Take the calling thread's current stream as that of the next op."""
        self._stream = self.copier.streams.current()

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
        self._allocate(tracked, storage)
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
                chosen.slot = self.spill.take(chosen.nbytes)
            leaving += chosen.nbytes
            self._begin(chosen, storage, is_load=False)

    def _copies_of(self, is_load: bool) -> int:
        return sum(copy.is_load == is_load for copy in self._copies)

    def _begin(self, tracked: Tracked, storage: Any, is_load: bool) -> None:
        copy = tracked.copy = TrackedCopy(tracked, storage, is_load)
        self._copies.append(copy)
        self.copier.begin(copy)

    def _wait(self, tracked: Tracked) -> None:
        copy = tracked.copy
        if copy is not None:
            copy.end.wait()
            self._complete(copy)

    def _complete(self, copy: TrackedCopy) -> None:
        """Apply a finished copy. The storage may have been used or written since the copy began."""
        tracked, storage = copy.tracked, copy.storage
        copy.storage = None
        if tracked.copy is not copy:
            return
        tracked.copy = None
        if copy.is_load:
            if copy.error is not None:  # the op that needs the bytes reads them again, and raises
                self._deallocate(tracked, storage)
                return
            self._arrived(tracked)
            self.moved_bytes += tracked.nbytes
            return
        if copy.error is not None or tracked.is_dead:
            return
        self.moved_bytes += tracked.nbytes
        if tracked.writes == copy.writes and not tracked.is_pinned:
            tracked.is_clean = True
            if not tracked.uses:
                self._leave(tracked, storage)
