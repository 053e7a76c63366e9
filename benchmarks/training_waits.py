"""Times the copies of a `cohabit.budget`, and how long ops wait for them."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cohabit.runtime.training.budget import Budget
from cohabit.runtime.training.copies.spill import SpillSlot, SpillStore


class CopyTimes:
    """Seconds of a budget's copies since `start`. The loop runs in the thread that made this, before it enters."""

    def __init__(self, limits: Budget) -> None:
        self._limits = limits
        self._loop = threading.get_ident()
        self._depth = 0
        self.start()
        residency = limits._residency
        residency.spill = _TimedStore(residency.spill, self)
        for name in ("make_room", "bring_in"):
            setattr(residency, name, self._waited(getattr(residency, name)))

    def start(self) -> None:
        self._moved_bytes = self._limits.moved_bytes
        self.waited_s = 0.0
        """In which the loop's ops could not run: their own copies, waits for the copy thread, choosing evictions."""
        self.loop_copies_s = 0.0
        """Of copies that the loop's ops made: a part of `waited_s`."""
        self.thread_copies_s = 0.0
        """Of copies that the copy thread made."""

    def of_step(self, steps: int) -> dict[str, float]:
        """Return the means of so many steps since `start`."""
        return {
            "swapped_bytes": (self._limits.moved_bytes - self._moved_bytes) / steps,
            "waited_s": self.waited_s / steps,
            "loop_copies_s": self.loop_copies_s / steps,
            "thread_copies_s": self.thread_copies_s / steps,
        }

    @contextmanager
    def copying(self) -> Iterator[None]:
        began_s = time.perf_counter()
        try:
            yield
        finally:
            took_s = time.perf_counter() - began_s
            if threading.get_ident() == self._loop:
                self.loop_copies_s += took_s
            else:
                self.thread_copies_s += took_s

    def _waited(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of the residency that counts as waiting, once where one calls another."""

        def timed(*args: Any) -> Any:
            self._depth += 1
            began_s = time.perf_counter()
            try:
                return method(*args)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.waited_s += time.perf_counter() - began_s

        return timed


class _TimedStore:
    """A spill store whose slots' copies are timed."""

    def __init__(self, store: SpillStore, times: CopyTimes) -> None:
        self._store, self._times = store, times

    def take(self, nbytes: int) -> SpillSlot:
        return _TimedSlot(self._store.take(nbytes), self._times)

    def give_back(self, slot: SpillSlot) -> None:
        assert isinstance(slot, _TimedSlot)
        self._store.give_back(slot.slot)

    def close(self) -> None:
        self._store.close()


class _TimedSlot:
    def __init__(self, slot: SpillSlot, times: CopyTimes) -> None:
        self.slot, self._times = slot, times
        self.capacity = slot.capacity

    def save(self, address: int) -> None:
        with self._times.copying():
            self.slot.save(address)

    def load(self, address: int) -> None:
        with self._times.copying():
            self.slot.load(address)
