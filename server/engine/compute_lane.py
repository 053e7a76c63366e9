"""Event-loop side of a compute lane: queues requests and background work, and resolves their futures."""

import asyncio
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from cohabit.server.engine.device_thread import BackgroundWork, DeviceThread, LoadedServable, Outcome, PendingWork
from cohabit.server.engine.execution import Servable
from cohabit.server.engine.sequences import Sequences, StateMemory
from cohabit.server.engine.turns import Turns
from cohabit.server.errors import (
    ExecutionFailed,
    ModelNotFound,
    RequestError,
    RequestTimedOut,
    device_unavailable,
    shutting_down,
)
from cohabit.server.ipc.model import Array, ModelKey
from cohabit.server.ipc.request import MARK_BYTES, Answer, Request, SequenceId
from cohabit.server.ipc.shared_memory import round_up
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import FailureReason, ModelStatistics
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import Scheduler
from cohabit.server.scheduling.sequences import SequenceRules

_T = TypeVar("_T")


class ComputeLane:
    """All methods belong to the event loop's thread; `DeviceThread` owns the device."""

    def __init__(
        self,
        scheduler: Scheduler,
        lane: int = 0,
        on_lost: Callable[[str], None] = lambda reason: None,
        state_memory: StateMemory | None = None,
    ) -> None:
        """`state_memory` limits the states of sequences; by default there is no limit.

        `on_lost` is called once, with the reason, when the lane can no longer execute.
        """
        self._scheduler = scheduler
        self.device = DeviceThread(scheduler, self, lane)
        self._on_lost = on_lost
        self._state_memory = state_memory or StateMemory(sys.maxsize)
        self._current: dict[ModelKey, int] = {}
        """By model: the load number that new requests get."""
        self.lost: str | None = None
        """Why the lane can no longer execute, or None while the device works."""
        self._waiting: dict[Ticket, asyncio.Future[tuple[Answer, float]]] = {}
        """Each request's answer and end of execution. Cancelled requests stay until they have been executed."""
        self.on_waiting: Callable[[bool], None] = lambda waiting: None
        """Called with True when requests begin to wait for their answers, and with False once none does."""
        self._turns = Turns()
        self._ending_sequences: set[asyncio.Task[None]] = set()
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = math.inf
        self.draining = False
        """Whether new requests are refused."""
        self._answered = asyncio.Event()

    def sequences(self, model: ModelKey) -> Sequences | None:
        """Return the sequences of a model's current load, if it has any."""
        number = self._current.get(model)
        return None if number is None else self.device.loads[number].sequences

    def serves(self, model: ModelKey) -> bool:
        return model in self._current

    def pending(self, model: ModelKey) -> int:
        """Return the number of requests waiting in this model's queue."""
        return self._scheduler.pending(model)

    def correction(self, model: ModelKey) -> float:
        """Return measured over predicted time of this model's executions; 1 if it is not loaded."""
        return self._scheduler.correction(model) if model in self._current else 1.0

    def add(
        self,
        servable: Servable,
        statistics: ModelStatistics,
        policy: Policy | None = None,
        rules: SequenceRules | None = None,
        weights: str | None = None,
    ) -> None:
        """Serve a model, or replace the servable of its future requests.

        `weights` is the identity of the weights. Sequences of a replaced servable continue if it has the same ones.
        """
        info, predicted_s = servable.info, servable.predicted_s
        model = info.key
        # No batching without predictions, or if it changes answers.
        max_rows = info.max_batch_size if predicted_s and not info.only_batches else 0
        batches = sorted({bucket.batch for bucket in predicted_s})
        with self.device.changed:
            sequences = self.sequences(model)
            if rules is None:
                sequences = None
            elif sequences is None or not sequences.continued(info, rules, batches, weights):
                sequences = Sequences(info, rules, self._state_memory, batches, weights)
            number = self._scheduler.add(model, predicted_s, policy, max_rows, servable.recovery_s)
            self._current[model] = number
            self.device.loads[number] = LoadedServable(servable, statistics, sequences)

    def replan(self, servable: Servable) -> None:
        """Replace the predictions after a servable's plans have changed."""
        with self.device.changed:
            self._scheduler.replan(servable.info.key, servable.predicted_s, servable.recovery_s)

    def remove(self, model: ModelKey) -> None:
        """Remove a model and refuse its waiting requests."""
        with self.device.changed:
            forgotten = self._scheduler.remove(model)
        self._current.pop(model, None)
        self._forget_old_loads(model)
        for ticket in forgotten:
            self._resolve(ticket, ModelNotFound(*model, reason="unloaded"))

    def redirect_waiting(self, model: ModelKey) -> None:
        """Refuse the waiting requests for replaced servables, and resume dispatch.

        The front end resends these requests to the current servable.
        """
        with self.device.changed:
            older = self._scheduler.drop_older(model)
        for ticket in older:
            self._resolve(ticket, ModelNotFound(*model, reason="replaced"))
        self._forget_old_loads(model)
        self.resume(model)

    def pause(self, model: ModelKey) -> None:
        """Stop dispatching a model's requests while its memory changes."""
        with self.device.changed:
            self._scheduler.pause(model)

    def resume(self, model: ModelKey) -> None:
        with self.device.changed:
            self._scheduler.resume(model)
            self.device.changed.notify()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.device.start(self._loop)

    async def infer(self, request: Request, on_spans: OnSpans | None = None) -> Answer:
        """Execute a request, and write its requested outputs into its output buffer. `on_spans` receives spans.

        Cancelling removes the request from the queue. A started one uses its buffers until `ended` returns. Raises
        Overloaded, RequestTimedOut, Refused, ModelNotFound, ExecutionFailed, or the servable's InvalidRequest.
        """
        self._require_running()
        await self._turns.begin(request)
        try:
            ticket = self._submit(request, on_spans)
        except BaseException:
            self._turns.drop(request)
            raise
        future: asyncio.Future[tuple[Answer, float]] = self._loop.create_future()
        self._waiting[ticket] = future
        if len(self._waiting) == 1:
            self.on_waiting(True)
        if ticket.expires:
            self._watch_deadlines()
        try:
            answer, ended_s = await future
            self._scheduler.answered(time.monotonic() - ended_s)
            answer = _write_outputs(request, answer)
        except asyncio.CancelledError:
            self._cancel(ticket)
            raise
        except BaseException:
            self._turns.drop(request)
            raise
        self._turns.answered(request)
        return answer

    def settle(self, request: Request, *, kept: bool) -> None:
        """Say whether a request's answer reached its client, or failed on the way.

        To be called for every answer of `infer` to a sequence's request: the next one waits for it. Ignores others.
        """
        self._turns.settle(request, kept=kept)

    def _submit(self, request: Request, on_spans: OnSpans | None) -> Ticket:
        self._require_running()
        try:
            with self.device.changed:
                ticket = self._scheduler.submit(time.monotonic(), request)
                self._turns.queued(request, self._sequences_of(ticket))
                if on_spans is not None:
                    self.device.on_spans[ticket] = on_spans
                self.device.changed.notify()
        except RequestTimedOut:
            self._count_failure(self._current[request.model], "REJECTED", 0.0)
            raise
        return ticket

    async def ended(self, request: Request) -> None:
        """Wait until a cancelled request no longer uses its buffers."""
        while any(ticket.request is request for ticket in self._waiting):
            self._answered.clear()
            await self._answered.wait()

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        """Forget a sequence of a model's current load, after its requests under way.

        If it is `spare`, only once its memory is needed.
        """
        sequences = self.sequences(model)
        if sequences is not None:
            task = asyncio.create_task(self._turns.end_sequence(model, sequence, sequences, spare=spare))
            self._ending_sequences.add(task)
            task.add_done_callback(self._ending_sequences.discard)

    async def call_on_lane(self, action: Callable[[], _T]) -> _T:
        """Call a function on the lane's thread between two executions. It should take less time than one."""
        results: list[_T] = []

        def once() -> bool:
            results.append(action())
            return True

        await self.perform(once)
        return results[0]

    async def perform(self, background: BackgroundWork) -> None:
        """Do background work between executions. Raises its error, or Refused if the lane has ended."""
        self._require_running()
        future: asyncio.Future[None] = self._loop.create_future()

        def end(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        with self.device.changed:
            self.device.background.append(PendingWork(background, end))
            self.device.changed.notify()
        await future

    async def finish(self, model: ModelKey, timeout_s: float, older_only: bool = False) -> bool:
        """Wait until a model's requests are answered; False after a timeout.

        With `older_only`, waits only for requests of replaced servables, and refuses the rest after a timeout.
        """
        newest = self._current.get(model) if older_only else None

        def is_busy() -> bool:
            return any(t.request.model == model and t.load_number != newest for t in self._waiting)

        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while is_busy():
                    self._answered.clear()
                    await self._answered.wait()
        if is_busy():
            if newest is not None:
                self._drop_older(model)
            return False
        self._forget_old_loads(model)
        return True

    def _forget_old_loads(self, model: ModelKey) -> None:
        """Forget all loads of a model but the current one."""
        loads, current = self.device.loads, self._current.get(model)
        for number in [n for n, load in loads.items() if load.servable.info.key == model and n != current]:
            del loads[number]

    def _drop_older(self, model: ModelKey) -> None:
        with self.device.changed:
            older = self._scheduler.drop_older(model)
        for ticket in older:
            self.refused(ticket, ModelNotFound(*model, reason="replaced"), "OTHER")

    async def stop(self, timeout_s: float = 5.0) -> bool:
        """Refuse unanswered requests and end the thread; False if it is still busy after `timeout_s`."""
        self.draining = True
        with self.device.changed:
            self.device.stopped = True
        self._clear(shutting_down())
        if self._alarm is not None:
            self._alarm.cancel()
        for ticket in list(self._waiting):
            self._resolve(ticket, shutting_down())
        if self.device.is_running:
            await asyncio.to_thread(self.device.join, timeout_s)
        return not self.device.is_running

    def _clear(self, error: RequestError) -> None:
        """Empty the queues, end the background work with an error, and wake the thread."""
        with self.device.changed:
            self._scheduler.clear()
            background = list(self.device.background)
            self.device.background.clear()
            self.device.changed.notify()
        for pending in background:
            pending.on_end(error)

    def _require_running(self) -> None:
        if self.draining:
            raise shutting_down()
        if self.lost is not None:
            raise device_unavailable(self.lost)

    def _cancel(self, ticket: Ticket) -> None:
        """Remove a request from the queue. A started one is executed and counted, and its answer dropped."""
        with self.device.changed:
            never_ran = self._scheduler.cancel(ticket)
        if never_ran:
            self.device.loads[ticket.load_number].statistics.cancelled()
            self._forget(ticket)
        if ticket not in self._waiting:
            self._turns.drop(ticket.request)

    def _resolve(self, ticket: Ticket, outcome: tuple[Answer, float] | RequestError) -> None:
        future = self._forget(ticket)
        if future is None or future.done():
            self._turns.drop(ticket.request)
            return
        if isinstance(outcome, RequestError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def _forget(self, ticket: Ticket) -> asyncio.Future[tuple[Answer, float]] | None:
        """Remove a completed request, and return its future unless it was already removed."""
        self.device.on_spans.pop(ticket, None)
        self._answered.set()
        future = self._waiting.pop(ticket, None)
        if future is not None and not self._waiting:
            self.on_waiting(False)
        return future

    def _sequences_of(self, ticket: Ticket) -> Sequences | None:
        load = self.device.loads.get(ticket.load_number)
        return None if load is None else load.sequences

    def executed(
        self, tickets: Sequence[Ticket], outcomes: Sequence[Outcome], ended_s: float, lost: str | None
    ) -> None:
        """Answer the requests of one execution. `lost` is the reason if the device was lost."""
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if isinstance(outcome, RequestError):
                self.refused(ticket, outcome, "BACKEND" if isinstance(outcome, ExecutionFailed) else "OTHER")
            else:
                self._resolve(ticket, (outcome, ended_s))
        if lost is not None:
            self.device_lost(lost)

    def refused(self, ticket: Ticket, error: RequestError, reason: FailureReason) -> None:
        """Answer a request with an error, and count it."""
        waited_s = time.monotonic() - ticket.arrived_s
        self._count_failure(ticket.load_number, reason, waited_s)
        self._resolve(ticket, error)

    def _count_failure(self, load_number: int, reason: FailureReason, seconds: float) -> None:
        load = self.device.loads.get(load_number)
        if load is not None:
            load.statistics.failed(reason, seconds)

    def _watch_deadlines(self) -> None:
        """Set the alarm for the next deadline, so that requests are shed even while the lane is busy."""
        with self.device.changed:
            expiry_s = self._scheduler.expiry_s()
        if expiry_s >= self._alarm_s:
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_s = expiry_s
        self._alarm = self._loop.call_later(max(expiry_s - time.monotonic(), 0.0), self._shed)

    def _shed(self) -> None:
        self._alarm_s = math.inf
        with self.device.changed:
            late = self._scheduler.shed(time.monotonic())
        self.refuse_late(late)
        self._watch_deadlines()

    def refuse_late(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            self.refused(ticket, RequestTimedOut(ticket.request.model.name, ticket.timeout_s or 0.0), "REJECTED")

    def device_lost(self, reason: str) -> None:
        """Refuse all requests and background work from now on."""
        if self.lost is not None:
            return
        self.lost = reason
        self._clear(device_unavailable(reason))
        for ticket in list(self._waiting):
            self.refused(ticket, device_unavailable(reason), "BACKEND")
        self._on_lost(reason)


def make_lanes(
    count: int,
    queue_limit: int,
    on_lost: Callable[[str], None] = lambda reason: None,
    state_memory: StateMemory | None = None,
) -> list[ComputeLane]:
    """Make the compute lanes of one device. If one loses the device, all do, and `on_lost` is called once."""

    def lost(reason: str) -> None:
        others = [lane for lane in lanes if lane.lost is None]
        for lane in others:
            lane.device_lost(reason)
        if not others:
            on_lost(reason)

    lanes = [ComputeLane(Scheduler(queue_limit), number, lost, state_memory) for number in range(count)]
    return lanes


def _write_outputs(request: Request, answer: Answer) -> Answer:
    """Write the requested outputs into a request's output buffer, if it has one.

    Raises ExecutionFailed for an output that is missing, or larger than the model's description says.
    """
    missing = [wanted.name for wanted in request.outputs if wanted.name not in answer.outputs]
    if missing:
        raise ExecutionFailed(request.model.name, f"it returned no {', '.join(missing)}")
    if (output_buffer := request.output_buffer) is None:
        return answer
    written: dict[str, Array] = {}
    offset = MARK_BYTES
    for wanted in request.outputs:
        array = answer.outputs[wanted.name]
        if offset + array.nbytes > output_buffer.nbytes:
            reason = f"output '{wanted.name}' is larger than the model's description says"
            raise ExecutionFailed(request.model.name, reason)
        written[wanted.name] = own = np.ndarray(array.shape, array.dtype, output_buffer, offset)
        own[...] = array
        offset += round_up(array.nbytes)
    return replace(answer, outputs=written)
