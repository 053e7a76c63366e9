"""A store whose bytes come late: whoever reads too early finds nothing of them."""

import time

from cohabit.runtime.memory import Copy
from cohabit.runtime.stores.host import RamStore
from cohabit.runtime.stores.pages import Bytes


class LateStore(RamStore):
    """A link on which the destination's bytes are gone when a copy begins, and all come at its very end."""

    late_s = 0.002

    def copy(self, segment: int, destination: Bytes) -> Copy:
        copy = super().copy(segment, destination)

        def late() -> None:
            destination[:] = 0xFF
            time.sleep(self.late_s)
            copy()

        return late
