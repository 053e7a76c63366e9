"""Copies between inferences: residents and epilogues.

They go to the swap-in stream in the order in which they are submitted. Copies from pinned memory are issued at once;
those through the staging ring by a thread of their own, which waits for the ring so that the engine need not.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cohabit.runtime.cuda.api import CapturedGraph, Event
from cohabit.runtime.cuda.issue import Perform, Streams
from cohabit.runtime.cuda.joining import Copy
from cohabit.runtime.cuda.program import CudaProgram


@dataclass(slots=True)
class Transfer:
    """Copies of one model in progress."""

    event: Event
    """Reached when all of them have ended."""
    issued: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Feeder(ThreadPoolExecutor):
    """A thread that makes calls which need host work and do not raise, in order. It starts when it is first needed."""

    def __init__(self) -> None:
        super().__init__(1, "swap-in")

    def drain(self) -> None:
        """Return when every call has been made."""
        self.submit(int).result()


class Transfers:
    """Issues copies to the swap-in stream, and records per model what its next run must wait for."""

    def __init__(self, streams: Streams, feeder: Feeder) -> None:
        self._streams = streams
        self._feeder = feeder
        self._pending: dict[str, Transfer] = {}

    def submit(
        self,
        program: CudaProgram,
        copies: Sequence[Copy],
        perform: Perform | None = None,
        graph: CapturedGraph | None = None,
    ) -> Transfer:
        """Issue copies after everything submitted so far; as a graph, where there is one of them."""
        transfer = Transfer(self._streams.driver.event())
        carry_out = perform or program.performing(self._streams.driver, [])

        def work() -> None:
            try:
                self._issue(copies, transfer.event, carry_out, graph)
            except Exception as error:  # the thread continues, and the model's next run receives the error
                transfer.error = error
            transfer.issued.set()

        self._pending[program.name] = transfer
        if program.staged:
            self._feeder.submit(work)
        else:
            work()
        return transfer

    def take(self, model: str) -> Transfer | None:
        """Return a model's last transfer once it has been issued; None if there was none since the last call."""
        transfer = self._pending.pop(model, None)
        if transfer is not None:
            transfer.issued.wait()
        return transfer

    def _issue(self, copies: Sequence[Copy], event: Event, perform: Perform, graph: CapturedGraph | None) -> None:
        driver = self._streams.driver
        with driver.on(self._streams.swap_in):
            try:
                if graph is not None:
                    graph.replay()
                    return
                for copy in copies:
                    perform(copy)
            finally:
                driver.record(event)
