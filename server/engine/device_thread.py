"""The thread of a compute lane: executes the batches that the scheduler chooses, and background work in between."""

import asyncio
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from cohabit.server.engine.execution import Servable
from cohabit.server.engine.sequences import Sequences
from cohabit.server.errors import ExecutionFailed, InvalidRequest, RequestError
from cohabit.server.ipc.request import Answer, Request
from cohabit.server.ipc.spans import DeviceSpan, OnSpans
from cohabit.server.ipc.statistics import ModelStatistics
from cohabit.server.scheduling.batching import Batch
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from cohabit.runtime.recording import OnRecording, Recording
    from cohabit.server.engine.compute_lane import ComputeLane

_log = logging.getLogger("cohabit.engine")

_OUT_OF_RANGE = re.compile(
    r"\b(index|indices)\b.*(out of range|out of bounds|not in the valid range)|Expected (idx >= 0|i < index_size)",
    re.IGNORECASE,
)
"""Messages of torch's kernels about indices out of range."""

Outcome = Answer | RequestError

BackgroundWork = Callable[[], bool]
"""Does one piece of work on the device. Returns True after the last piece. Called on the lane's thread. A request
waits for at most one piece, so a piece should take less time than an execution."""


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Background work, and the function that reports its end."""

    work: BackgroundWork
    on_end: Callable[[BaseException | None], None]


@dataclass(frozen=True, slots=True)
class LoadedServable:
    """Executes and counts the requests of one load of a model."""

    servable: Servable
    statistics: ModelStatistics
    sequences: Sequences | None = None
    """Sequences of its requests; None for a model without sequences."""

    def execute(self, tickets: Sequence[Ticket], on_recording: "OnRecording | None" = None) -> Answer:
        """Execute requests together. For a model with sequences, keeps the resulting states until they are settled."""
        if self.sequences is None:
            rows = sum([ticket.request.batch for ticket in tickets])
            return self.servable.execute([ticket.request.inputs for ticket in tickets], rows, on_recording)
        return self.sequences.execute(
            tickets, lambda inputs, rows: self.servable.execute([inputs], rows, on_recording)
        )


class DeviceThread:
    """Thread of one lane. `changed` guards the scheduler, `background` and `stopped`; notify it after a change."""

    def __init__(self, scheduler: Scheduler, owner: "ComputeLane", lane: int) -> None:
        """`owner` receives results and errors, on the event loop's thread."""
        self.changed = threading.Condition()
        self.scheduler = scheduler
        self.background: deque[PendingWork] = deque()
        self.stopped = False
        self.loads: dict[int, LoadedServable] = {}
        """By load number (`Ticket.load_number`)."""
        self.on_spans: dict[Ticket, OnSpans] = {}
        """By traced request: the function that receives its spans. Changed by the event loop."""
        self.computed_s = 0.0
        """Seconds of computation since the start."""
        self.executing = (0.0, 0.0)
        """Start and predicted duration of the current execution, in seconds; zeros without one."""
        self._owner = owner
        self._lane = lane
        self._background_is_next = False
        """Whether the next step belongs to background work, because the last one was an execution."""
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
            batch = None if pending is not None and self._background_is_next else self._next(now_s)
            self._background_is_next = batch is not None
            # Under the lock: once the batch has left its queue, the event loop may forget the load.
            load = None if batch is None else self.loads[batch.tickets[0].load_number]
            upcoming = None if batch is None else self.scheduler.upcoming()
            following = None if upcoming is None else self.loads[upcoming.tickets[0].load_number]
            if batch is None and pending is None and not self.stopped:
                wait_s = self.scheduler.wake_s(now_s) - now_s
                self.changed.wait(None if wait_s == math.inf else max(wait_s, 0.0))
        if batch is not None and load is not None:
            if upcoming is not None and following is not None:
                following.servable.foresee(upcoming.tickets[0].request.inputs, upcoming.rows)
            self._execute(batch, load)
            self.executing = (0.0, 0.0)
        elif pending is not None:
            self._do_piece(pending)

    def _next(self, now_s: float) -> Batch | None:
        """Take the next requests to execute, and shed those that are too late."""
        batch = self.scheduler.next(now_s)
        if late := self.scheduler.shed(now_s):
            self._call_on_loop(self._owner.refuse_late, late)
        return batch

    def _do_piece(self, pending: PendingWork) -> None:
        """Do one piece of background work; after the last one, or an error, remove the work and report its end."""
        error: BaseException | None = None
        try:
            ended = pending.work()
        except Exception as raised:
            ended, error = True, raised
        if ended:
            with self.changed:
                if pending in self.background:
                    self.background.remove(pending)
            self._call_on_loop(pending.on_end, error)

    def _call_on_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.debug("the event loop has closed")

    def _execute(self, batch: Batch, load: LoadedServable) -> None:
        """Execute requests together; if that fails, one by one, so that only the faulty ones fail."""
        tickets = batch.tickets if load.sequences is None else load.sequences.in_rows(batch.tickets)
        started_s = time.monotonic()
        outcomes = self._outcomes(load, tickets, batch)
        ended_s = time.monotonic()
        failed = isinstance(outcomes[0], RequestError)
        with self.changed:
            self.scheduler.finished(batch, ended_s, None if failed else ended_s - started_s)
        if failed and len(tickets) > 1:
            outcomes = [self._outcomes(load, [ticket], batch)[0] for ticket in tickets]
            ended_s = time.monotonic()
        self._call_on_loop(self._owner.executed, tickets, outcomes, ended_s, load.servable.lost)

    def _outcomes(self, load: LoadedServable, tickets: Sequence[Ticket], batch: Batch) -> Sequence[Outcome]:
        """Execute requests together. Returns an answer for each or, if the execution fails, an error for each."""
        started_s = time.monotonic()
        self.executing = (started_s, batch.predicted_s)
        for ticket in tickets:
            ticket.request.mark(*self.executing)
        try:
            batch_answer = load.execute(tickets, self._on_recording(tickets))
        except RequestError as error:
            return [error] * len(tickets)
        except Exception as error:
            return [_error_of(tickets[0].request, error)] * len(tickets)
        executed_s = time.monotonic()
        self.computed_s += max(batch_answer.timing.compute_s - batch_answer.timing.stall_s, 0.0)
        answers = self._answers(tickets, batch_answer, started_s, executed_s)
        load.statistics.executed([answer.timing for answer in answers], time.time())
        return answers

    def _answers(
        self, tickets: Sequence[Ticket], batch_answer: Answer, started_s: float, executed_s: float
    ) -> list[Answer]:
        """Return each request's answer, whose outputs are views of its rows."""
        rows = sum([ticket.request.batch for ticket in tickets])
        parts, end = [batch_answer.outputs], 0
        if len(tickets) > 1:
            parts = []
            for ticket in tickets:
                start, end = end, end + ticket.request.batch
                parts.append({name: array[start:end] for name, array in batch_answer.outputs.items()})
        ended_s = time.monotonic()
        timing = replace(
            batch_answer.timing,
            started_s=started_s,
            busy_s=ended_s - started_s,
            output_s=batch_answer.timing.output_s + ended_s - executed_s,
            rows=rows,
            lane=self._lane,
        )
        return [
            Answer(batch_answer.model, own, replace(timing, queued_s=ticket.arrived_s), ticket.request.number)
            for ticket, own in zip(tickets, parts, strict=True)
        ]

    def _on_recording(self, tickets: Iterable[Ticket]) -> "OnRecording | None":
        """Return a recorder that passes its spans to the first traced request; None if none is traced.

        On Linux, the spans' clock (`perf_counter`) equals `time.monotonic`.
        """
        on_spans = next((found for t in tickets if (found := self.on_spans.get(t)) is not None), None)
        if on_spans is None:
            return None
        lane = self._lane

        def on_recording(recording: "Recording") -> None:
            on_spans([DeviceSpan(**asdict(span), compute_lane=lane) for span in recording.spans()])

        return on_recording


def _error_of(request: Request, error: Exception) -> RequestError:
    """Return the client's error for the error being handled, and log it unless the client caused it."""
    name = request.model.name
    if isinstance(error.__cause__, IndexError) or _OUT_OF_RANGE.search(str(error)):
        return InvalidRequest(f"an input of model '{name}' has an index that is out of range: {error}")
    _log.exception("execution failed", extra={"fields": {**request.model.fields, "request": request.id}})
    return ExecutionFailed(name, f"{type(error).__name__}: {error}")
