"""Dispatch order: which model is executed next, by deadline, age and swap cost. Pure.

Starvation is bounded: at most `BYPASSES` consecutive executions bypass the oldest request of all models.
"""

import math
from collections.abc import Collection, Mapping

from cohabit.server.ipc.model import ModelKey
from cohabit.server.scheduling.batching import Batch, best_rate_batch
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduled_model import ScheduledModel

BYPASSES = 8


class DispatchOrder:
    """Chooses among the models with waiting requests. `waiting` is shared with the scheduler, which updates it."""

    def __init__(self, waiting: Mapping[ModelKey, ScheduledModel]) -> None:
        self._waiting = waiting
        self._last: ModelKey | None = None
        self._bypassed: tuple[int, int] = (0, 0)
        """Number of the oldest request, and count of executions that have bypassed it."""

    def choose(self, now_s: float, overloaded: bool) -> Batch | None:
        """Return the most urgent batch, or the oldest request's after `BYPASSES` bypasses.

        None if no batch may start. Under overload, returns the batch with the highest rate of answers.
        """
        ready = [item for item in self._waiting.items() if _kept_until_s(item[1], now_s) <= now_s]
        if not ready:
            return None
        if self._bypassed[1] >= BYPASSES:
            model, oldest = _oldest(ready)
            if oldest.number == self._bypassed[0]:
                return self._waiting[model].batch(oldest, now_s)
        _, scheduled = ready[0]
        if len(ready) > 1:
            _, scheduled = min(ready, key=lambda item: (self._urgency_s(*item), item[1].queue.first().number))
        batch = scheduled.batch(scheduled.queue.first(), now_s)
        if overloaded and not scheduled.policy.keeps_order:
            estimate = scheduled.estimate_of(batch.tickets[0])
            batch = best_rate_batch(scheduled.queue, batch, estimate, scheduled.max_rows, now_s)
        return batch

    def wake_s(self, now_s: float) -> float:
        """Return when a delayed batch may start; infinite if there are none."""
        return min((_kept_until_s(scheduled, now_s) for scheduled in self._waiting.values()), default=math.inf)

    def dispatched(self, batch: Batch) -> None:
        """Record that a batch was dispatched and has left its queue."""
        self._last = batch.model
        oldest = _oldest(self._waiting.items())[1].number if self._waiting else None
        if oldest is None or oldest > min([ticket.number for ticket in batch.tickets]):
            self._bypassed = (0, 0)
        else:
            count = self._bypassed[1] if self._bypassed[0] == oldest else 0
            self._bypassed = (oldest, count + 1)

    def _urgency_s(self, model: ModelKey, scheduled: ScheduledModel) -> float:
        """Return when a model's next batch is due, later if its residents are still copied back."""
        due_s = scheduled.queue.due_s(scheduled.max_rows)
        return due_s + scheduled.recovery_s if model == self._last else due_s


def _kept_until_s(scheduled: ScheduledModel, now_s: float) -> float:
    if scheduled.policy.batch_delay_s == 0.0:
        return -math.inf
    return scheduled.batch(scheduled.queue.first(), now_s).keep_until_s


def _oldest(waiting: Collection[tuple[ModelKey, ScheduledModel]]) -> tuple[ModelKey, Ticket]:
    """Return the oldest request of all models, and its model."""
    oldest = ((model, scheduled.queue.oldest()) for model, scheduled in waiting)
    return min(oldest, key=lambda entry: entry[1].number)
