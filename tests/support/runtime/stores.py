"""Stores whose copies do something else beside: they come late, wait for the test, or fail."""

import threading
import time
from typing import Any

from cohabit.runtime.memory import Copy
from cohabit.runtime.stores.host import RamStore
from cohabit.runtime.stores.pages import Bytes

WAIT_S = 20.0


class WatchedStore(RamStore):
    """A store each of whose copies is made within a call of `around`."""

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = super().copy(segment, destination)
        return lambda: self.around(segment, destination, copy)

    def around(self, segment: int, destination: Bytes, copy: Copy) -> None:
        raise NotImplementedError


class LateStore(WatchedStore):
    """A link on which the destination's bytes are gone when a copy begins, and all come at its very end."""

    late_s = 0.002

    def around(self, segment: int, destination: Bytes, copy: Copy) -> None:
        destination[:] = 0xFF
        time.sleep(self.late_s)
        copy()


class GatedStore(WatchedStore):
    """A store whose copies tell when the first of them has begun, and wait until the test lets them go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.open = threading.Event(), threading.Event()

    def around(self, segment: int, destination: Bytes, copy: Copy) -> None:
        self.begun.set()
        assert self.open.wait(WAIT_S)
        copy()


class FailingStore(WatchedStore):
    """A store whose copies of one segment fail while `failing` is set."""

    failing = False
    segment = 4

    def around(self, segment: int, destination: Bytes, copy: Copy) -> None:
        if self.failing and segment == self.segment:
            raise OSError("medium error")
        copy()
