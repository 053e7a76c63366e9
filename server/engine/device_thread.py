"""The thread that owns the device: executes what the scheduler chooses, and a piece of a chore in between."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from server.engine.doorbell import Doorbell
from server.engine.rows import parted
from server.engine.statistics import ModelStatistics
from server.errors import ExecutionFailed, RequestError
from server.model import Execution, Servable
from server.request import InferRequest
from server.scheduling.queues import Ticket
from server.scheduling.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from runtime.recording import Follow

_log = logging.getLogger("cohabit.engine")

Outcome = Execution | RequestError


class Chore(Protocol):
    """Work on the device that is done a piece at a time, so that no request waits for all of it."""

    def advance(self) -> bool:
        """Do a piece, which should take less time than an inference; True when nothing is left. Engine's thread."""
        ...


@dataclass(frozen=True, slots=True)
class Order:
    """A chore, and how to say that it has ended."""

    chore: Chore
    settle: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class Model:
    """What executes a model's requests, and what counts them."""

    servable: Servable
    statistics: ModelStatistics


class Listener(Protocol):
    """Hears what has happened. Called on the event loop's thread."""

    def executed(self, tickets: Sequence[Ticket], outcomes: Sequence[Outcome], ended_s: float) -> None: ...
    def too_late(self, tickets: Sequence[Ticket]) -> None: ...
    def device_lost(self, reason: str) -> None: ...


class DeviceThread:
    """`lock` guards the scheduler, `orders` and `stopped`; whoever changes one of them lets the thread look."""

    def __init__(
        self, scheduler: Scheduler, listener: Listener, clock: Callable[[], float], prefetch: bool
    ) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.orders: deque[Order] = deque()
        self.stopped = False
        self.models: dict[tuple[str, int], Model] = {}
        """By name and generation."""
        self.prefetching: frozenset[str] = frozenset()
        """Models whose copies may begin beside the execution before theirs."""
        self.computed_s = 0.0
        """How long the compute lane has worked."""
        self._listener = listener
        self._clock = clock
        self._prefetch = prefetch
        self._bell = Doorbell()
        self._chore_is_next = False
        """Whether an inference ran since the last piece of a chore."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def look(self) -> None:
        """Let the thread look at what has changed. Event loop's thread."""
        self._bell.ring()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, if it was started."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while (pick := self._take()) is not None:
                if isinstance(pick, Work):
                    self._work(pick)
                else:
                    self._advance(pick)
        except BaseException as error:  # a fault of ours: nobody must wait for an answer that never comes
            _log.exception("the engine has failed")
            self._tell(self._listener.device_lost, f"the engine has failed: {type(error).__name__}: {error}")

    def _take(self) -> Work | Order | None:
        """Wait for the next thing to do: inferences and chores take turns; None to stop."""
        while True:
            with self.lock:
                if self.stopped:
                    return None
                now_s = self._clock()
                if self.orders and self._chore_is_next:
                    self._chore_is_next = False
                    return self.orders[0]
                work = self.scheduler.next(now_s)
                if hopeless := self.scheduler.shed(now_s):
                    self._tell(self._listener.too_late, hopeless)
                if work is not None:
                    self._chore_is_next = True
                    return work
                if self.orders:
                    return self.orders[0]
                wake_s = self.scheduler.wake_s(now_s)
            self._bell.wait(None if wake_s == math.inf else max(wake_s - now_s, 0.0))

    def _advance(self, order: Order) -> None:
        error: BaseException | None = None
        try:
            ended = order.chore.advance()
        except Exception as raised:
            ended, error = True, raised
        if ended:
            with self.lock:
                if order in self.orders:
                    self.orders.remove(order)
            self._tell(order.settle, error)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed: nobody waits any more
            _log.debug("the event loop has closed")

    def _work(self, work: Work) -> None:
        """Execute requests together; should that fail, one by one, so that each fails for itself alone."""
        model, tickets = self.models[work.model, work.tickets[0].generation], work.tickets
        started_s = self._clock()
        outcomes = self._execute(model, tickets)
        failed = isinstance(outcomes[0], RequestError)
        with self.lock:
            now_s = self._clock()
            self.scheduler.finished(work, now_s, None if failed else now_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [outcome for ticket in tickets for outcome in self._execute(model, [ticket])]
        self._tell(self._listener.executed, tickets, outcomes, self._clock())
        if model.servable.lost is not None:
            self._tell(self._listener.device_lost, model.servable.lost)

    def _execute(self, model: Model, tickets: Sequence[Ticket]) -> list[Outcome]:
        """Execute requests as one batch; either all are answered and counted, or there is one error for each."""
        requests, started_s = [ticket.request for ticket in tickets], self._clock()
        rows = sum([request.batch for request in requests])
        try:
            self._tell_next()
            inputs = [request.inputs for request in requests]
            execution = model.servable.execute(inputs, rows, _follower(requests))
        except RequestError as error:
            return [error] * len(tickets)
        except Exception as error:
            trace = requests[0].trace
            fields = {
                "model": requests[0].model,
                "request": requests[0].id,
                **(trace.fields if trace is not None else {}),
            }
            _log.exception("execution failed", extra={"fields": fields})
            return [ExecutionFailed(requests[0].model, f"{type(error).__name__}: {error}")] * len(tickets)
        parting_s = self._clock()
        answers: list[Outcome] = [*parted(requests, execution)]
        ended_s = self._clock()
        execution = replace(execution, output_s=execution.output_s + ended_s - parting_s)
        self.computed_s += max(execution.compute_s - execution.stall_s, 0.0)
        busy_s, queued_s = ended_s - started_s, [started_s - ticket.arrived_s for ticket in tickets]
        model.statistics.executed(rows, execution, busy_s, queued_s, round(time.time() * 1e3))
        for ticket in tickets:
            if (trace := ticket.request.trace) is not None:
                trace.executed(ticket.arrived_s, started_s, busy_s, execution, rows)
        return answers

    def _tell_next(self) -> None:
        """Let the next request's model begin its copies."""
        if self._prefetch and self.prefetching:
            with self.lock:
                ahead = self.scheduler.ahead(self._clock())
            model = self.models.get((ahead.model, ahead.tickets[0].generation)) if ahead is not None else None
            if ahead is not None and model is not None:
                model.servable.expect(ahead.rows, _follower(t.request for t in ahead.tickets) is not None)


def _follower(requests: Iterable[InferRequest]) -> "Follow | None":
    """Whoever wants to know what the lanes do for one of these requests: the first, if there are several."""
    for request in requests:
        if request.trace is not None and request.trace.follow is not None:
            return request.trace.follow
    return None
