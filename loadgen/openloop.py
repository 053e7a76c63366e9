"""Sends requests in an open loop (each at its drawn time, whether or not earlier ones are answered) or closed loop."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cohabit.loadgen.arrivals import RequestArrival

NOT_SENT = "not sent"
"""Failure kind of requests that were due while too many others were in flight."""

INTERRUPTED = "interrupted"
"""Failure kind of requests in flight when the run was cancelled."""


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Arrival times of a text's tokens."""

    first_s: float
    """Seconds from the actual send time to the first token."""
    gaps_s: tuple[float, ...]
    """Seconds between consecutive tokens."""


Send = Callable[[RequestArrival], Awaitable[TokenTimes | None]]
"""Sends an arrival's request and waits for the answer. Returns token times for a text. Raises RequestFailed."""


class RequestFailed(Exception):
    """A request failed. It is counted by `kind`, and the run goes on."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)  # pickle passes these to `__init__`
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one arrival. Both durations count from the intended send time."""

    arrival: RequestArrival
    lag_s: float
    """Delay of the generator until it sent the request."""
    latency_s: float
    failure: RequestFailed | None = None
    tokens: TokenTimes | None = None


@dataclass(slots=True)
class Tally:
    """Counts and outcomes of a run in progress or cancelled."""

    sent: int = 0
    in_flight: int = 0
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    outcomes: list[Outcome] = field(default_factory=list)


async def run_open_loop(
    arrivals: Sequence[RequestArrival],
    send: Send,
    max_in_flight: int,
    tally: Tally | None = None,
    start_s: float | None = None,
) -> list[Outcome]:
    """Send every arrival at its time. Returns when all are answered or have failed.

    An arrival that is due while `max_in_flight` requests are unanswered is not postponed, but counted as NOT_SENT.
    `start_s` is the start of the run by `time.perf_counter`, whose clock all processes share; by default, the run
    starts now. After a cancelled run, `tally` has its outcomes.
    """
    run = _Requests(send, max_in_flight, tally or Tally(), asyncio.get_running_loop(), start_s)
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
    return run.tally.outcomes


async def run_closed_loop(
    models: Iterator[str], send: Send, concurrency: int, duration_s: float, tally: Tally | None = None
) -> list[Outcome]:
    """Run `concurrency` clients that send one request at a time for `duration_s`. Returns when all are answered."""
    run = _Requests(send, concurrency, tally or Tally(), asyncio.get_running_loop(), None)

    async def client() -> None:
        while (at_s := run.elapsed_s()) < duration_s:
            run.count_as_sent()
            await run.send_one(RequestArrival(at_s, next(models)), lag_s=0.0)

    clients = [asyncio.create_task(client()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*clients)
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return run.tally.outcomes


class _Requests:
    def __init__(
        self,
        send: Send,
        max_in_flight: int,
        tally: Tally,
        loop: asyncio.AbstractEventLoop,
        start_s: float | None,
    ) -> None:
        self.send = send
        self.max_in_flight = max_in_flight
        self.tally = tally
        self.loop = loop
        self.start_s = time.perf_counter() if start_s is None else start_s
        self.all_due = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()

    def pace(self, arrivals: Sequence[RequestArrival], stop: threading.Event) -> None:
        """Hand each arrival to the event loop when it is due. Runs in the pacer thread."""
        for arrival in arrivals:
            stop.wait(max(0.0, arrival.at_s - self.elapsed_s()))
            if stop.is_set():
                return
            self.loop.call_soon_threadsafe(self._launch, arrival)
        self.loop.call_soon_threadsafe(self.all_due.set)

    def _launch(self, arrival: RequestArrival) -> None:
        lag_s = self.elapsed_s() - arrival.at_s
        if len(self.tasks) >= self.max_in_flight:
            detail = f"{self.max_in_flight} requests were unanswered"
            self._record(Outcome(arrival, lag_s, lag_s, RequestFailed(NOT_SENT, detail)))
            return
        self.count_as_sent()
        task = self.loop.create_task(self.send_one(arrival, lag_s))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def count_as_sent(self) -> None:
        self.tally.sent += 1
        self.tally.in_flight += 1

    async def send_one(self, arrival: RequestArrival, lag_s: float) -> None:
        failure: RequestFailed | None = RequestFailed(INTERRUPTED, "the run was interrupted before the answer")
        tokens: TokenTimes | None = None
        try:
            tokens = await self.send(arrival)
            failure = None
        except RequestFailed as failed:
            failure = failed
        except Exception as error:
            failure = RequestFailed(type(error).__name__, str(error))
        finally:
            self.tally.in_flight -= 1
            self._record(Outcome(arrival, lag_s, self.elapsed_s() - arrival.at_s, failure, tokens))

    def _record(self, outcome: Outcome) -> None:
        self.tally.outcomes.append(outcome)
        if outcome.failure is None:
            self.tally.answered += 1
        else:
            self.tally.failed[outcome.failure.kind] += 1

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.start_s
