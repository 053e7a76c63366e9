"""Postpones interrupts: one that arrives while storages are swapped is delivered once they are consistent."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

_PACKAGE = str(Path(__file__).parent)


class Interrupts:
    """Holds back an interrupt (SIGINT) that arrives while code of this package runs."""

    def __init__(self) -> None:
        self.pending: tuple[int, FrameType | None] | None = None
        """Arguments for the signal's handler."""
        self._handler: Callable[[int, FrameType | None], Any] = signal.default_int_handler

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, hold interrupts back. Python handles signals in the main thread; others need no block."""
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(handler):
            yield
            return

        def hold(number: int, frame: FrameType | None) -> None:
            at = frame
            while at is not None:
                if at.f_code.co_filename.startswith(_PACKAGE):
                    self.pending = number, frame
                    return
                at = at.f_back
            handler(number, frame)

        self._handler = handler
        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
            self.deliver()

    def deliver(self) -> None:
        """Call the handler for the pending interrupt, if there is one and this is the main thread."""
        if self.pending is not None and threading.current_thread() is threading.main_thread():
            (number, frame), self.pending = self.pending, None
            self._handler(number, frame)
