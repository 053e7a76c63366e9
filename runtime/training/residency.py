"""Tracks which storages are in memory, evicts them and swaps them in.

Invariant: a storage with `is_out` has all of its bytes in its spill slot; any other storage has them in memory. An
interrupt between two lines therefore loses nothing, and `bring_in_all_but` restores all storages.

While ops are seen, all tensors are tracked, and what leaves is chosen here, within `limit_bytes`. Otherwise only what
autograd and the optimizers own is tracked, `saved.py` and `state.py` say what leaves, and there is no limit here.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import torch

from cohabit.runtime.training.copies.copying import Copier
from cohabit.runtime.training.copies.spill import SpillStore
from cohabit.runtime.training.tracked import (
    LEAST_BYTES,
    NEVER,
    CopyWaits,
    StorageCopy,
    StorageRef,
    Tracked,
    has_bytes,
    resize_storage,
    storage_nbytes,
)

_MOST_COPIES: Final = 16
"""Maximum pending copies in each direction."""


class Residency:
    """Keeps the bytes of tracked storages within a limit. The caller holds a lock around every call."""

    def __init__(self, device: torch.device, spill: SpillStore[Any], copier: Copier) -> None:
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
        self.waits = CopyWaits()
        self.state_bytes = self.state_out_bytes = 0
        """While ops are not seen: of optimizers' state that stays in memory and is not tracked, and of the rest."""
        self.saving = self.loading = 0
        """Numbers of pending copies."""
        self._failure: BaseException | None = None
        """Error of a copy out. The storage has stayed in memory."""
        self.device = device
        self.spill = spill
        self.copier = copier
        self._stream = 0
        """Stream of the op that is about to run, or has just run."""
        self._tracked: dict[int, Tracked] = {}
        self._evictable: OrderedDict[Tracked, None] = OrderedDict()
        """Evictable storages, least recently used first."""
        self._deaths: deque[StorageRef] = deque()
        self._copies: deque[StorageCopy] = deque()

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

    def forget(self, tracked: Tracked) -> None:
        """Count a storage no more: it has died, or nothing evicts it from now on. Then it must be in memory."""
        if tracked.is_forgotten:
            return
        tracked.is_forgotten = True
        tracked.ref.tracked = None  # the two refer to each other
        self.alive_bytes -= tracked.nbytes
        if not tracked.is_out or (tracked.copy is not None and tracked.copy.is_load):
            self.used_bytes -= tracked.nbytes
        self._evictable.pop(tracked, None)
        if self._tracked.get(tracked.key) is tracked:
            del self._tracked[tracked.key]
        if tracked.copy is None:  # otherwise its slot is in use until the copy has ended
            self._release_slot(tracked)

    def collect_dead(self) -> int:
        """Forget dead storages, and complete copies that have ended. Returns the bytes of memory freed."""
        before = self.used_bytes
        while self._deaths:
            tracked = self._deaths.popleft().tracked
            if tracked is not None:
                self.forget(tracked)
        freed_bytes = before - self.used_bytes
        while self._copies and self._copies[0].end.is_set():
            self._complete(self._next_copy())
        return freed_bytes

    @property
    def has_news(self) -> bool:
        """Whether there is something to collect."""
        return bool(self._deaths) or (bool(self._copies) and self._copies[0].end.is_set())

    def _next_copy(self) -> StorageCopy:
        copy = self._copies.popleft()
        self.loading -= copy.is_load
        self.saving -= not copy.is_load
        return copy

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
        """Mark the bytes in memory as newer than the slot's: a copy out under way does not make the storage leave.

        May be called just before they are written.
        """
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
        if storage is not None and tracked.is_pinned and storage.resizable() and not tracked.is_forgotten:
            tracked.is_pinned = False
            self.changed(tracked)
            self._evictable[tracked] = None

    @property
    def arriving_bytes(self) -> int:
        """Bytes of pending prefetches. `used_bytes` includes them, although they may not be in memory yet."""
        return sum(copy.tracked.nbytes for copy in self._copies if copy.is_load)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of storages that leave when their copies have ended. `used_bytes` includes them until then."""
        return sum(copy.nbytes for copy in self._copies if copy.is_leaving)

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
                self.copier.make(StorageCopy(tracked, storage, is_load=True))
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
            if chosen is not None:
                self._evict(chosen)
            elif not self.finish_oldest():
                return False
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

    def bring_in_all_but(self, kept: Collection[Tracked] = ()) -> None:
        """Swap in every storage but those, ignoring the limit, and track it no more."""
        self.limit_bytes = self.headroom_bytes = NEVER
        self.enter_stream()
        self.collect_dead()
        others = [tracked for tracked in self._tracked.values() if tracked not in kept]
        for tracked in others:
            self.bring_in(tracked)
        self.collect_dead()
        for tracked in others:
            self.forget(tracked)
        self._failure = None

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
            self._take_slot(tracked)
            self.copier.make(StorageCopy(tracked, storage, is_load=False))
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

    def _take_slot(self, tracked: Tracked) -> None:
        if tracked.slot is None:
            tracked.slot = self.spill.take(tracked.nbytes)

    def _release_slot(self, tracked: Tracked) -> None:
        slot, tracked.slot = tracked.slot, None
        tracked.is_clean = False
        if slot is not None:
            self.spill.give_back(slot)

    # Copies while ops run

    def start(self) -> None:
        self.copier.start()
        self.enter_stream()
        self.waits = CopyWaits()
        self.peak_bytes = self.exceeded_bytes = 0

    def after_fork(self) -> None:
        """Continue without the copy thread, which a forked process lacks."""
        self.limit_bytes = self.headroom_bytes = NEVER
        while self._copies:
            copy = self._next_copy()
            if not copy.end.is_set():
                copy.error = InterruptedError()
            self._complete(copy)
        self._failure = None

    def stop(self) -> None:
        """Make the pending copies, and complete them."""
        self.copier.close()
        while self._copies:
            self._complete(self._next_copy())
        self._failure = None
        self.spill.close()

    def enter_stream(self) -> None:
        """Take the calling thread's current stream as that of the next op."""
        self._stream = self.copier.streams.current()

    def prefetch(self, tracked: Tracked) -> bool:
        """Start swapping a storage in, if it fits. Returns whether more prefetches may follow."""
        needed_bytes = self.reserved_bytes + tracked.nbytes
        if self.used_bytes + needed_bytes > self.limit_bytes or needed_bytes > self.headroom_bytes:
            return False
        if self.loading >= _MOST_COPIES:
            return False
        self.load(tracked)
        return True

    def write_ahead(self, needed_bytes: int, after_s: float) -> None:
        """Start saving storages whose next use is over `after_s` seconds away, to free `needed_bytes` in time."""
        leaving = sum(copy.nbytes for copy in self._copies if not copy.is_load)
        needed_bytes += self.reserved_bytes
        while self.used_bytes - leaving + needed_bytes > self.limit_bytes:
            chosen = self._choose(after_s, idle=True)
            if chosen is None or self.saving >= _MOST_COPIES or chosen.storage is None:
                return
            if not chosen.is_clean:
                leaving += chosen.nbytes
            self.save(chosen)

    def save(self, tracked: Tracked) -> None:
        """Start a copy out. The storage leaves when it has ended, unless it is used or written before."""
        storage = tracked.storage
        if storage is None:
            return
        if tracked.is_clean:
            self._leave(tracked, storage)
            return
        self._take_slot(tracked)
        self._begin(tracked, storage, is_load=False)

    def load(self, tracked: Tracked) -> None:
        """Start swapping in a storage that is out, ignoring the limit."""
        storage = tracked.storage
        if storage is not None and tracked.is_out and tracked.copy is None:
            self._allocate(tracked, storage)
            self._begin(tracked, storage, is_load=True)

    def finish_oldest(self) -> bool:
        """Wait for the oldest pending copy. Returns whether there was one."""
        if not self._copies:
            return False
        copy = self._next_copy()
        self.waits.wait(copy)
        self._complete(copy)
        return True

    def collect(self) -> None:
        """Do as `collect_dead`, and raise the error of a copy out: nothing tries it again."""
        self.collect_dead()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish_saves(self) -> None:
        """Wait until all that is leaving has left."""
        while self.saving:
            self.finish_oldest()

    def _begin(self, tracked: Tracked, storage: Any, is_load: bool) -> None:
        copy = tracked.copy = StorageCopy(tracked, storage, is_load)
        self._copies.append(copy)
        self.loading += is_load
        self.saving += not is_load
        self.moved_bytes += tracked.nbytes
        self.copier.begin(copy)

    def _wait(self, tracked: Tracked) -> None:
        copy = tracked.copy
        if copy is not None:
            self.waits.wait(copy)
            self._complete(copy)

    def _complete(self, copy: StorageCopy) -> None:
        """Apply a finished copy. The storage may have been used or written since the copy began."""
        tracked, storage = copy.tracked, copy.storage
        copy.storage = None
        if tracked.copy is not copy:
            return
        tracked.copy = None
        if tracked.is_forgotten:
            self._release_slot(tracked)
        elif copy.is_load:
            if copy.error is not None:  # the op that needs the bytes reads them again, and raises
                self._deallocate(tracked, storage)
                return
            self._arrived(tracked)
        elif copy.error is not None:
            self._failure = copy.error
        elif tracked.writes == copy.writes and not tracked.is_pinned:
            tracked.is_clean = True
            if not tracked.uses:
                self._leave(tracked, storage)
