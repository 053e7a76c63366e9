"""The scheduler's state of one model: its queue, its policy, and its time estimates."""

import math

from cohabit.server.ipc.request import SequenceId
from cohabit.server.scheduling.batching import Batch, choose_batch
from cohabit.server.scheduling.estimates import Estimate, ModelEstimates
from cohabit.server.scheduling.limits import Admission
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.queues import RequestQueue, Ticket


class ScheduledModel:
    """Plain data; the scheduler reads and updates it."""

    def __init__(self) -> None:
        self.load_number = 0
        """The load that executes new requests."""
        self.queue = RequestQueue()
        self.policy = Policy()
        self.admission = Admission()
        self.estimates = ModelEstimates({})
        self.max_rows = 0
        """Maximum rows of a batch; 0 executes requests alone."""
        self.recovery_s = 0.0
        """Seconds lost directly after an execution of the same model, while its residents are still copied back."""
        self.paused = False
        self.expected_sequences: set[SequenceId] = set()
        """Sequences of the last execution whose next requests have not arrived yet; those of a text arrive at once."""
        self.ended_s = -math.inf
        """Time at which that execution ended."""

    def estimate_of(self, ticket: Ticket) -> Estimate:
        return self.estimates.of(ticket.request.sizes)

    def drain_estimate_s(self) -> float:
        """Return the expected time of all waiting requests."""
        return sum(self._drain_s(sizes, rows) for sizes, rows in self.queue.rows.items())

    def ahead_estimate_s(self, requests: int, sizes: tuple[int, ...]) -> float:
        """Return the expected time of `requests` waiting ahead of a new one of these sizes.

        If all have these sizes, the new request joins the last, partial batch. Otherwise they count by their fraction
        of the total time.
        """
        if self.max_rows and self.queue.rows.keys() <= {sizes}:
            return self.estimates.of(sizes).drain_estimate_s(requests // self.max_rows * self.max_rows)
        return self.drain_estimate_s() * requests / max(len(self.queue), 1)

    def _drain_s(self, sizes: tuple[int, ...], rows: int) -> float:
        """Return the expected time of all waiting rows of one shape."""
        estimate = self.estimates.of(sizes)
        if self.max_rows:
            return estimate.drain_estimate_s(rows)
        each = -(-self.queue.rows.total() // len(self.queue))
        return estimate.seconds(each) * len(self.queue) * rows / self.queue.rows.total()

    def batch(self, first: Ticket, now_s: float) -> Batch:
        """Return the batch that would be executed with `first` as its first request."""
        if len(self.queue) == 1 and self.policy.batch_delay_s == 0.0:
            return Batch((first,), first.request.batch)
        # Steps of sequences wait for those of the last execution, and for no others.
        since_s: float | None = None
        if first.request.sequence is not None:
            since_s = self.ended_s if self.expected_sequences else -math.inf
        estimate, waiting = self.estimate_of(first), self.queue.starting_with(first)
        return choose_batch(waiting, self.policy, estimate, self.max_rows, now_s, since_s)
