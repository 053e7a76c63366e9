"""The thread that owns the device: executes what the scheduler chooses, and a piece of a chore in between.

What is over sooner than two threads hand it over, the event loop executes itself while this thread has nothing to do.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from server.engine.doorbell import Doorbell
from server.engine.rows import parted
from server.engine.statistics import ModelStatistics
from server.errors import ExecutionFailed, RequestError
from server.protocol.model import Execution, Servable
from server.protocol.request import InferRequest
from server.scheduling.queues import Ticket
from server.scheduling.scheduler import Scheduler, Suits, Work, anything

if TYPE_CHECKING:
    from runtime.recording import Follow

_log = logging.getLogger("cohabit.engine")

BRIEF_S = 5e-4
"""For so long the event loop may look at nothing else: several times what handing over and back costs, and no more."""

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


class _Told(msgspec.Struct, frozen=True):
    """The next model, how many of its rows are executed together, and how many requests waited for it; or nothing."""

    model: str = ""
    rows: int = 0
    waiting: int = -1


class Executed(msgspec.Struct, frozen=True):
    """What became of requests that were executed together, each in its place."""

    tickets: Sequence[Ticket]
    outcomes: Sequence[Outcome]
    ended_s: float
    lost: str | None
    """Why nothing more can be executed, if that is so."""


class Listener(Protocol):
    """Hears what has happened. Called on the event loop's thread."""

    def executed(self, done: Executed) -> None: ...
    def too_late(self, tickets: Sequence[Ticket]) -> None: ...
    def device_lost(self, reason: str) -> None: ...


class DeviceThread:
    """`lock` guards the scheduler, `orders` and `stopped`; whoever changes one of them lets the thread look.

    Whoever has `_device` may execute: the thread, unless it has nothing to do, or else the event loop.
    """

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
        self.prefetch = prefetch
        """Whether they do; read before each execution."""
        self.computed_s = 0.0
        """How long the compute lane has worked."""
        self._listener = listener
        self._clock = clock
        self._telling = threading.Lock()
        """Held to tell what is next, and where an execution begins and ends: the two do not meet."""
        self._told: _Told | None = None
        """What is next, as far as it was told, while something is being executed whose time others may use."""
        self._bell = Doorbell()
        self._device = threading.Lock()
        self._chore_is_next = False
        """Whether an inference ran since the last piece of a chore."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def look(self) -> None:
        """Let the thread look at what has changed. Event loop's thread."""
        self._bell.ring()

    def tell_late(self) -> None:
        """Let what has come begin its copies, if it is next behind what is being executed. Event loop's thread."""
        if self._told is not None:
            with self._telling:
                if self._told is not None and self._told.waiting != self.scheduler.pending(self._told.model):
                    self._told = self._tell_next(self._told)

    def work_briefly(self) -> bool:
        """Execute what is next, if that is brief and the thread has nothing to do; False if the thread has to look.

        Event loop's thread.
        """
        done = self._briefly(self._next)
        if done is not None:
            self._listener.executed(done)
        return done is not None

    def execute_at_once(self, request: InferRequest) -> Executed | None:
        """Execute a request without queueing it, if it is brief and nothing is before it; else None.

        Event loop's thread.
        """

        def only_this(now_s: float, suits: Suits) -> Work | None:
            return self.scheduler.at_once(now_s, request, suits)

        return self._briefly(only_this)

    def _briefly(self, take: Callable[[float, Suits], Work | None]) -> Executed | None:
        if not self._device.acquire(blocking=False):
            return None
        try:
            with self.lock:
                if self.stopped or self.orders:
                    return None
                work = take(self._clock(), self._is_brief)
            return None if work is None else self._work(work)
        except Exception as error:
            self._fail(error)
            return None
        finally:
            self._device.release()

    def _is_brief(self, work: Work, predicted_s: float) -> bool:
        model = self.models[work.model, work.tickets[0].generation]
        return predicted_s <= BRIEF_S and model.servable.only_computes

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, if it was started."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopped:
                with self._device:
                    wait_s = self._turn()
                if wait_s:
                    self._bell.wait(None if wait_s == math.inf else wait_s)
        except BaseException as error:  # a fault of ours: nobody must wait for an answer that never comes
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        _log.error("the engine has failed", exc_info=error)
        self._tell(self._listener.device_lost, f"the engine has failed: {type(error).__name__}: {error}")

    def _turn(self) -> float:
        """Do the next thing, inferences and chores in turn; returns for how many seconds there is nothing to do."""
        with self.lock:
            now_s = self._clock()
            order = self.orders[0] if self.orders else None
            work = None if order is not None and self._chore_is_next else self._next(now_s)
            self._chore_is_next = work is not None
            wait_s = self.scheduler.wake_s(now_s) - now_s if work is None and order is None else 0.0
        if work is not None:
            self._tell(self._listener.executed, self._work(work))
        elif order is not None:
            self._advance(order)
        return max(wait_s, 0.0)

    def _next(self, now_s: float, suits: Suits = anything) -> Work | None:
        """Take what is to be executed next, and refuse what is too late."""
        work = self.scheduler.next(now_s, suits)
        if hopeless := self.scheduler.shed(now_s):
            self._tell(self._listener.too_late, hopeless)
        return work

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

    def _work(self, work: Work) -> Executed:
        """Execute requests together; should that fail, one by one, so that each fails for itself alone."""
        tickets = work.tickets
        model = self.models[work.model, tickets[0].generation]
        started_s = self._clock()
        outcomes, ended_s = self._execute(model, tickets, work.rows, started_s)
        failed = isinstance(outcomes[0], RequestError)
        with self.lock:
            self.scheduler.finished(work, ended_s, None if failed else ended_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [self._alone(model, ticket) for ticket in tickets]
            ended_s = self._clock()
        return Executed(tickets, outcomes, ended_s, model.servable.lost)

    def _alone(self, model: Model, ticket: Ticket) -> Outcome:
        """Execute one of the requests that failed together."""
        (outcome,), _ = self._execute(model, [ticket], ticket.request.batch, self._clock())
        return outcome

    def _execute(
        self, model: Model, tickets: Sequence[Ticket], rows: int, started_s: float
    ) -> tuple[Sequence[Outcome], float]:
        """Execute requests as one batch; either all are answered and counted, or there is one error for each.

        Returns when it ended, too.
        """
        traced = [ticket for ticket in tickets if ticket.request.trace is not None]
        tells = self.prefetch and bool(self.prefetching)
        try:
            if tells:
                with self._telling:
                    self._told = self._tell_next(None)
            inputs = [ticket.request.inputs for ticket in tickets]
            execution = model.servable.execute(inputs, rows, _follower(traced) if traced else None)
        except RequestError as error:
            return [error] * len(tickets), self._clock()
        except Exception as error:
            return [_failure(tickets[0].request, error)] * len(tickets), self._clock()
        finally:
            if tells:
                with self._telling:
                    self._told = None
        answers = [execution]
        ended_s = self._clock()
        if len(tickets) > 1:
            answers, parting_s = parted([ticket.request for ticket in tickets], execution), ended_s
            ended_s = self._clock()
            execution = replace(execution, output_s=execution.output_s + ended_s - parting_s)
        self.computed_s += max(execution.compute_s - execution.stall_s, 0.0)
        busy_s, queued_s = ended_s - started_s, [started_s - ticket.arrived_s for ticket in tickets]
        model.statistics.executed(rows, execution, busy_s, queued_s, time.time())
        for ticket in traced:
            if (trace := ticket.request.trace) is not None:
                trace.executed(ticket.arrived_s, started_s, busy_s, execution, rows)
        return answers, ended_s

    def _tell_next(self, told: _Told | None) -> _Told:
        """Let the next request's model begin its copies, beside what is executed: later, where something was told.

        It hears again of its turn only if it will be for another batch.
        """
        with self.lock:
            ahead = self.scheduler.ahead(self._clock())
            waiting = 0 if ahead is None else self.scheduler.pending(ahead.model)
        model = self.models.get((ahead.model, ahead.tickets[0].generation)) if ahead is not None else None
        if ahead is None or model is None:
            return _Told()
        if told is None:
            model.servable.expect(ahead.rows, _follower(ahead.tickets) is not None)
        return _Told(ahead.model, ahead.rows, waiting)


def _follower(tickets: Iterable[Ticket]) -> "Follow | None":
    """Whoever wants to know what the lanes do for one of these requests: the first, if there are several."""
    for ticket in tickets:
        if (trace := ticket.request.trace) is not None and trace.follow is not None:
            return trace.follow
    return None


def _failure(request: InferRequest, error: Exception) -> ExecutionFailed:
    """What a client hears of a fault that nobody foresaw; it is logged while it is handled."""
    trace = {} if request.trace is None else request.trace.fields
    _log.exception("execution failed", extra={"fields": {"model": request.model, "request": request.id, **trace}})
    return ExecutionFailed(request.model, f"{type(error).__name__}: {error}")
