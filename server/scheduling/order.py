"""Which model is executed next: by deadline, age and readiness, and with a bound on bypassing. Pure.

Whatever is preferred, at most `BYPASSES` executions in a row leave the oldest request of all behind.
"""

import math
from collections.abc import Collection, Mapping

from server.scheduling.batching import Batch, best_rate_batch
from server.scheduling.queues import Ticket
from server.scheduling.scheduled_model import ScheduledModel

BYPASSES = 8


class DispatchOrder:
    """Looks at the models for which something waits that may be executed, and remembers what was executed."""

    def __init__(self, waiting: Mapping[str, ScheduledModel]) -> None:
        self._waiting = waiting
        self._last: str | None = None
        self._announced: str | None = None
        self._bypassed: tuple[int, int] = (0, 0)
        """The number of the oldest request, and how many executions have left it behind."""

    def choose(self, now_s: float, strained: bool) -> tuple[str, Batch] | None:
        """The most urgent of what may start; the oldest, if it has been bypassed often enough.

        `strained` says that not everything can be answered in time.
        """
        ready = [item for item in self._waiting.items() if _kept_until_s(item[1], now_s) <= now_s]
        if not ready:
            return None
        if self._bypassed[1] >= BYPASSES:
            name, oldest = _oldest(ready)
            if oldest.number == self._bypassed[0]:
                return name, self._waiting[name].batch(oldest, now_s)
        name, known = ready[0]
        if len(ready) > 1:
            name, known = min(ready, key=lambda item: (self._urgency_s(*item), _first(item[1]).number))
        batch = known.batch(_first(known), now_s)
        if strained:
            batch = best_rate_batch(known.queue, batch, known.estimate, known.most_rows, now_s)
        return name, batch

    def wake_s(self, now_s: float) -> float:
        """When `choose` may find something that it does not find now; infinite for never."""
        return min((_kept_until_s(known, now_s) for known in self._waiting.values()), default=math.inf)

    def announce(self, model: str) -> None:
        """Hear that a model's copies may begin, because it is to be next."""
        self._announced = model

    def took(self, model: str, batch: Batch) -> None:
        """Hear what is executed, and has left its queue."""
        self._last, self._announced = model, None
        oldest = _oldest(self._waiting.items())[1].number if self._waiting else None
        if oldest is None or oldest > min([ticket.number for ticket in batch.tickets]):
            self._bypassed = (0, 0)
        else:
            count = self._bypassed[1] if self._bypassed[0] == oldest else 0
            self._bypassed = (oldest, count + 1)

    def _urgency_s(self, name: str, known: ScheduledModel) -> float:
        """When a model's next batch is due, moved by what its copies save or cost right now."""
        due_s = known.queue.due_s(known.most_rows)
        if name == self._last:
            return due_s + known.readiness.recovery_s
        return due_s - known.readiness.prefix_s if name == self._announced else due_s


def _kept_until_s(known: ScheduledModel, now_s: float) -> float:
    return -math.inf if known.policy.batch_delay_s == 0.0 else known.batch(_first(known), now_s).keep_until_s


def _first(known: ScheduledModel) -> Ticket:
    """The first request of a queue in which there are some."""
    first = known.queue.first()
    assert first is not None
    return first


def _oldest(waiting: Collection[tuple[str, ScheduledModel]]) -> tuple[str, Ticket]:
    """The oldest request of all, and its model."""
    oldest = [(name, ticket) for name, known in waiting if (ticket := known.queue.oldest()) is not None]
    return min(oldest, key=lambda entry: entry[1].number)
