"""Sends requests in an open loop: each at its drawn time, independently of answers to others."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from cohabit.loadgen.arrivals import RequestArrival

NOT_SENT = "not sent"
"""Kind of failure of requests that were due while too many others were unanswered."""

Send = Callable[[str], Awaitable[None]]
"""Send one request to the named model; return when it is answered, raise RequestFailed if it is not."""


class RequestFailed(Exception):
    """One request was not answered. It is counted by `kind`; the run goes on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one arrival. Both durations count from the intended send time."""

    arrival: RequestArrival
    lag_s: float
    """Delay of the generator itself."""
    latency_s: float
    failure: RequestFailed | None = None


@dataclass(slots=True)
class Tally:
    """Counts of a run in progress, for a display."""

    sent: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)


async def run_open_loop(
    arrivals: Sequence[RequestArrival], send: Send, max_in_flight: int, tally: Tally | None = None
) -> list[Outcome]:
    """Send every arrival at its time, and return when all are answered or have failed.

    An arrival that finds `max_in_flight` requests unanswered is counted as NOT_SENT, not postponed.
    """
    run = _OpenLoop(send, max_in_flight, tally or Tally(), asyncio.get_running_loop())
    stop = threading.Event()
    # Event loops wake with millisecond precision; a sleeping thread is ten times as precise.
    pacer = threading.Thread(target=run.pace, args=(arrivals, stop), name="pacer", daemon=True)
    pacer.start()
    try:
        await run.all_due.wait()
        while run.tasks:
            await asyncio.wait(run.tasks)
    finally:
        stop.set()
        pacer.join()
        for task in run.tasks:
            task.cancel()
        await asyncio.gather(*run.tasks, return_exceptions=True)
    return run.outcomes


class _OpenLoop:
    def __init__(self, send: Send, max_in_flight: int, tally: Tally, loop: asyncio.AbstractEventLoop) -> None:
        self.send = send
        self.max_in_flight = max_in_flight
        self.tally = tally
        self.loop = loop
        self.start_s = time.perf_counter()
        self.all_due = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[Outcome] = []

    def pace(self, arrivals: Sequence[RequestArrival], stop: threading.Event) -> None:
        """Hand each arrival to the event loop when it is due. Runs in the pacer thread."""
        for arrival in arrivals:
            stop.wait(max(0.0, arrival.at_s - self._elapsed_s()))
            if stop.is_set():
                return
            self.loop.call_soon_threadsafe(self._launch, arrival)
        self.loop.call_soon_threadsafe(self.all_due.set)

    def _launch(self, arrival: RequestArrival) -> None:
        lag_s = self._elapsed_s() - arrival.at_s
        if len(self.tasks) >= self.max_in_flight:
            detail = f"{self.max_in_flight} requests were unanswered"
            self._record(Outcome(arrival, lag_s, lag_s, RequestFailed(NOT_SENT, detail)))
            return
        self.tally.sent += 1
        self.tally.in_flight += 1
        task = self.loop.create_task(self._one(arrival, lag_s))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _one(self, arrival: RequestArrival, lag_s: float) -> None:
        failure = None
        try:
            await self.send(arrival.model)
        except RequestFailed as failed:
            failure = failed
        finally:
            self.tally.in_flight -= 1
        self._record(Outcome(arrival, lag_s, self._elapsed_s() - arrival.at_s, failure))

    def _record(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        if outcome.failure is None:
            self.tally.answered += 1
        else:
            self.tally.failed[outcome.failure.kind] += 1

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s
