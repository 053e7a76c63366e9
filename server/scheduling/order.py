"""Which model is executed next: by deadline, age and readiness, and with a bound on bypassing. Pure.

Whatever is preferred, at most `BYPASSES` executions in a row leave the oldest request of all behind.
"""

import math
from collections.abc import Iterator, Mapping

from server.scheduling.batching import Batch, best_rate_batch
from server.scheduling.known import KnownModel

BYPASSES = 8


class Order:
    """Looks at the scheduler's models, and remembers what was executed."""

    def __init__(self, models: Mapping[str, KnownModel]) -> None:
        self._models = models
        self._last: str | None = None
        self._announced: str | None = None
        self._bypassed: tuple[int, int] = (0, 0)
        """The number of the oldest request, and how many executions have left it behind."""

    def choose(self, now_s: float, strained: bool) -> tuple[str, Batch] | None:
        """The most urgent of what may start; the oldest, if it has been bypassed often enough.

        `strained` says that not everything can be answered in time.
        """
        ready = [(name, known) for name, known in self.candidates() if _kept_until_s(known, now_s) <= now_s]
        if not ready:
            return None
        number, name, first = min((t.number, name, t) for name, known in ready if (t := known.queue.oldest()))
        if self._bypassed[0] == number and self._bypassed[1] >= BYPASSES:
            return name, self._models[name].batch(first, now_s)
        name, known = ready[0]
        if len(ready) > 1:
            name, known = min(ready, key=lambda r: (self._urgency_s(*r), (r[1].queue.first() or first).number))
        batch = known.batch(known.queue.first() or first, now_s)
        if strained:
            batch = best_rate_batch(known.queue, batch, known.estimate, known.most_rows, now_s)
        return name, batch

    def candidates(self) -> Iterator[tuple[str, KnownModel]]:
        """The models for which something waits that may be executed."""
        return ((name, known) for name, known in self._models.items() if len(known.queue) and not known.held)

    def wake_s(self, now_s: float) -> float:
        """When `choose` may find something that it does not find now; infinite for never."""
        return min((_kept_until_s(known, now_s) for _, known in self.candidates()), default=math.inf)

    def announce(self, model: str) -> None:
        """Hear that a model's copies may begin, because it is to be next."""
        self._announced = model

    def took(self, model: str, batch: Batch) -> None:
        """Hear what is executed, and has left its queue."""
        self._last, self._announced = model, None
        waiting = (t for k in self._models.values() if not k.held and (t := k.queue.oldest()) is not None)
        oldest = min((ticket.number for ticket in waiting), default=None)
        if oldest is None or oldest > min(ticket.number for ticket in batch.tickets):
            self._bypassed = (0, 0)
        else:
            count = self._bypassed[1] if self._bypassed[0] == oldest else 0
            self._bypassed = (oldest, count + 1)

    def _urgency_s(self, name: str, known: KnownModel) -> float:
        """When a model's next batch is due, moved by what its copies save or cost right now."""
        due_s = known.queue.due_s(known.most_rows)
        if name == self._last:
            return due_s + known.readiness.recovery_s
        return due_s - known.readiness.prefix_s if name == self._announced else due_s


def _kept_until_s(known: KnownModel, now_s: float) -> float:
    first = known.queue.first()
    if first is None or known.policy.batch_delay_s == 0.0:
        return -math.inf
    return known.batch(first, now_s).keep_until_s
