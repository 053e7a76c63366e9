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

    def begin(
        self, tickets: Sequence[Ticket], on_recording: "OnRecording | None" = None
    ) -> Answer | Callable[[], Answer]:
        """Begin to execute requests together. For a model with sequences, keeps the states until they are settled."""
        if self.sequences is None:
            rows = sum([ticket.request.batch for ticket in tickets])
            return self.servable.begin([ticket.request.inputs for ticket in tickets], rows, on_recording)
        return self.sequences.execute(
            tickets, lambda inputs, rows: self.servable.execute([inputs], rows, on_recording)
        )


@dataclass(slots=True, eq=False)
class _Execution:
    """Requests of one load that are executed together."""

    load: LoadedServable
    tickets: Sequence[Ticket]
    batch: Batch
    """What was dispatched; `tickets` has one of it where they are executed one by one."""
    started_s: float
    """From when on the device has had nothing before it."""
    outcome: Answer | Callable[[], Answer] | RequestError | None = None
    """A function that waits for the answer, while the device goes on by itself."""


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
        self._owner = owner
        self._lane = lane
        self._running: _Execution | None = None
        """Execution with which the device goes on by itself."""
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
            if self._running is not None:
                self._end(self._running)
        except BaseException as error:  # a bug in the engine: no request may wait for ever
            _log.error("the engine has failed", exc_info=error)
            self._call_on_loop(self._owner.device_lost, f"the engine has failed: {type(error).__name__}: {error}")

    def _step(self) -> None:
        """Alternate between an execution and a piece of background work; wait if there is neither.

        If the device goes on with an execution by itself, the next one is begun before this one is waited for.
        Background work finds the device idle.
        """
        running = self._running
        with self.changed:
            now_s = time.monotonic()
            pending = self.background[0] if self.background else None
            if running is not None:
                batch = None if pending is not None or self.stopped else self._next_ahead(now_s)
            else:
                batch = None if pending is not None and self._background_is_next else self._next(now_s)
            self._background_is_next = batch is not None or running is not None
            # Under the lock: once the batch has left its queue, the event loop may forget the load.
            load = None if batch is None else self.loads[batch.tickets[0].load_number]
            upcoming = None if batch is None else self.scheduler.upcoming()
            following = None if upcoming is None else self.loads[upcoming.tickets[0].load_number]
            if batch is None and running is None and pending is None and not self.stopped:
                wait_s = self.scheduler.wake_s(now_s) - now_s
                self.changed.wait(None if wait_s == math.inf else max(wait_s, 0.0))
        begun = None
        if batch is not None and load is not None:
            if upcoming is not None and following is not None:
                following.servable.foresee(upcoming.tickets[0].request.inputs, upcoming.rows)
            tickets = batch.tickets if load.sequences is None else load.sequences.in_rows(batch.tickets)
            begun = self._begin(load, tickets, batch, after=running)
        if running is not None:
            self._end(running)
            if begun is not None and callable(begun.outcome):
                self._starts(begun)
        if begun is not None and not callable(begun.outcome):
            self._end(begun)
            begun = None
        self._running = begun
        if batch is None and running is None and pending is not None:
            self._do_piece(pending)

    def _next(self, now_s: float) -> Batch | None:
        """Take the next requests to execute, and shed those that are too late."""
        batch = self.scheduler.next(now_s)
        if late := self.scheduler.shed(now_s):
            self._call_on_loop(self._owner.refuse_late, late)
        return batch

    def _next_ahead(self, now_s: float) -> Batch | None:
        """Take the next requests if the device can have them during an execution, and no others would join them."""
        batch = self.scheduler.ready_ahead(now_s)
        if batch is None:
            return None
        load, inputs = self.loads[batch.tickets[0].load_number], batch.tickets[0].request.inputs
        is_ready = load.sequences is None and load.servable.launches_ahead(inputs, batch.rows)
        return self._next(now_s) if is_ready else None

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

    def _begin(
        self,
        load: LoadedServable,
        tickets: Sequence[Ticket],
        batch: Batch,
        after: "_Execution | None" = None,
    ) -> "_Execution":
        """Begin to execute requests together; `after` an execution that has not ended."""
        execution = _Execution(load, tickets, batch, time.monotonic())
        if after is None:
            self._starts(execution)
        else:
            for ticket in tickets:
                ticket.request.mark(execution.started_s, after.batch.predicted_s + batch.predicted_s)
        execution.outcome = _caught(tickets, lambda: load.begin(tickets, self._on_recording(tickets)))
        return execution

    def _starts(self, execution: "_Execution") -> None:
        """Note that the device has nothing before an execution."""
        execution.started_s = time.monotonic()
        for ticket in execution.tickets:
            ticket.request.mark(execution.started_s, execution.batch.predicted_s)

    def _end(self, execution: "_Execution") -> None:
        """Wait for an execution. If it failed, execute its requests one by one, so that only the faulty ones fail."""
        load, tickets, batch = execution.load, execution.tickets, execution.batch
        outcomes = self._outcomes(execution)
        ended_s = time.monotonic()
        failed = isinstance(outcomes[0], RequestError)
        with self.changed:
            self.scheduler.finished(batch, ended_s, None if failed else ended_s - execution.started_s)
        if failed and len(tickets) > 1:
            outcomes = [self._outcomes(self._begin(load, [ticket], batch))[0] for ticket in tickets]
            ended_s = time.monotonic()
        self._call_on_loop(self._owner.executed, tickets, outcomes, ended_s, load.servable.lost)

    def _outcomes(self, execution: "_Execution") -> Sequence[Outcome]:
        """Wait for an execution. Returns an answer for each request or, if it fails, an error for each."""
        load, tickets, outcome = execution.load, execution.tickets, execution.outcome
        if callable(outcome):
            outcome = _caught(tickets, outcome)
        if isinstance(outcome, RequestError):
            return [outcome] * len(tickets)
        assert isinstance(outcome, Answer)
        executed_s = time.monotonic()
        self.computed_s += max(outcome.timing.compute_s - outcome.timing.stall_s, 0.0)
        answers = self._answers(tickets, outcome, execution.started_s, executed_s)
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


def _caught(
    tickets: Sequence[Ticket], call: Callable[[], Answer | Callable[[], Answer]]
) -> Answer | Callable[[], Answer] | RequestError:
    """Call, and return the error for clients if that fails."""
    try:
        return call()
    except RequestError as error:
        return error
    except Exception as error:
        return _error_of(tickets[0].request, error)


def _error_of(request: Request, error: Exception) -> RequestError:
    """Return the client's error for the error being handled, and log it unless the client caused it."""
    name = request.model.name
    if isinstance(error.__cause__, IndexError) or _OUT_OF_RANGE.search(str(error)):
        return InvalidRequest(f"an input of model '{name}' has an index that is out of range: {error}")
    _log.exception("execution failed", extra={"fields": {**request.model.fields, "request": request.id}})
    return ExecutionFailed(name, f"{type(error).__name__}: {error}")
