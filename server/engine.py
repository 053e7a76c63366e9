"""The one thread that owns the device: requests in by queue, results out by future."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from server.errors import ExecutionFailed, RequestError, RequestTimedOut, ShuttingDown
from server.model import Array, Device, Execution, Servable, Swap
from server.request import InferRequest
from server.scheduler import Expired, Scheduler, Ticket, Work, worthwhile_batches
from server.statistics import FailureReason, ModelStatistics

_log = logging.getLogger("cohabit.engine")

Outcome = Execution | RequestError


@dataclass(frozen=True, slots=True)
class _Model:
    servable: Servable
    statistics: ModelStatistics


class Engine:
    """Every method belongs to the event loop's thread; `_run` and what it calls to the engine's own."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._work_or_stop = threading.Condition()
        self._stopped = False
        self._models: dict[str, _Model] = {}
        self._device: Device | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._waiting: dict[Ticket, asyncio.Future[Execution]] = {}
        self._draining = False
        self._drained = asyncio.Event()

    @property
    def draining(self) -> bool:
        return self._draining

    def pending(self, model: str) -> int:
        """How many requests wait in this model's queue."""
        return self._scheduler.pending(model)

    def add(self, servable: Servable, statistics: ModelStatistics) -> None:
        self._models[servable.info.name] = _Model(servable, statistics)
        with self._work_or_stop:
            self._scheduler.join(servable.info.name, worthwhile_batches(servable.seconds_by_batch))

    def use_device(self, device: Device | None) -> None:
        """Prepare this device for a model before each of its executions."""
        self._device = device

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def infer(self, request: InferRequest) -> Execution:
        """Execute a request. Cancelling this takes it out of the queue, if it has not started.

        Raises QueueFull, RequestTimedOut, ShuttingDown, ExecutionFailed, or what the servable refuses with.
        """
        if self._draining:
            raise ShuttingDown
        with self._work_or_stop:
            ticket = self._scheduler.submit(self._clock(), request)
            self._work_or_stop.notify()
        future: asyncio.Future[Execution] = self._loop.create_future()
        self._waiting[ticket] = future
        try:
            return await future
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the others to be answered; False if that took too long."""
        self._draining = True
        self._announce_drained()
        try:
            async with asyncio.timeout(timeout_s):
                await self._drained.wait()
        except TimeoutError:
            return False
        return True

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse whatever is not answered yet and end the thread; False if it is still busy after `timeout_s`."""
        self._draining = True
        with self._work_or_stop:
            self._scheduler.clear()
            self._stopped = True
            self._work_or_stop.notify()
        for ticket in list(self._waiting):
            self._settle(ticket, ShuttingDown())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _cancel(self, ticket: Ticket) -> None:
        """Take a request out of the queue; one that runs already is executed, counted and not sent."""
        with self._work_or_stop:
            never_ran = self._scheduler.cancel(ticket)
        self._waiting.pop(ticket, None)
        if never_ran:
            self._models[ticket.request.model].statistics.cancelled()
        self._announce_drained()

    def _settle(self, ticket: Ticket, outcome: Outcome) -> None:
        future = self._waiting.pop(ticket, None)
        if future is not None and not future.done():
            if isinstance(outcome, RequestError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)
        self._announce_drained()

    def _announce_drained(self) -> None:
        if self._draining and not self._waiting:
            self._drained.set()

    # The engine's thread.

    def _run(self) -> None:
        while (pick := self._take()) is not None:
            match pick:
                case Work(model, tickets):
                    for ticket, outcome in self._work(self._models[model], tickets):
                        self._answer(ticket, outcome)
                case Expired(ticket):
                    self._answer(ticket, self._expire(ticket))

    def _take(self) -> Work | Expired | None:
        with self._work_or_stop:
            while not self._stopped:
                pick = self._scheduler.next(self._clock())
                if pick is not None:
                    return pick
                self._work_or_stop.wait()
        return None

    def _answer(self, ticket: Ticket, outcome: Outcome) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle, ticket, outcome)
        except RuntimeError:  # the loop has closed: nobody waits for this answer
            _log.debug("answer dropped", extra={"fields": {"model": ticket.request.model}})

    def _expire(self, ticket: Ticket) -> RequestError:
        request = ticket.request
        self._models[request.model].statistics.failed("REJECTED", self._clock() - ticket.arrived_s)
        return RequestTimedOut(request.model, request.timeout_s or 0.0)

    def _work(self, model: _Model, tickets: Sequence[Ticket]) -> Iterator[tuple[Ticket, Outcome]]:
        """Execute requests together; should that fail, one by one, so that each fails for itself alone."""
        if len(tickets) > 1:
            outcomes = self._execute(model, tickets)
            if not any(isinstance(outcome, RequestError) for outcome in outcomes):
                yield from zip(tickets, outcomes, strict=True)
                return
        for ticket in tickets:
            (outcome,) = self._execute(model, [ticket])
            if isinstance(outcome, RequestError):
                reason: FailureReason = "BACKEND" if isinstance(outcome, ExecutionFailed) else "OTHER"
                model.statistics.failed(reason, self._clock() - ticket.arrived_s)
            yield ticket, outcome

    def _execute(self, model: _Model, tickets: Sequence[Ticket]) -> list[Outcome]:
        """Execute requests as one batch; either all are answered and counted, or there is one error."""
        request, started_s = tickets[0].request, self._clock()
        try:
            swap = self._device.prepare(request.model) if self._device is not None else Swap()
            self._tell_next()
            execution = model.servable.execute(_joined(tickets), sum(t.request.batch for t in tickets))
        except RequestError as error:
            return [error]
        except Exception as error:
            _log.exception("execution failed", extra={"fields": {"model": request.model, "request": request.id}})
            return [ExecutionFailed(request.model, f"{type(error).__name__}: {error}")]
        if swap.nbytes > 0:
            swapped_bytes = execution.swapped_bytes + swap.nbytes
            execution = replace(execution, stall_s=execution.stall_s + swap.seconds, swapped_bytes=swapped_bytes)
        self._count(model.statistics, tickets, execution, started_s)
        return list(_parted(tickets, execution))

    def _count(
        self, statistics: ModelStatistics, tickets: Sequence[Ticket], execution: Execution, started_s: float
    ) -> None:
        busy_s, wall_ms = self._clock() - started_s, round(time.time() * 1e3)
        statistics.executed(sum(t.request.batch for t in tickets), execution)
        for ticket in tickets:
            queue_s = started_s - ticket.arrived_s
            statistics.succeeded(ticket.request.batch, queue_s, busy_s, execution.compute_s, wall_ms)

    def _tell_next(self) -> None:
        """Let the next request's model begin its copies; one region for all (`Device`) has no room for that."""
        if self._device is None:
            with self._work_or_stop:
                ahead = self._scheduler.ahead(self._clock())
            if ahead is not None:
                model, batch = ahead
                self._models[model].servable.expect(batch)


def _joined(tickets: Sequence[Ticket]) -> Mapping[str, Array]:
    """The inputs of one or more requests, one behind the other along the batch."""
    if len(tickets) == 1:
        return tickets[0].request.inputs
    names = tickets[0].request.inputs
    return {name: np.concatenate([t.request.inputs[name] for t in tickets]) for name in names}


def _parted(tickets: Sequence[Ticket], execution: Execution) -> Iterator[Execution]:
    """Each request's rows of the outputs."""
    if len(tickets) == 1:
        yield execution
        return
    start = 0
    for ticket in tickets:
        rows = slice(start, start + ticket.request.batch)
        start = rows.stop
        yield replace(execution, outputs={name: array[rows] for name, array in execution.outputs.items()})
