"""A store that waits for the test: what happens beside a copy is then no matter of luck."""

import threading
from typing import Any

from cohabit.runtime.memory import Copy
from cohabit.runtime.stores.host import RamStore
from cohabit.runtime.stores.pages import Bytes

WAIT_S = 20.0


class GatedStore(RamStore):
    """A store whose copies tell when the first of them has begun, and wait until the test lets them go."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.open = threading.Event(), threading.Event()

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = super().copy(segment, destination)

        def gated() -> None:
            self.begun.set()
            assert self.open.wait(WAIT_S)
            copy()

        return gated
