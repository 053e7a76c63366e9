"""The thread that owns a compute lane: it executes what the scheduler chooses, with background work in between."""

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

from server.engine.execution import Execution, Servable
from server.errors import ExecutionFailed, RequestError
from server.ipc.execution import DeviceSpan, ExecutionTiming, InferResult, OnSpans
from server.ipc.model import Inputs
from server.ipc.statistics import ModelStatistics
from server.protocol.request import InferRequest
from server.scheduling.queues import Ticket
from server.scheduling.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from runtime.recording import Follow, Recording

_log = logging.getLogger("cohabit.engine")

Outcome = InferResult | RequestError


class BackgroundWork(Protocol):
    """Work on the device that is done a piece at a time, so that no request waits for all of it."""

    def advance(self) -> bool:
        """Do a piece, which should take less time than an execution; True when nothing is left. Lane's thread."""
        ...


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Background work, and the function that reports its end."""

    work: BackgroundWork
    settle: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What executes a model's requests, and what counts them."""

    servable: Servable
    statistics: ModelStatistics


class Executed(msgspec.Struct, frozen=True):
    """The outcomes of requests that were executed together, in their order."""

    tickets: Sequence[Ticket]
    outcomes: Sequence[Outcome]
    ended_s: float
    lost: str | None
    """Why nothing more can be executed, if that is so."""


class Listener(Protocol):
    """Receives what has happened, on the event loop's thread."""

    def executed(self, done: Executed) -> None: ...
    def too_late(self, tickets: Sequence[Ticket]) -> None: ...
    def device_lost(self, reason: str) -> None: ...


class DeviceThread:
    """`changed` guards the scheduler, `orders` and `stopped`; whoever changes one of them notifies it."""

    def __init__(
        self, scheduler: Scheduler, listener: Listener, clock: Callable[[], float], prefetch: bool, lane: int = 0
    ) -> None:
        self.changed = threading.Condition()
        self.scheduler = scheduler
        self.orders: deque[PendingWork] = deque()
        self.stopped = False
        self.models: dict[tuple[str, int], LoadedModel] = {}
        """By name and generation."""
        self.prefetch = prefetch
        """Whether the next model's copies may begin during the execution before; read before each execution."""
        self.computed_s = 0.0
        """Seconds that the lane has computed."""
        self._listener = listener
        self._clock = clock
        self._lane = lane
        self._chore_is_next = False
        """Whether an execution ran since the last piece of a background."""
        self._thread = threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

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
                self._turn()
        except BaseException as error:  # a fault of the engine: no request may wait for ever
            _log.error("the engine has failed", exc_info=error)
            self._tell(self._listener.device_lost, f"the engine has failed: {type(error).__name__}: {error}")

    def _turn(self) -> None:
        """Do the next thing, executions and background work in turn; wait if there is nothing to do."""
        with self.changed:
            now_s = self._clock()
            order = self.orders[0] if self.orders else None
            work = None if order is not None and self._chore_is_next else self._next(now_s)
            self._chore_is_next = work is not None
            if work is None and order is None and not self.stopped:
                wait_s = self.scheduler.wake_s(now_s) - now_s
                self.changed.wait(None if wait_s == math.inf else max(wait_s, 0.0))
        if work is not None:
            self._tell(self._listener.executed, self._work(work))
        elif order is not None:
            self._advance(order)

    def _next(self, now_s: float) -> Work | None:
        """Take what is to be executed next, and shed what is too late."""
        work = self.scheduler.next(now_s)
        if hopeless := self.scheduler.shed(now_s):
            self._tell(self._listener.too_late, hopeless)
        return work

    def _advance(self, order: PendingWork) -> None:
        error: BaseException | None = None
        try:
            ended = order.work.advance()
        except Exception as raised:
            ended, error = True, raised
        if ended:
            with self.changed:
                if order in self.orders:
                    self.orders.remove(order)
            self._tell(order.settle, error)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _work(self, work: Work) -> Executed:
        """Execute requests together; if that fails, one by one, so that each fails for itself alone."""
        tickets = work.tickets
        model = self.models[work.model, tickets[0].generation]
        started_s = self._clock()
        outcomes, ended_s = self._execute(model, tickets, work.rows, work.predicted_s)
        failed = isinstance(outcomes[0], RequestError)
        with self.changed:
            self.scheduler.finished(work, ended_s, None if failed else ended_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [
                self._execute(model, [ticket], ticket.request.batch, work.predicted_s)[0][0] for ticket in tickets
            ]
            ended_s = self._clock()
        return Executed(tickets, outcomes, ended_s, model.servable.lost)

    def _execute(
        self, model: LoadedModel, tickets: Sequence[Ticket], rows: int, predicted_s: float
    ) -> tuple[Sequence[Outcome], float]:
        """Execute requests as one batch; returns their outcomes (all answered, or one error for each) and the end."""
        started_s = self._clock()
        for ticket in tickets:
            if ticket.request.start_mark is not None:
                ticket.request.start_mark.started(started_s, predicted_s)
        if self.prefetch:
            self._announce_next()
        try:
            inputs = [ticket.request.inputs for ticket in tickets]
            execution = model.servable.execute(inputs, rows, _follower(tickets, self._lane))
        except RequestError as error:
            return [error] * len(tickets), self._clock()
        except Exception as error:
            return [_failure(tickets[0].request, error)] * len(tickets), self._clock()
        executed_s = self._clock()
        outputs = split_rows([ticket.request.batch for ticket in tickets], execution)
        ended_s = self._clock()
        execution = replace(execution, output_s=execution.output_s + ended_s - executed_s)
        return self._counted(model, tickets, rows, execution, outputs, started_s, ended_s), ended_s

    def _counted(
        self,
        model: LoadedModel,
        tickets: Sequence[Ticket],
        rows: int,
        execution: Execution,
        outputs: Sequence[Inputs],
        started_s: float,
        ended_s: float,
    ) -> Sequence[Outcome]:
        """Count an execution, and give each request its own outputs and timing."""
        self.computed_s += max(execution.compute_s - execution.stall_s, 0.0)
        busy_s = ended_s - started_s
        model.statistics.executed(
            rows,
            busy_s,
            execution.compute_s,
            execution.output_s,
            execution.stall_s,
            execution.swapped_bytes,
            execution.prefetched,
            [started_s - ticket.arrived_s for ticket in tickets],
            time.time(),
        )
        return [
            InferResult(
                own,
                ExecutionTiming(
                    ticket.arrived_s,
                    started_s,
                    busy_s,
                    execution.compute_s,
                    execution.stall_s,
                    execution.output_s,
                    execution.swapped_bytes,
                    rows,
                    self._lane,
                ),
            )
            for ticket, own in zip(tickets, outputs, strict=True)
        ]

    def _announce_next(self) -> None:
        """Let the model that is executed after this one begin its copies."""
        with self.changed:
            ahead = self.scheduler.ahead(self._clock())
        model = self.models.get((ahead.model, ahead.tickets[0].generation)) if ahead is not None else None
        if ahead is not None and model is not None:
            model.servable.expect(ahead.rows, _follower(ahead.tickets, self._lane) is not None)


def split_rows(batches: Sequence[int], execution: Execution) -> list[Inputs]:
    """Return each request's rows of a batch's outputs, as views."""
    if len(batches) == 1:
        return [execution.outputs]
    parts: list[Inputs] = []
    start = 0
    for batch in batches:
        parts.append({name: array[start : start + batch] for name, array in execution.outputs.items()})
        start += batch
    return parts


def _follower(tickets: Iterable[Ticket], lane: int) -> "Follow | None":
    """Return what records the lanes for the first of these requests that is traced."""
    for ticket in tickets:
        if ticket.request.on_spans is not None:
            return _spans_to(ticket.request.on_spans, lane)
    return None


def _spans_to(on_spans: OnSpans, lane: int) -> "Follow":
    def follow(recording: "Recording") -> None:
        shift_s = _clock_shift_s()
        on_spans(
            [
                DeviceSpan(
                    span.model,
                    span.lane,
                    span.name,
                    span.start_s + shift_s,
                    span.end_s + shift_s,
                    span.nbytes,
                    span.stalled,
                    span.ahead,
                    span.ops,
                    lane,
                )
                for span in recording.spans()
            ]
        )

    return follow


def _clock_shift_s() -> float:
    """Return what leads from the recordings' clock to the monotonic one; on Linux they are the same."""
    recorded, ours = (time.get_clock_info(name).implementation for name in ("perf_counter", "monotonic"))
    return 0.0 if recorded == ours else time.monotonic() - time.perf_counter()


def _failure(request: InferRequest, error: Exception) -> ExecutionFailed:
    """Log an unexpected error while it is handled; returns what the client is told."""
    _log.exception("execution failed", extra={"fields": {"model": request.model, "request": request.id}})
    return ExecutionFailed(request.model, f"{type(error).__name__}: {error}")
