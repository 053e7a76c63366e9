"""The thread that owns a compute lane: it executes the scheduler's choices, and background work between them."""

import asyncio
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import msgspec

from cohabit.server.engine.execution import Execution, Servable
from cohabit.server.errors import ExecutionFailed, InvalidRequest, RequestError
from cohabit.server.ipc.execution import DeviceSpan, ExecutionTiming, InferResult
from cohabit.server.ipc.model import Inputs, ModelKey
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.protocol.request import InferRequest
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from cohabit.runtime.recording import Follow, Recording
    from cohabit.server.engine.compute_lane import ComputeLane

_log = logging.getLogger("cohabit.engine")

_OUT_OF_RANGE = re.compile(
    r"\b(index|indices)\b.*(out of range|out of bounds|not in the valid range)|Expected (idx >= 0|i < index_size)",
    re.IGNORECASE,
)
"""What torch's kernels say about indices."""

Outcome = InferResult | RequestError


BackgroundWork = Callable[[], bool]
"""Does one piece of work on the device, which should take less time than an execution, so that a request waits for one
piece at most; True after the last one. Lane's thread."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Background work, and the function that reports its end."""

    work: BackgroundWork
    settle: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model's servable and its counters."""

    servable: Servable
    statistics: ModelStatistics


class Executed(msgspec.Struct, frozen=True):
    """The outcomes of requests that were executed together, in their order."""

    tickets: Sequence[Ticket]
    outcomes: Sequence[Outcome]
    ended_s: float
    lost: str | None
    """Why nothing can be executed any more, or None while the device works."""


class DeviceThread:
    """`changed` guards the scheduler, `background` and `stopped`; after a change, the caller notifies it."""

    def __init__(self, scheduler: Scheduler, owner: "ComputeLane", lane: int) -> None:
        """`owner` receives what happens, on the event loop's thread."""
        self.changed = threading.Condition()
        self.scheduler = scheduler
        self.background: deque[PendingWork] = deque()
        self.stopped = False
        self.models: dict[tuple[ModelKey, int], LoadedModel] = {}
        """By key and generation."""
        self.computed_s = 0.0
        """Seconds of computation since the start."""
        self.executing = (0.0, 0.0)
        """When the present execution began and its prediction, in seconds; zeros while there is none."""
        self._owner = owner
        self._lane = lane
        self._background_is_next = False
        """Whether an execution ran since the last piece of background work."""
        self._thread = threading.Thread(target=self._run, name=f"lane-{lane}", daemon=True)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended. It must have been started."""
        self._thread.join(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopped:
                self._step()
        except BaseException as error:  # a bug in the engine: no request may wait for ever
            _log.error("the engine has failed", exc_info=error)
            self._call_on_loop(self._owner.device_lost, f"the engine has failed: {type(error).__name__}: {error}")

    def _step(self) -> None:
        """Alternate between an execution and a piece of background work; wait if there is neither."""
        with self.changed:
            now_s = time.monotonic()
            pending = self.background[0] if self.background else None
            work = None if pending is not None and self._background_is_next else self._next(now_s)
            self._background_is_next = work is not None
            if work is None and pending is None and not self.stopped:
                wait_s = self.scheduler.wake_s(now_s) - now_s
                self.changed.wait(None if wait_s == math.inf else max(wait_s, 0.0))
        if work is not None:
            self._call_on_loop(self._owner.executed, self._work(work))
            self.executing = (0.0, 0.0)
        elif pending is not None:
            self._advance(pending)

    def _next(self, now_s: float) -> Work | None:
        """Take the next requests to execute, and shed those that are too late."""
        work = self.scheduler.next(now_s)
        if hopeless := self.scheduler.shed(now_s):
            self._call_on_loop(self._owner.refuse_late, hopeless)
        return work

    def _advance(self, pending: PendingWork) -> None:
        error: BaseException | None = None
        try:
            ended = pending.work()
        except Exception as raised:
            ended, error = True, raised
        if ended:
            with self.changed:
                if pending in self.background:
                    self.background.remove(pending)
            self._call_on_loop(pending.settle, error)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _work(self, work: Work) -> Executed:
        """Execute requests together; if that fails, one by one, so that only the faulty ones fail."""
        tickets = work.tickets
        model = self.models[work.model, tickets[0].generation]
        started_s = time.monotonic()
        outcomes, ended_s = self._execute(model, tickets, work.rows, work.predicted_s)
        failed = isinstance(outcomes[0], RequestError)
        with self.changed:
            self.scheduler.finished(work, ended_s, None if failed else ended_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [
                self._execute(model, [ticket], ticket.request.batch, work.predicted_s)[0][0] for ticket in tickets
            ]
            ended_s = time.monotonic()
        return Executed(tickets, outcomes, ended_s, model.servable.lost)

    def _execute(
        self, model: LoadedModel, tickets: Sequence[Ticket], rows: int, predicted_s: float
    ) -> tuple[Sequence[Outcome], float]:
        """Execute requests as one batch; returns their outcomes (all results, or all errors) and the end time."""
        started_s = time.monotonic()
        self.executing = (started_s, predicted_s)
        for ticket in tickets:
            if ticket.request.start_mark is not None:
                ticket.request.start_mark(started_s, predicted_s)
        try:
            inputs = [ticket.request.inputs for ticket in tickets]
            execution = model.servable.execute(inputs, rows, _follower(tickets, self._lane))
        except RequestError as error:
            return [error] * len(tickets), time.monotonic()
        except Exception as error:
            return [_error_of(tickets[0].request, error)] * len(tickets), time.monotonic()
        executed_s = time.monotonic()
        outputs = split_rows([ticket.request.batch for ticket in tickets], execution)
        ended_s = time.monotonic()
        output_s = execution.output_s + ended_s - executed_s
        self.computed_s += max(execution.compute_s - execution.stall_s, 0.0)
        cost = (execution.compute_s, execution.stall_s, output_s, execution.swapped_bytes)
        timings = [
            ExecutionTiming(ticket.arrived_s, started_s, ended_s - started_s, *cost, rows, self._lane)
            for ticket in tickets
        ]
        model.statistics.executed(timings, time.time())
        return [InferResult(own, timing) for own, timing in zip(outputs, timings, strict=True)], ended_s


def split_rows(batches: Sequence[int], execution: Execution) -> list[Inputs]:
    """Return each request's rows of a batch's outputs, as views."""
    if len(batches) == 1:
        return [execution.outputs]
    ends = accumulate(batches)
    return [
        {name: array[end - batch : end] for name, array in execution.outputs.items()}
        for batch, end in zip(batches, ends, strict=True)
    ]


def _follower(tickets: Iterable[Ticket], lane: int) -> "Follow | None":
    """Return a recorder that hands its spans to the first traced request; None if none is traced.

    On Linux, the spans' clock (`perf_counter`) is `time.monotonic`'s.
    """
    on_spans = next((t.request.on_spans for t in tickets if t.request.on_spans is not None), None)
    if on_spans is None:
        return None

    def follow(recording: "Recording") -> None:
        on_spans([DeviceSpan(**asdict(span), compute_lane=lane) for span in recording.spans()])

    return follow


def _error_of(request: InferRequest, error: Exception) -> RequestError:
    """Return the client's error for one that is being handled, and log it unless it is the client's fault."""
    name = request.model.name
    if isinstance(error.__cause__, IndexError) or _OUT_OF_RANGE.search(str(error)):
        return InvalidRequest(f"an input of model '{name}' has an index that is out of range: {error}")
    _log.exception("execution failed", extra={"fields": {**request.model.fields, "request": request.id}})
    return ExecutionFailed(name, f"{type(error).__name__}: {error}")
