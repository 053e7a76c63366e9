"""Scheduler: requests queue per model, and are dispatched or shed. Pure; the clock is passed in.

Requests that cannot meet their deadline are shed: on arrival, in the queue, or at dispatch.
"""

import math
from collections.abc import Mapping

from msgspec.structs import replace

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import LevelFull, ModelNotFound, QueueFull, RequestTimedOut
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.scheduling.batching import Batch, grows
from cohabit.server.scheduling.deadlines import Deadlines
from cohabit.server.scheduling.estimates import Delay, ModelEstimates
from cohabit.server.scheduling.order import DispatchOrder
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduled_model import ScheduledModel

PATIENCE_S = 1.0
"""A request without a deadline is as urgent as one that must start within this time."""

_OVERLOADED_S = 1.0
"""After shedding, throughput takes precedence over the earliest deadline for this long."""
_LOOP_DELAYS = 4.0
"""Number of event-loop delays to allow for outside of the scheduler, each as long as `_answer_delay`: one in the front
end on arrival, then one each in the engine, the front end and the client on the way back."""


class Scheduler:
    """Not thread-safe: `DeviceThread.changed` guards it."""

    def __init__(self, queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._models: dict[ModelKey, ScheduledModel] = {}
        self._waiting: dict[ModelKey, ScheduledModel] = {}
        """Models with waiting requests that are not paused."""
        self._order = DispatchOrder(self._waiting)
        self._arrivals = 0
        self._loads = 0
        self._executing: dict[Ticket, tuple[ScheduledModel, float]] = {}
        """By first request of what was dispatched and has not ended: its model, and its predicted seconds. There are
        two while the device has one ahead. A model may have been removed meanwhile."""
        self._busy_until_s = -math.inf
        self._last_shed_s = -math.inf
        """Time at which a request was last shed."""
        self._answer_delay = Delay()
        """From the end of an execution until the event loop sends its answer."""
        self._tickets: set[Ticket] = set()
        """All waiting requests."""
        self._deadlines = Deadlines(self._tickets)
        self._skipped: list[Ticket] = []
        """Requests that `next` found too late; the next `shed` returns them."""

    def pending(self, model: ModelKey) -> int:
        return len(self._models[model].queue) if model in self._models else 0

    def correction(self, model: ModelKey) -> float:
        """Return measured over predicted time of a model's executions."""
        return self._models[model].estimates.correction

    def add(
        self,
        model: ModelKey,
        predicted_s: Mapping[Bucket, float] | None = None,
        policy: Policy | None = None,
        max_rows: int = 0,
        recovery_s: float = 0.0,
    ) -> int:
        """Add a model version, or replace its servable. Returns the load number of new tickets, unique per scheduler.

        A batch has at most `max_rows` rows, all of one load. With 0, requests are executed alone.
        """
        self._loads += 1
        scheduled = self._models.setdefault(model, ScheduledModel())
        scheduled.load_number = self._loads
        scheduled.policy = policy or Policy()
        scheduled.estimates = ModelEstimates(predicted_s or {})
        scheduled.max_rows = max_rows
        scheduled.recovery_s = recovery_s
        return scheduled.load_number

    def replan(self, model: ModelKey, predicted_s: Mapping[Bucket, float], recovery_s: float) -> None:
        """Replace a model's predictions after its plans have changed."""
        scheduled = self._models[model]
        scheduled.estimates.replan(predicted_s)
        scheduled.recovery_s = recovery_s

    def remove(self, model: ModelKey) -> list[Ticket]:
        """Remove a model; returns its waiting requests."""
        forgotten = self._models.pop(model, None)
        self._waiting.pop(model, None)
        tickets = list(forgotten.queue) if forgotten is not None else []
        for ticket in tickets:
            self._forget(ticket)
        return tickets

    def drop_older(self, model: ModelKey) -> list[Ticket]:
        """Remove and return the waiting requests for older loads of a model."""
        scheduled = self._models[model]
        older = [ticket for ticket in scheduled.queue if ticket.load_number != scheduled.load_number]
        for ticket in older:
            self.cancel(ticket)
        return older

    def pause(self, model: ModelKey) -> None:
        """Stop dispatching a model's requests while its memory changes."""
        self._set_paused(model, paused=True)

    def resume(self, model: ModelKey) -> None:
        self._set_paused(model, paused=False)

    def _set_paused(self, model: ModelKey, *, paused: bool) -> None:
        scheduled = self._models[model]
        scheduled.paused = paused
        self._update_waiting(model, scheduled)

    def submit(self, now_s: float, request: Request) -> Ticket:
        """Queue a request. A sequence has at most one in the queue: see `server.engine.turns`.

        Raises QueueFull, RateLimited, ModelNotFound, or RequestTimedOut if it would be late.
        """
        scheduled = self._models.get(request.model)
        if scheduled is None:
            raise ModelNotFound(*request.model)
        ticket = self._ticket(request, scheduled, now_s)
        self._check_queue_limit(scheduled, ticket, now_s)
        if ticket.deadline_s is not None:
            needed_s = self._start_s(ticket, scheduled, now_s) + self._needed_s(ticket, now_s) - now_s
            if now_s + needed_s > ticket.deadline_s:
                self._last_shed_s = now_s
                raise RequestTimedOut(request.model.name, ticket.timeout_s or 0.0, needed_s)
        scheduled.admission.enter(request.model.name, scheduled.policy, now_s, self._backlog_s)
        self._arrivals += 1
        self._tickets.add(ticket)
        scheduled.queue.push(ticket)
        if request.sequence is not None:
            scheduled.expected_sequences.discard(request.sequence.id)
        if not scheduled.paused:
            self._waiting[request.model] = scheduled
        if ticket.expires:
            self._watch(ticket, now_s)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Remove a request from its queue; False if it no longer waits."""
        if ticket not in self._tickets:
            return False
        scheduled = self._models[ticket.request.model]
        scheduled.queue.remove(ticket)
        self._update_waiting(ticket.request.model, scheduled)
        scheduled.admission.leave()
        self._forget(ticket)
        return True

    def shed(self, now_s: float) -> list[Ticket]:
        """Remove and return the requests that would miss their deadline even if they were next."""
        shed, self._skipped = self._skipped, []
        start_s = max(now_s, self._busy_until_s)
        while (ticket := self._deadlines.pop_before(start_s)) is not None:
            if self._latest_start_s(ticket, now_s) >= start_s:  # the model has become faster meanwhile
                self._watch(ticket, now_s)
            elif ticket.late_s is not None:
                self._models[ticket.request.model].queue.move_to_end(ticket)
            elif self.cancel(ticket):
                self._last_shed_s = now_s
                shed.append(ticket)
        return shed

    def next(self, now_s: float) -> Batch | None:
        """Return the next requests to execute; None if no request waits, or all are delayed.

        Skips requests that have become too late; the next `shed` returns them.
        """
        while (batch := self._choose(now_s)) is not None and self._is_too_late(batch, now_s):
            (ticket,) = batch.tickets
            self.cancel(ticket)
            self._skipped.append(ticket)
            self._last_shed_s = now_s
        if batch is None:
            return None
        scheduled = self._models[batch.model]
        for ticket in batch.tickets:
            scheduled.queue.remove(ticket)
            self._forget(ticket)
        self._update_waiting(batch.model, scheduled)
        self._order.dispatched(batch)
        predicted_s = scheduled.estimate_of(batch.tickets[0]).seconds(batch.rows)
        self._busy_until_s = max(now_s, self._busy_until_s) + predicted_s
        self._executing[batch.tickets[0]] = scheduled, predicted_s
        return replace(batch, predicted_s=predicted_s)

    def ready_ahead(self, now_s: float) -> Batch | None:
        """Return what `next` would return during an execution, if requests that arrive meanwhile would not change it.

        None if more rows would make it cheaper, or if it may be too late for one of them after that execution.
        """
        batch = self._choose(now_s) if self._waiting else None
        if batch is None:
            return None
        scheduled, start_s = self._models[batch.model], max(now_s, self._busy_until_s)
        if grows(batch.rows, scheduled.estimate_of(batch.tickets[0]), scheduled.max_rows):
            return None
        in_time = all(self._latest_start_s(ticket, now_s) >= start_s for ticket in batch.tickets)
        return batch if in_time else None

    def upcoming(self) -> Batch | None:
        """Return the batch that would follow the current execution if no more requests arrived."""
        return self._choose(self._busy_until_s) if self._waiting else None

    def finished(self, batch: Batch, now_s: float, seconds: float | None) -> None:
        """Record the end of an execution after `seconds`; None if it failed, since its time is not representative."""
        first = batch.tickets[0]
        scheduled, _ = self._executing.pop(first)
        left_s = [predicted_s for _, predicted_s in self._executing.values()]
        self._busy_until_s = now_s + sum(left_s) if left_s else -math.inf
        scheduled.admission.leave(len(batch.tickets))
        steps = (ticket.request.sequence for ticket in batch.tickets)
        continued = {step.id for step in steps if step is not None and not step.end}
        scheduled.expected_sequences = continued - scheduled.queue.sequences
        scheduled.ended_s = now_s
        if seconds is not None and first.load_number == scheduled.load_number:
            scheduled.estimates.measured(first.request.sizes, batch.rows, seconds, now_s)

    def answered(self, seconds: float) -> None:
        """Record the delay from an execution's end until its answer is sent. Needs no lock: only `submit` reads it."""
        self._answer_delay.measured(seconds)

    def wake_s(self, now_s: float) -> float:
        """Return when a delayed batch may be dispatched; infinite if there are none."""
        return self._order.wake_s(now_s)

    def expiry_s(self) -> float:
        """Return when `shed` may next find a request; infinite if no request has a deadline."""
        return self._deadlines.earliest_s

    def clear(self) -> None:
        """Cancel every waiting request."""
        for ticket in list(self._tickets):
            self.cancel(ticket)

    def _update_waiting(self, model: ModelKey, scheduled: ScheduledModel) -> None:
        """Update whether a model has requests that may be dispatched."""
        if scheduled.paused or not scheduled.queue:
            self._waiting.pop(model, None)
        else:
            self._waiting[model] = scheduled

    def _forget(self, ticket: Ticket) -> None:
        """Remove a request that no longer waits, so that its inputs are not referenced any longer."""
        self._tickets.remove(ticket)
        self._deadlines.trim()

    def _choose(self, now_s: float) -> Batch | None:
        return self._order.choose(now_s, overloaded=now_s - self._last_shed_s < _OVERLOADED_S)

    def _ticket(self, request: Request, scheduled: ScheduledModel, now_s: float) -> Ticket:
        level = scheduled.policy.level_of(request.priority)
        policy = scheduled.policy.of_level(level)
        timeout_s = policy.timeout_of(request.timeout_s)
        arrived_s = now_s if request.arrived_s is None else request.arrived_s
        deadline_s, late_s, due_s = None, None, arrived_s + PATIENCE_S
        if timeout_s is not None:
            end_s = arrived_s + timeout_s - _LOOP_DELAYS * self._answer_delay.upper_estimate_s
            if policy.delays_late:
                late_s = end_s
            else:
                deadline_s = end_s
                estimate = scheduled.estimates.of(request.sizes)
                due_s = min(due_s, deadline_s - estimate.upper_estimate_s(request.batch, now_s))
        return Ticket(
            request,
            number=self._arrivals + 1,
            load_number=scheduled.load_number,
            arrived_s=arrived_s,
            deadline_s=deadline_s,
            timeout_s=timeout_s,
            late_s=late_s,
            due_s=due_s,
            level=level,
            alone=not self._tickets and self._busy_until_s == -math.inf,
        )

    def _latest_start_s(self, ticket: Ticket, now_s: float) -> float:
        """Return when a request must start, or, under a DELAY policy, counts as late."""
        if ticket.deadline_s is not None:
            return ticket.deadline_s - self._needed_s(ticket, now_s)
        return math.inf if ticket.late_s is None else ticket.late_s

    def _needed_s(self, ticket: Ticket, now_s: float) -> float:
        """Return the time to allow for an execution: an upper estimate.

        For a request that arrived while the device was idle, it is the mean estimate, if that is smaller.
        """
        estimate, rows = self._models[ticket.request.model].estimate_of(ticket), ticket.request.batch
        upper_s = estimate.upper_estimate_s(rows, now_s)
        return min(estimate.seconds(rows), upper_s) if ticket.alone else upper_s

    def _watch(self, ticket: Ticket, now_s: float) -> None:
        self._deadlines.watch(ticket, self._latest_start_s(ticket, now_s))

    def _is_too_late(self, batch: Batch, now_s: float) -> bool:
        """Whether a lone request would miss its deadline; `choose_batch` checks the deadlines of larger batches."""
        first = batch.tickets[0]
        if len(batch.tickets) > 1 or first.deadline_s is None:
            return False
        return now_s + self._needed_s(first, now_s) > first.deadline_s

    def _start_s(self, ticket: Ticket, own: ScheduledModel, now_s: float) -> float:
        """Return when a new request would start: after the current execution and more urgent requests."""
        ahead_s = 0.0
        for scheduled in self._waiting.values():
            if scheduled is own:
                requests = sum(scheduled.queue.waiting(level) for level in range(1, ticket.level + 1))
                ahead_s += scheduled.ahead_estimate_s(requests, ticket.request.sizes)
            elif scheduled.queue.due_s(scheduled.max_rows) <= ticket.due_s:
                ahead_s += scheduled.drain_estimate_s()
        return max(now_s, self._busy_until_s) + ahead_s

    def _backlog_s(self, now_s: float) -> float:
        """Return the expected time until all waiting requests are answered."""
        running_s = max(self._busy_until_s - now_s, 0.0)
        return running_s + sum(k.drain_estimate_s() for k in self._models.values())

    def _check_queue_limit(self, scheduled: ScheduledModel, ticket: Ticket, now_s: float) -> None:
        name = ticket.request.model.name
        limit = scheduled.policy.of_level(ticket.level).limit
        if limit is not None and scheduled.queue.waiting(ticket.level) >= limit:
            full = LevelFull if scheduled.policy.levels > 1 else QueueFull
            raise full.of_model(name, limit, self._backlog_s(now_s))
        if len(scheduled.queue) >= self._queue_limit:
            raise QueueFull.of_model(name, self._queue_limit, self._backlog_s(now_s))
