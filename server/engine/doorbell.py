"""How the event loop wakes the device's thread: a lock of C's that one rings and the other waits for.

`threading.Condition` makes a lock for every wait and keeps a list of them, in Python; here a wake-up is one call on
either side.
"""

import threading


class Doorbell:
    """Rung by one thread, waited for by another. A ring that nobody waits for is remembered; several are one."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        self._silent.acquire()

    def ring(self) -> None:
        """End the wait, or the next one. It must always be the same thread that rings."""
        if self._silent.locked():
            self._silent.release()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it has rung since the last wait, or after `timeout_s`."""
        self._silent.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
