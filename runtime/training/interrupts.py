"""Postpones signals: one that arrives while storages are swapped is delivered once they are consistent.

Python runs signal handlers between two lines of the main thread, and they may raise: the default one for SIGINT does,
and those of alarms and shutdowns do in many programs.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]
_PACKAGE = str(Path(__file__).parent)


class Interrupts:
    """Holds back signals that arrive while code of this package runs."""

    def __init__(self) -> None:
        self.pending: deque[tuple[Handler, int, FrameType | None]] = deque()
        """Handlers to be called, and their arguments."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside the block, hold signals back. Python handles them in the main thread; others need no block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        real = signal.signal

        def handle(number: int, handler: Any) -> Any:
            """Install a handler. Returns the one before, as the caller knows it."""
            before = real(number, partial(self._hold, handler) if callable(handler) else handler)
            return before.args[0] if isinstance(before, partial) and before.func == self._hold else before

        with ExitStack() as stack:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handle(number, handler)
            signal.signal = handle  # type: ignore[assignment]
            stack.callback(self.deliver)
            stack.callback(self._release, real)
            yield

    def deliver(self) -> None:
        """Call pending handlers, in the main thread."""
        if self.pending and threading.current_thread() is threading.main_thread():
            while self.pending:
                handler, number, frame = self.pending.popleft()
                handler(number, frame)

    def _release(self, real: Callable[[int, Any], Any]) -> None:
        """Install the handlers themselves again: those from before, or what the loop has replaced them with."""
        signal.signal = real  # type: ignore[assignment]
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            if isinstance(handler, partial) and handler.func == self._hold:
                real(number, handler.args[0])

    def _hold(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        at = frame
        while at is not None:
            if at.f_code.co_filename.startswith(_PACKAGE):
                self.pending.append((handler, number, frame))
                return
            at = at.f_back
        handler(number, frame)
