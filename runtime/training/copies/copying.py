"""Copies of evicted bytes, made while ops run."""

import queue
import threading
import time
from typing import Any, Protocol, cast

from cohabit.runtime.training.tracked import StorageCopy


class StreamOrder(Protocol):
    """Orders copies with the streams on which counted ops run."""

    def current(self) -> int:
        """Return the number of the calling thread's stream. From now on, copies are ordered with its work."""
        ...

    def share(self, storage: Any) -> None:
        """Keep a storage's memory from being reused before the current stream's work so far and its next op end."""
        ...


class NoStreams:
    """For a CPU, whose ops end before they return."""

    def current(self) -> int:
        return 0

    def share(self, storage: Any) -> None: ...


class Copier(Protocol):
    """Makes copies to slots and back. The caller holds a lock around every call."""

    takes_memory_at_once: bool
    """Allocating takes memory from the device, even if nothing is written to it."""

    @property
    def streams(self) -> StreamOrder: ...

    def start(self) -> None: ...

    def bytes_per_s(self, is_load: bool) -> float | None:
        """Return the measured speed of copies in one direction; None if none were timed."""
        ...

    def begin(self, copy: StorageCopy) -> None:
        """Start a copy. It runs after all earlier ops, and after earlier copies of its slot."""
        ...

    def make(self, copy: StorageCopy) -> None:
        """Make a copy between all earlier and all later ops. Raises OSError for errors of a file."""
        ...

    def settle(self) -> None:
        """Block until no op has to wait for a copy: then anything may use the bytes in memory."""
        ...

    def close(self) -> None:
        """Block until all copies have ended, and stop."""
        ...


class _Made:
    """The end of a copy that a thread makes. There are two for each tensor that moves, and a lock is made quickly."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def is_set(self) -> bool:
        return not self._lock.locked()

    def set(self) -> None:
        self._lock.release()

    def wait(self) -> None:
        with self._lock:
            pass


class CopyThread:
    """Copies within the CPU's memory, or to a file."""

    takes_memory_at_once = False

    def __init__(self) -> None:
        self.streams: StreamOrder = NoStreams()
        self._waiting: queue.SimpleQueue[StorageCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._made = dict.fromkeys((False, True), (0, 0.0))
        """Bytes and seconds of the copies so far, by direction."""

    def bytes_per_s(self, is_load: bool) -> float | None:
        nbytes, seconds = self._made[is_load]
        return nbytes / seconds if nbytes and seconds else None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._make_all, name="cohabit-budget", daemon=True)
        self._thread.start()

    def begin(self, copy: StorageCopy) -> None:
        copy.end = _Made()
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(copy)
        else:  # in a forked process
            self._finish(copy)

    def make(self, copy: StorageCopy) -> None:
        self._make_here(copy)

    def settle(self) -> None: ...

    def close(self) -> None:
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join()

    def _make_all(self) -> None:
        while (copy := self._waiting.get()) is not None:
            self._finish(copy)
            del copy

    def _finish(self, copy: StorageCopy) -> None:
        try:
            self._make_here(copy)
        except BaseException as error:
            copy.error = error
        cast(_Made, copy.end).set()

    def _make_here(self, copy: StorageCopy) -> None:
        began_s = time.perf_counter()
        copy.make()
        nbytes, seconds = self._made[copy.is_load]
        self._made[copy.is_load] = nbytes + copy.nbytes, seconds + time.perf_counter() - began_s
