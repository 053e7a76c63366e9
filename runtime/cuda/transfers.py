"""Copies outside of an inference's own: residents, prefixes ahead of their turn, epilogues behind it.

They go to the swap-in stream in the order in which they are submitted. Copies from pinned memory are issued at once;
those through the staging ring by a thread of their own, which waits for the ring so that the engine need not.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from runtime.cuda.api import Event
from runtime.cuda.issue import Perform, Streams
from runtime.cuda.program import CudaProgram
from runtime.cuda.schedule import Copy


@dataclass(slots=True)
class Transfer:
    """Copies under way for one model."""

    event: Event
    """Reached when all of them have ended."""
    issued: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Feeder:
    """A thread that issues what needs host work, in the order in which it is given."""

    def __init__(self) -> None:
        self._queue: deque[Callable[[], None]] = deque()
        self._wake = threading.Semaphore(0)
        self._idle = threading.Condition()
        self._open = 0
        self._thread: threading.Thread | None = None
        self._closing = False

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a call, which must not raise."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="swap-in", daemon=True)
            self._thread.start()
        with self._idle:
            self._open += 1
        self._queue.append(work)
        self._wake.release()

    def drain(self) -> None:
        """Return when every call has been made."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)

    def close(self) -> None:
        self.drain()
        self._closing = True
        self._wake.release()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            self._wake.acquire()
            if self._closing:
                return
            self._queue.popleft()()
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


class Transfers:
    """Issues copies to the swap-in stream and remembers, per model, what its next run must wait for."""

    def __init__(self, streams: Streams, feeder: Feeder) -> None:
        self._streams = streams
        self._feeder = feeder
        self._pending: dict[str, list[Transfer]] = {}

    def submit(
        self,
        program: CudaProgram,
        copies: Sequence[Copy],
        behind: Event | None = None,
        perform: Perform | None = None,
    ) -> Transfer:
        """Issue copies behind everything submitted so far, and behind an event."""
        transfer = Transfer(self._streams.driver.event())
        carry_out = perform or program.performing(self._streams.driver, [])

        def work() -> None:
            try:
                self._issue(copies, behind, transfer.event, carry_out)
            except Exception as error:  # whatever it is, the thread lives and the model's next run is told
                transfer.error = error
            transfer.issued.set()

        self._pending.setdefault(program.name, []).append(transfer)
        if program.staged:
            self._feeder.submit(work)
        else:
            work()
        return transfer

    def take(self, model: str) -> list[Transfer]:
        """A model's transfers since the last call, all of them issued."""
        transfers = self._pending.pop(model, [])
        for transfer in transfers:
            transfer.issued.wait()
        return transfers

    def _issue(self, copies: Sequence[Copy], behind: Event | None, event: Event, perform: Perform) -> None:
        driver = self._streams.driver
        with driver.on(self._streams.swap_in):
            if behind is not None:
                driver.wait(behind)
            try:
                for copy in copies:
                    perform(copy)
            finally:
                driver.record(event)
