"""What runs next: requests queue per model, leave by the order, or are refused. Pure; the clock is passed in.

Requests that cannot be answered within their timeout are refused as soon as that is known.
"""

import math
from collections.abc import Mapping

import msgspec

from server.errors import ModelNotFound, QueueFull, RequestTimedOut
from server.protocol.request import InferRequest
from server.scheduling.batching import Batch
from server.scheduling.deadlines import Deadlines
from server.scheduling.estimates import Delay, Estimate, SwapTiming
from server.scheduling.order import DispatchOrder
from server.scheduling.policy import Policy
from server.scheduling.queues import Ticket
from server.scheduling.scheduled_model import ScheduledModel

PATIENCE_S = 1.0
"""A request without a deadline is as urgent as one that must start within this time."""

_STRAINED_S = 1.0
"""So long after something could not be answered in time, answering most comes before answering the nearest deadline."""


class Work(msgspec.Struct, frozen=True):
    """What the device does next: requests for one model, executed together."""

    model: str
    tickets: tuple[Ticket, ...]
    rows: int
    predicted_s: float = 0.0
    """How long the execution is expected to take."""


class Scheduler:
    """Not thread-safe: the engine calls it under its lock."""

    def __init__(self, queue_limit: int) -> None:
        self._queue_limit = queue_limit
        self._models: dict[str, ScheduledModel] = {}
        self._waiting: dict[str, ScheduledModel] = {}
        """Those for which something waits that may be executed."""
        self._order = DispatchOrder(self._waiting)
        self._arrivals = 0
        self._generations = 0
        self._busy_until_s = -math.inf
        self._refused_s = -math.inf
        """When something could last not be answered in time."""
        self._answering = Delay()
        """From the end of an execution until its answer is on its way."""
        self._deadlines = Deadlines()
        self._passed_over: list[Ticket] = []
        self._live: set[Ticket] = set()
        """All that wait."""

    def __len__(self) -> int:
        return len(self._live)

    def pending(self, model: str) -> int:
        return len(self._models[model].queue) if model in self._models else 0

    def correction(self, model: str) -> float:
        """Measured over predicted time of a model's executions."""
        return self._models[model].estimate.correction

    def add(
        self,
        model: str,
        seconds_by_batch: Mapping[int, float] | None = None,
        policy: Policy | None = None,
        most_rows: int = 0,
        readiness: SwapTiming | None = None,
    ) -> int:
        """Know a model, or what has replaced it; returns the generation that its tickets carry from now on.

        Requests are put together up to `most_rows`; those of different generations never are.
        """
        self._generations += 1
        known = self._models.setdefault(model, ScheduledModel(self._generations))
        known.generation = self._generations
        known.apply(policy or Policy())
        known.estimate = Estimate(seconds_by_batch or {})
        known.most_rows = most_rows
        known.readiness = readiness or SwapTiming()
        return known.generation

    def replan(self, model: str, seconds_by_batch: Mapping[int, float], readiness: SwapTiming) -> None:
        """Hear that a model has other plans now."""
        known = self._models[model]
        known.estimate.replan(seconds_by_batch)
        known.readiness = readiness

    def remove(self, model: str) -> list[Ticket]:
        """Forget a model; returns the requests that still waited for it."""
        forgotten = self._models.pop(model, None)
        self._waiting.pop(model, None)
        tickets = list(forgotten.queue) if forgotten is not None else []
        for ticket in tickets:
            self._left(ticket)
        return tickets

    def drop_older(self, model: str) -> list[Ticket]:
        """Take out what waits for versions of a model that have been replaced."""
        known = self._models[model]
        older = [ticket for ticket in known.queue if ticket.generation != known.generation]
        for ticket in older:
            self.cancel(ticket)
        return older

    def hold(self, model: str, held: bool) -> None:
        """Keep a model's requests waiting while its memory is being changed, or let them go on."""
        known = self._models[model]
        known.held = held
        self._look_at(model, known)

    def submit(self, now_s: float, request: InferRequest) -> Ticket:
        """Queue a request. Raises QueueFull, RateLimited, ModelNotFound, or RequestTimedOut if it came too late."""
        known = self._models.get(request.model)
        if known is None:
            raise ModelNotFound(request.model)
        ticket = self._ticket(request, known, now_s)
        self._require_room(known, ticket, now_s)
        if ticket.deadline_s is not None:
            needed_s = self._start_s(ticket, known, now_s) + self._careful_s(ticket, now_s) - now_s
            if now_s + needed_s > ticket.deadline_s:
                self._refused_s = now_s
                raise RequestTimedOut(request.model, ticket.timeout_s or 0.0, needed_s)
        known.admission.enter(request.model, now_s, self._backlog_s)
        self._arrivals += 1
        self._live.add(ticket)
        known.queue.push(ticket)
        if not known.held:
            self._waiting[request.model] = known
        if ticket.expires:
            self._watch(ticket, now_s)
        return ticket

    def cancel(self, ticket: Ticket) -> bool:
        """Take a request out of its queue; False if it has left it already."""
        if ticket not in self._live:
            return False
        known = self._models[ticket.request.model]
        known.queue.remove(ticket)
        self._look_at(ticket.request.model, known)
        known.admission.leave()
        self._left(ticket)
        return True

    def shed(self, now_s: float) -> list[Ticket]:
        """Take out what can no longer be answered in time, even if it were next."""
        hopeless, self._passed_over = self._passed_over, []
        start_s = max(now_s, self._busy_until_s)
        while (ticket := self._deadlines.pop_before(start_s)) is not None:
            if self._latest_start_s(ticket, now_s) >= start_s:  # the model has become faster meanwhile
                self._watch(ticket, now_s)
            elif ticket.late_s is not None:
                self._models[ticket.request.model].queue.put_behind(ticket)
            elif self.cancel(ticket):
                self._refused_s = now_s
                hopeless.append(ticket)
        return hopeless

    def next(self, now_s: float) -> Work | None:
        """Take the next requests to execute, or None if none waits, or all are kept back.

        What turns out to be too late by now is passed over, and left to `shed`.
        """
        while (chosen := self._choose(now_s)) is not None and self._is_too_late(chosen[1], now_s):
            (ticket,) = chosen[1].tickets
            self.cancel(ticket)
            self._passed_over.append(ticket)
            self._refused_s = now_s
        if chosen is None:
            return None
        model, batch = chosen
        known = self._models[model]
        for ticket in batch.tickets:
            known.queue.remove(ticket)
            self._left(ticket)
        self._look_at(model, known)
        self._order.took(model, batch)
        predicted_s = known.estimate.seconds(batch.rows)
        self._busy_until_s = now_s + predicted_s
        return Work(model, batch.tickets, batch.rows, predicted_s)

    def finished(self, work: Work, now_s: float, seconds: float | None) -> None:
        """Hear that work has ended, after `seconds`; None if they say nothing about the next time."""
        self._busy_until_s = -math.inf
        known = self._models.get(work.model)
        if known is None or work.tickets[0].generation < known.first_generation:
            return  # the model was removed meanwhile
        known.admission.leave(len(work.tickets))
        if seconds is not None and work.tickets[0].generation == known.generation:
            known.estimate.measured(work.rows, seconds, now_s)

    def answered(self, seconds: float) -> None:
        """Hear how long after the end of its execution an answer was on its way. Read by `submit` alone."""
        self._answering.measured(seconds)

    def ahead(self, now_s: float) -> Work | None:
        """Look at what `next` would take, as far as is known now; its model may begin its copies."""
        chosen = self._choose(max(now_s, self._busy_until_s))
        if chosen is None:
            return None
        self._order.announce(chosen[0])
        return Work(chosen[0], chosen[1].tickets, chosen[1].rows)

    def wake_s(self, now_s: float) -> float:
        """When `next` may find something that it does not find now, though nothing arrives; infinite for never."""
        return self._order.wake_s(now_s)

    def expiry_s(self) -> float:
        """When `shed` may find something next; infinite for never."""
        return self._deadlines.earliest_s

    def clear(self) -> None:
        """Forget every request that waits."""
        for ticket in list(self._live):
            self.cancel(ticket)

    def _look_at(self, model: str, known: ScheduledModel) -> None:
        """Note whether something waits for a model that may be executed."""
        if known.held or not known.queue:
            self._waiting.pop(model, None)
        else:
            self._waiting[model] = known

    def _left(self, ticket: Ticket) -> None:
        """Forget a request that waits no more, and its inputs with it."""
        self._live.remove(ticket)
        self._deadlines.forget(ticket)

    def _choose(self, now_s: float) -> tuple[str, Batch] | None:
        return self._order.choose(now_s, strained=now_s - self._refused_s < _STRAINED_S)

    def _ticket(self, request: InferRequest, known: ScheduledModel, now_s: float) -> Ticket:
        level = known.policy.level_of(request.priority)
        policy = known.policy.of_level(level)
        timeout_s = policy.timeout_of(request.timeout_s)
        arrived_s = now_s if request.arrived_s is None else request.arrived_s
        deadline_s, late_s, due_s = None, None, arrived_s + PATIENCE_S
        if timeout_s is not None:
            # The event loop is as busy when a request arrives, unseen, as when its answer leaves.
            end_s = arrived_s + timeout_s - 2.0 * self._answering.careful_s
            if policy.delays_late:
                late_s = end_s
            else:
                deadline_s = end_s
                due_s = min(due_s, deadline_s - known.estimate.careful_s(request.batch, now_s))
        return Ticket(
            request, self._arrivals + 1, known.generation, arrived_s, deadline_s, timeout_s, late_s, due_s, level
        )

    def _latest_start_s(self, ticket: Ticket, now_s: float) -> float:
        """When a request must start, or, if its policy says so, be put behind the others."""
        if ticket.deadline_s is not None:
            return ticket.deadline_s - self._careful_s(ticket, now_s)
        return math.inf if ticket.late_s is None else ticket.late_s

    def _careful_s(self, ticket: Ticket, now_s: float) -> float:
        return self._models[ticket.request.model].estimate.careful_s(ticket.request.batch, now_s)

    def _watch(self, ticket: Ticket, now_s: float) -> None:
        self._deadlines.watch(ticket, self._latest_start_s(ticket, now_s))

    def _is_too_late(self, batch: Batch, now_s: float) -> bool:
        """Whether a request that is alone cannot be answered in time; in company, all can."""
        first = batch.tickets[0]
        if len(batch.tickets) > 1 or first.deadline_s is None:
            return False
        return now_s + self._careful_s(first, now_s) > first.deadline_s

    def _start_s(self, ticket: Ticket, own: ScheduledModel, now_s: float) -> float:
        """When a request would start that arrives now: behind what runs, and what would be chosen before it."""
        ahead_s = 0.0
        for known in self._waiting.values():
            if known is own:
                rows = sum(known.queue.waiting(level) for level in range(1, ticket.level + 1))
                whole = max(own.most_rows, 1)
                ahead_s += known.estimate.drain_s(rows // whole * whole)
            elif known.queue.due_s(known.most_rows) <= ticket.due_s:
                ahead_s += known.estimate.drain_s(known.queue.rows)
        return max(now_s, self._busy_until_s) + ahead_s

    def _backlog_s(self, now_s: float) -> float:
        """The time to expect until all that waits now is answered."""
        running_s = max(self._busy_until_s - now_s, 0.0)
        return running_s + sum(k.estimate.drain_s(k.queue.rows) for k in self._models.values())

    def _require_room(self, known: ScheduledModel, ticket: Ticket, now_s: float) -> None:
        model = ticket.request.model
        limit = known.policy.of_level(ticket.level).limit
        if limit is not None and known.queue.waiting(ticket.level) >= limit:
            raise QueueFull.of_model(model, limit, self._backlog_s(now_s))
        if len(known.queue) >= self._queue_limit:
            raise QueueFull.of_model(model, self._queue_limit, self._backlog_s(now_s))
