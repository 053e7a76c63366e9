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
        _, known = ready[0]
        if len(ready) > 1:
            _, known = min(ready, key=lambda item: (self._urgency_s(*item), item[1].queue.first().number))
        batch = known.batch(known.queue.first(), now_s)
        if overloaded and not known.policy.keeps_order:
            estimate = known.estimate_of(batch.tickets[0])
            batch = best_rate_batch(known.queue, batch, estimate, known.max_rows, now_s)
        return batch

    def wake_s(self, now_s: float) -> float:
        """Return when a delayed batch may start; infinite if there are none."""
        return min((_kept_until_s(known, now_s) for known in self._waiting.values()), default=math.inf)

    def dispatched(self, batch: Batch) -> None:
        """Record that a batch was dispatched and has left its queue."""
        self._last = batch.model
        oldest = _oldest(self._waiting.items())[1].number if self._waiting else None
        if oldest is None or oldest > min([ticket.number for ticket in batch.tickets]):
            self._bypassed = (0, 0)
        else:
            count = self._bypassed[1] if self._bypassed[0] == oldest else 0
            self._bypassed = (oldest, count + 1)

    def _urgency_s(self, model: ModelKey, known: ScheduledModel) -> float:
        """Return when a model's next batch is due, later if its residents are still copied back."""
        due_s = known.queue.due_s(known.max_rows)
        return due_s + known.recovery_s if model == self._last else due_s


def _kept_until_s(known: ScheduledModel, now_s: float) -> float:
    return -math.inf if known.policy.batch_delay_s == 0.0 else known.batch(known.queue.first(), now_s).keep_until_s


def _oldest(waiting: Collection[tuple[ModelKey, ScheduledModel]]) -> tuple[ModelKey, Ticket]:
    """Return the oldest request of all models, and its model."""
    return min(((model, known.queue.oldest()) for model, known in waiting), key=lambda entry: entry[1].number)
