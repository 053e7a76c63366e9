"""The one thread that owns the device: requests in by queue, results out by future, other orders between inferences."""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from server.errors import DeviceLost, ExecutionFailed, ModelNotFound, RequestError, RequestTimedOut, ShuttingDown
from server.model import Device, Execution, Servable, Swap
from server.policy import Policy
from server.queues import Ticket
from server.request import InferRequest
from server.rows import joined, parted
from server.scheduler import Scheduler, Work
from server.statistics import FailureReason, ModelStatistics

_log = logging.getLogger("cohabit.engine")
_T = TypeVar("_T")

Outcome = Execution | RequestError


class Chore(Protocol):
    """Work on the device that is done a piece at a time, so that no request waits for all of it."""

    def advance(self) -> bool:
        """Do a piece, which should take less time than an inference; True when nothing is left. Engine's thread."""
        ...


@dataclass(frozen=True, slots=True)
class _Model:
    servable: Servable
    statistics: ModelStatistics


@dataclass(frozen=True, slots=True)
class _Order:
    """A chore, and how to say that it has ended."""

    chore: Chore
    settle: Callable[[BaseException | None], None]


class Engine:
    """Every method belongs to the event loop's thread; `_run` and what it calls to the engine's own."""

    def __init__(
        self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic, prefetch: bool = True
    ) -> None:
        self._scheduler = scheduler
        self._prefetch = prefetch
        self._clock = clock
        self._work_or_stop = threading.Condition()
        self._stopped = False
        self._models: dict[tuple[str, int], _Model] = {}
        self._current: dict[str, int] = {}
        """Each model's generation: what requests that come now are for."""
        self._orders: deque[_Order] = deque()
        self._device: Device | None = None
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._waiting: dict[Ticket, asyncio.Future[Execution]] = {}
        """By request; one whose client has left stays until its execution has ended."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        self._draining = False
        self._answered = asyncio.Event()
        self._computed_s = 0.0
        self._chore_is_next = False
        """Whether an inference ran since the last piece of a chore."""

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def lost(self) -> str | None:
        """Why nothing can be executed any more, or None while the device is well."""
        return self._lost

    @property
    def computed_s(self) -> float:
        """Seconds that the compute lane has worked since the start."""
        return self._computed_s

    def pending(self, model: str) -> int:
        """How many requests wait in this model's queue."""
        return self._scheduler.pending(model)

    def correction(self, model: str) -> float:
        """Measured over predicted time of this model's executions; 1 if it is not there."""
        return self._scheduler.correction(model) if model in self._current else 1.0

    def add(self, servable: Servable, statistics: ModelStatistics, policy: Policy | None = None) -> None:
        """Execute requests for a model, or execute those that come from now on by another servable."""
        info, seconds_by_batch = servable.info, servable.seconds_by_batch
        most_rows = info.max_batch_size if seconds_by_batch else 0  # nobody knows whether more would pay
        with self._work_or_stop:
            generation = self._scheduler.add(info.name, seconds_by_batch, policy, most_rows, servable.readiness)
            self._current[info.name] = generation
            self._models[info.name, generation] = _Model(servable, statistics)

    def replan(self, servable: Servable) -> None:
        """Hear that a servable has other plans now."""
        with self._work_or_stop:
            self._scheduler.replan(servable.info.name, servable.seconds_by_batch, servable.readiness)

    def remove(self, model: str) -> None:
        """Forget a model; what still waits for it is refused."""
        with self._work_or_stop:
            forgotten = self._scheduler.remove(model)
        self._current.pop(model, None)
        for key in [key for key in self._models if key[0] == model]:
            del self._models[key]
        for ticket in forgotten:
            self._settle(ticket, ModelNotFound(model, reason="unloaded"))

    def hold(self, model: str, held: bool) -> None:
        """Keep a model's requests waiting while its memory is being changed, or let them go on."""
        with self._work_or_stop:
            self._scheduler.hold(model, held)
            self._work_or_stop.notify()

    def use_device(self, device: Device | None) -> None:
        """Prepare this device for a model before each of its executions."""
        self._device = device

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def require_room(self, model: str) -> None:
        """Refuse a request before its body is read, if its queue is full. Raises QueueFull."""
        with self._work_or_stop:
            self._scheduler.require_room(model, self._clock())

    async def infer(self, request: InferRequest) -> Execution:
        """Execute a request. Cancelling this takes it out of the queue, if it has not started.

        Raises Overloaded, RequestTimedOut, ShuttingDown, DeviceLost, ModelNotFound, ExecutionFailed, or what the
        servable refuses with.
        """
        self._refuse_if_over()
        try:
            with self._work_or_stop:
                ticket = self._scheduler.submit(self._clock(), request)
                self._work_or_stop.notify()
        except RequestTimedOut:
            self._count_failure(request.model, self._current[request.model], "REJECTED", 0.0)
            raise
        future: asyncio.Future[Execution] = self._loop.create_future()
        self._waiting[ticket] = future
        self._watch_deadlines()
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise

    async def between(self, action: Callable[[], _T]) -> _T:
        """Call a function on the engine's thread between two inferences. It should take less time than one."""
        results: list[_T] = []

        class Once:
            def advance(self) -> bool:
                results.append(action())
                return True

        await self.perform(Once())
        return results[0]

    async def perform(self, chore: Chore) -> None:
        """Do a chore, a piece between every two inferences. Raises what it raises, or ShuttingDown."""
        self._refuse_if_over()
        future: asyncio.Future[None] = self._loop.create_future()

        def end(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        with self._work_or_stop:
            self._orders.append(_Order(chore, end))
            self._work_or_stop.notify()
        await future

    async def finish(self, model: str, timeout_s: float, older_only: bool = False) -> bool:
        """Wait until a model's requests are answered; False if that took too long.

        With `older_only`, those for the servable that has been replaced; what is left of them then is refused.
        """
        newest = self._current.get(model) if older_only else None

        def is_idle() -> bool:
            return not any(t.request.model == model and t.generation != newest for t in self._waiting)

        if not await self._until(is_idle, timeout_s):
            if newest is not None:
                self._drop_older(model)
            return False
        for key in [key for key in self._models if key[0] == model and key[1] != self._current.get(model)]:
            del self._models[key]
        return True

    def _drop_older(self, model: str) -> None:
        with self._work_or_stop:
            older = self._scheduler.drop_older(model)
        for ticket in older:
            self._refuse(ticket, ModelNotFound(model, ticket.request.version, "replaced"), "OTHER")

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to be answered; False if that took too long."""
        self._draining = True
        return await self._until(lambda: not self._waiting, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Look at a condition whenever a request was answered; False if it took too long to come true."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            return condition()
        return True

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse whatever is not answered yet and end the thread; False if it is still busy after `timeout_s`."""
        self._draining = True
        with self._work_or_stop:
            self._scheduler.clear()
            self._stopped = True
            orders, self._orders = self._orders, deque()
            self._work_or_stop.notify()
        for order in orders:
            order.settle(ShuttingDown())
        if self._alarm is not None:
            self._alarm.cancel()
        for ticket in list(self._waiting):
            self._settle(ticket, ShuttingDown())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _refuse_if_over(self) -> None:
        if self._draining:
            raise ShuttingDown
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def _cancel(self, ticket: Ticket) -> None:
        """Take a request out of the queue; one that runs already is executed, counted and not sent."""
        with self._work_or_stop:
            never_ran = self._scheduler.cancel(ticket)
        if never_ran:
            self._models[ticket.request.model, ticket.generation].statistics.cancelled()
            self._waiting.pop(ticket, None)
            self._answered.set()

    def _settle(self, ticket: Ticket, outcome: Outcome) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            if isinstance(outcome, RequestError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._answered.set()

    def _answer(self, ticket: Ticket, execution: Execution, ended_s: float) -> None:
        self._settle(ticket, execution)
        with self._work_or_stop:
            self._scheduler.answered(self._clock() - ended_s)

    def _refuse(self, ticket: Ticket, error: RequestError, reason: FailureReason) -> None:
        """Answer with an error and count it."""
        waited_s = self._clock() - ticket.arrived_s
        self._count_failure(ticket.request.model, ticket.generation, reason, waited_s)
        self._settle(ticket, error)

    def _count_failure(self, model: str, generation: int, reason: FailureReason, seconds: float) -> None:
        known = self._models.get((model, generation))
        if known is not None:
            known.statistics.failed(reason, seconds)

    def _watch_deadlines(self) -> None:
        """Look again when the next request becomes hopeless, even if the engine is busy then."""
        with self._work_or_stop:
            expiry_s = self._scheduler.expiry_s()
        if expiry_s >= self._alarm_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = expiry_s
        self._alarm = self._loop.call_later(max(expiry_s - self._clock(), 0.0), self._shed)

    def _shed(self) -> None:
        self._alarm_s = math.inf
        with self._work_or_stop:
            hopeless = self._scheduler.shed(self._clock())
        self._refuse_late(hopeless)
        self._watch_deadlines()

    def _refuse_late(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self._refuse(ticket, RequestTimedOut(ticket.request.model, ticket.timeout_s or 0.0), "REJECTED")

    def _lose(self, reason: str) -> None:
        """Refuse everything from now on: the device is gone."""
        if self._lost is not None:
            return
        self._lost = reason
        with self._work_or_stop:
            self._scheduler.clear()
            orders, self._orders = self._orders, deque()
        for order in orders:
            order.settle(DeviceLost(reason))
        for ticket in list(self._waiting):
            self._refuse(ticket, DeviceLost(reason), "BACKEND")

    # The engine's thread.

    def _run(self) -> None:
        try:
            while (pick := self._take()) is not None:
                if isinstance(pick, Work):
                    self._work(pick)
                else:
                    self._advance(pick)
        except BaseException as error:  # a fault of ours: nobody must wait for an answer that never comes
            _log.exception("the engine has failed")
            self._tell(self._lose, f"the engine has failed: {type(error).__name__}: {error}")

    def _take(self) -> Work | _Order | None:
        """Wait for the next thing to do: inferences and chores take turns; None to stop."""
        with self._work_or_stop:
            while not self._stopped:
                now_s = self._clock()
                if self._orders and self._chore_is_next:
                    self._chore_is_next = False
                    return self._orders[0]
                work = self._scheduler.next(now_s)
                if work is not None:
                    self._chore_is_next = True
                    hopeless = self._scheduler.shed(now_s)
                    if hopeless:
                        self._tell(self._refuse_late, hopeless)
                    return work
                if self._orders:
                    return self._orders[0]
                wake_s = self._scheduler.wake_s(now_s)
                self._work_or_stop.wait(None if wake_s == math.inf else max(wake_s - now_s, 0.0))
        return None

    def _advance(self, order: _Order) -> None:
        error: BaseException | None = None
        try:
            ended = order.chore.advance()
        except Exception as raised:
            ended, error = True, raised
        if ended:
            with self._work_or_stop:
                if order in self._orders:
                    self._orders.remove(order)
            self._tell(order.settle, error)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has closed: nobody waits any more
            _log.debug("the event loop has closed")

    def _work(self, work: Work) -> None:
        """Execute requests together; should that fail, one by one, so that each fails for itself alone."""
        model, tickets = self._models[work.model, work.tickets[0].generation], work.tickets
        started_s = self._clock()
        outcomes = self._execute(model, tickets)
        failed = any(isinstance(outcome, RequestError) for outcome in outcomes)
        with self._work_or_stop:
            now_s = self._clock()
            self._scheduler.finished(work, now_s, None if failed else now_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [outcome for ticket in tickets for outcome in self._execute(model, [ticket])]
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if isinstance(outcome, RequestError):
                self._tell(self._refuse, ticket, outcome, _reason(outcome))
            else:
                self._tell(self._answer, ticket, outcome, self._clock())
        if model.servable.lost is not None:
            self._tell(self._lose, model.servable.lost)

    def _execute(self, model: _Model, tickets: Sequence[Ticket]) -> list[Outcome]:
        """Execute requests as one batch; either all are answered and counted, or there is one error for each."""
        requests, started_s = [ticket.request for ticket in tickets], self._clock()
        name, rows = requests[0].model, sum(request.batch for request in requests)
        try:
            swap = self._device.prepare(name) if self._device is not None else Swap()
            self._tell_next()
            execution = model.servable.execute(joined(requests), rows)
        except RequestError as error:
            return [error] * len(tickets)
        except Exception as error:
            _log.exception("execution failed", extra={"fields": {"model": name, "request": requests[0].id}})
            return [ExecutionFailed(name, f"{type(error).__name__}: {error}")] * len(tickets)
        if swap.nbytes > 0:
            swapped_bytes = execution.swapped_bytes + swap.nbytes
            execution = replace(execution, stall_s=execution.stall_s + swap.seconds, swapped_bytes=swapped_bytes)
        self._count(model.statistics, tickets, execution, started_s)
        return list(parted(requests, execution))

    def _count(
        self, statistics: ModelStatistics, tickets: Sequence[Ticket], execution: Execution, started_s: float
    ) -> None:
        busy_s, wall_ms = self._clock() - started_s, round(time.time() * 1e3)
        self._computed_s += max(execution.compute_s - execution.stall_s, 0.0)
        statistics.executed(sum(t.request.batch for t in tickets), execution)
        for ticket in tickets:
            queue_s = started_s - ticket.arrived_s
            statistics.succeeded(ticket.request.batch, queue_s, busy_s, execution.compute_s, wall_ms)

    def _tell_next(self) -> None:
        """Let the next request's model begin its copies; one region for all (`Device`) has no room for that."""
        if self._device is None and self._prefetch:
            with self._work_or_stop:
                ahead = self._scheduler.ahead(self._clock())
            model = self._models.get((ahead.model, ahead.tickets[0].generation)) if ahead is not None else None
            if ahead is not None and model is not None:
                model.servable.expect(ahead.rows)


def _reason(error: RequestError) -> FailureReason:
    return "BACKEND" if isinstance(error, ExecutionFailed) else "OTHER"
