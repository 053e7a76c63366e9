"""What the event loop knows of the device: requests in by queue, results out by future, other orders in between."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from server.eager import Reply, reply
from server.engine.device_thread import Chore, DeviceThread, Executed, Model, Order
from server.engine.statistics import FailureReason, ModelStatistics
from server.errors import (
    DeviceLost,
    ExecutionFailed,
    ModelNotFound,
    RequestError,
    RequestTimedOut,
    ShuttingDown,
)
from server.protocol.model import Execution, Servable
from server.protocol.request import InferRequest
from server.scheduling.policy import Policy
from server.scheduling.queues import Ticket
from server.scheduling.scheduler import Scheduler

_T = TypeVar("_T")
_Done = Reply[tuple[Execution, float]] | asyncio.Future[tuple[Execution, float]]


class Engine:
    """Every method belongs to the event loop's thread; the device belongs to `DeviceThread`."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float] = time.monotonic,
        prefetch: bool = True,
        receives: Callable[[], bool] = lambda: False,
        lane: int = 0,
        on_lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`receives` says whether bodies are on their way: then the event loop has no time to execute anything itself.

        `on_lost` hears why, once, when nothing can be executed any more.
        """
        self._scheduler = scheduler
        self._clock = clock
        self._device = DeviceThread(scheduler, self, clock, prefetch)
        self._receives = receives
        self._lane = lane
        self._on_lost = on_lost
        self._current: dict[str, int] = {}
        """Each model's generation: what requests that come now are for."""
        self._lost: str | None = None
        self._waiting: dict[Ticket, _Done] = {}
        """By request, its execution and when that ended; one whose client has left stays until then."""
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        self._draining = False
        self._come = 0
        """Requests in this turn of the event loop."""
        self._comes_alone = False
        """Whether the last turn's only request was brief: then the next one is not made to wait for others."""
        self._answered = asyncio.Event()

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
        return self._device.computed_s

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
        with self._device.lock:
            generation = self._scheduler.add(info.name, seconds_by_batch, policy, most_rows, servable.readiness)
            self._current[info.name] = generation
            self._device.models[info.name, generation] = Model(servable, statistics)
        self._note_prefetching()

    def replan(self, servable: Servable) -> None:
        """Hear that a servable has other plans now."""
        with self._device.lock:
            self._scheduler.replan(servable.info.name, servable.seconds_by_batch, servable.readiness)
        self._note_prefetching()

    def _note_prefetching(self) -> None:
        models = self._device.models.items()
        self._device.prefetching = frozenset(name for (name, _), m in models if m.servable.prefetches)

    def remove(self, model: str) -> None:
        """Forget a model; what still waits for it is refused."""
        with self._device.lock:
            forgotten = self._scheduler.remove(model)
        self._current.pop(model, None)
        for key in [key for key in self._device.models if key[0] == model]:
            del self._device.models[key]
        self._note_prefetching()
        for ticket in forgotten:
            self._settle(ticket, ModelNotFound(model, reason="unloaded"))

    def prefetch(self, on: bool) -> None:
        """Let the next model's copies begin beside the execution before theirs, or not, from now on."""
        self._device.prefetch = on

    def hold(self, model: str, held: bool) -> None:
        """Keep a model's requests waiting while its memory is being changed, or let them go on."""
        with self._device.lock:
            self._scheduler.hold(model, held)
            self._device.look()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._device.start(self._loop)

    def require_room(self, model: str) -> None:
        """Refuse a request before its body is read, if its queue is full. Raises QueueFull."""
        if self._scheduler.is_full(model):
            with self._device.lock:
                self._scheduler.require_room(model, self._clock())

    async def infer(self, request: InferRequest) -> Execution:
        """Execute a request. Cancelling this takes it out of the queue, if it has not started.

        Raises Overloaded, RequestTimedOut, ShuttingDown, DeviceLost, ModelNotFound, ExecutionFailed, or what the
        servable refuses with.
        """
        self._refuse_if_over()
        if self._lane and request.trace is not None:
            request.trace.lane = self._lane
        executed = self._execute_at_once(request)
        if executed is None:
            ticket, done = self._queued(request)
            try:
                executed = await done
            except asyncio.CancelledError:
                self._cancel(ticket)
                raise
        execution, ended_s = executed
        self._scheduler.answered(self._clock() - ended_s)
        return execution

    def _execute_at_once(self, request: InferRequest) -> tuple[Execution, float] | None:
        """Execute the first request of a turn, if the one before had no company; None if it has to queue."""
        self._come += 1
        if self._come > 1:
            return None
        self._loop.call_soon(self._end_turn)
        if not self._comes_alone:
            return None
        done = None if self._receives() else self._device.execute_at_once(request)
        self._comes_alone = done is not None
        if done is None:
            return None
        outcome = done.outcomes[0]
        if done.lost is not None or isinstance(outcome, RequestError):
            self.executed(done)
        if isinstance(outcome, RequestError):
            raise outcome
        return outcome, done.ended_s

    def _queued(self, request: InferRequest) -> "tuple[Ticket, _Done]":
        """Queue a request; returns what it waits for."""
        try:
            with self._device.lock:
                ticket = self._scheduler.submit(self._clock(), request)
        except RequestTimedOut:
            self._count_failure(request.model, self._current[request.model], "REJECTED", 0.0)
            raise
        done: _Done = reply()
        self._waiting[ticket] = done
        if ticket.expires:
            self._watch_deadlines()
        return ticket, done

    def _end_turn(self) -> None:
        """Let the device look at what has come in one turn of the event loop."""
        come, self._come = self._come, 0
        if come == 1 and self._comes_alone:
            return  # it was executed at once
        self._comes_alone = False
        if self._receives() or not self._device.work_briefly():
            self._device.look()
            self._device.tell_late()
        elif len(self._scheduler):
            self._come = come + 1  # what is left is company for what comes
            self._loop.call_soon(self._end_turn)
        else:
            self._comes_alone = come == 1

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

        with self._device.lock:
            self._device.orders.append(Order(chore, end))
            self._device.look()
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
        for key in [key for key in self._device.models if key[0] == model and key[1] != self._current.get(model)]:
            del self._device.models[key]
        return True

    def _drop_older(self, model: str) -> None:
        with self._device.lock:
            older = self._scheduler.drop_older(model)
        for ticket in older:
            self.refused(ticket, ModelNotFound(model, ticket.request.version, "replaced"), "OTHER")

    def refuse(self) -> None:
        """Take no new request from now on."""
        self._draining = True

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to be answered; False if that took too long."""
        self.refuse()
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
        with self._device.lock:
            self._scheduler.clear()
            self._device.stopped = True
            orders = list(self._device.orders)
            self._device.orders.clear()
            self._device.look()
        for order in orders:
            order.settle(ShuttingDown())
        if self._alarm is not None:
            self._alarm.cancel()
        for ticket in list(self._waiting):
            self._settle(ticket, ShuttingDown())
        if self._device.is_running:
            await asyncio.to_thread(self._device.join, timeout_s)
        return not self._device.is_running

    def _refuse_if_over(self) -> None:
        if self._draining:
            raise ShuttingDown
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def _cancel(self, ticket: Ticket) -> None:
        """Take a request out of the queue; one that runs already is executed, counted and not sent."""
        with self._device.lock:
            never_ran = self._scheduler.cancel(ticket)
        if never_ran:
            self._device.models[ticket.request.model, ticket.generation].statistics.cancelled()
            self._waiting.pop(ticket, None)
            self._answered.set()

    def _settle(self, ticket: Ticket, outcome: tuple[Execution, float] | RequestError) -> None:
        done = self._waiting.pop(ticket, None)
        self._answered.set()
        if done is None or done.done():
            return
        if isinstance(outcome, RequestError):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def executed(self, done: Executed) -> None:
        """Answer the requests of one execution."""
        for ticket, outcome in zip(done.tickets, done.outcomes, strict=True):
            if isinstance(outcome, RequestError):
                self.refused(ticket, outcome, "BACKEND" if isinstance(outcome, ExecutionFailed) else "OTHER")
            else:
                self._settle(ticket, (outcome, done.ended_s))
        if done.lost is not None:
            self.device_lost(done.lost)

    def refused(self, ticket: Ticket, error: RequestError, reason: FailureReason) -> None:
        """Answer with an error and count it."""
        waited_s = self._clock() - ticket.arrived_s
        self._count_failure(ticket.request.model, ticket.generation, reason, waited_s)
        self._settle(ticket, error)

    def _count_failure(self, model: str, generation: int, reason: FailureReason, seconds: float) -> None:
        known = self._device.models.get((model, generation))
        if known is not None:
            known.statistics.failed(reason, seconds)

    def _watch_deadlines(self) -> None:
        """Look again when the next request becomes hopeless, even if the engine is busy then."""
        with self._device.lock:
            expiry_s = self._scheduler.expiry_s()
        if expiry_s >= self._alarm_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = expiry_s
        self._alarm = self._loop.call_later(max(expiry_s - self._clock(), 0.0), self._shed)

    def _shed(self) -> None:
        self._alarm_s = math.inf
        with self._device.lock:
            hopeless = self._scheduler.shed(self._clock())
        self.too_late(hopeless)
        self._watch_deadlines()

    def too_late(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.refused(ticket, RequestTimedOut(ticket.request.model, ticket.timeout_s or 0.0), "REJECTED")

    def device_lost(self, reason: str) -> None:
        """Refuse everything from now on: the device is gone."""
        if self._lost is not None:
            return
        self._lost = reason
        with self._device.lock:
            self._scheduler.clear()
            orders = list(self._device.orders)
            self._device.orders.clear()
        for order in orders:
            order.settle(DeviceLost(reason))
        for ticket in list(self._waiting):
            self.refused(ticket, DeviceLost(reason), "BACKEND")
        self._on_lost(reason)
