"""The scheduler's state of one model: its queue, its policy, and its time estimates."""

from server.scheduling.batching import Batch, choose_batch, lone_batch
from server.scheduling.estimates import Estimate, SwapTiming
from server.scheduling.limits import Admission
from server.scheduling.policy import Policy
from server.scheduling.queues import ModelQueue, Ticket


class ScheduledModel:
    """Plain data; the scheduler reads and updates it."""

    def __init__(self, generation: int) -> None:
        self.first_generation = self.generation = generation
        self.queue = ModelQueue()
        self.admission = Admission(Policy())
        self.apply(self.admission.policy)
        self.estimate = Estimate({})
        self.max_rows = 0
        """0 if requests are executed alone."""
        self.swap_timing = SwapTiming()
        self.held = False

    def apply(self, policy: Policy) -> None:
        """Replace the policy."""
        self.policy = self.admission.policy = policy

    def drain_estimate_s(self, requests: int | None = None) -> float:
        """Return the expected time of all waiting requests, or of the full batches that `requests` of one row make."""
        if self.max_rows == 0:
            waiting = max(len(self.queue), 1)
            each_s = self.estimate.seconds(-(-self.queue.rows // waiting))
            return (len(self.queue) if requests is None else requests) * each_s
        rows = self.queue.rows if requests is None else requests // self.max_rows * self.max_rows
        return self.estimate.drain_estimate_s(rows)

    def batch(self, first: Ticket, now_s: float) -> Batch:
        """Return the batch that would be executed with `first` as its first request."""
        if len(self.queue) == 1 and self.policy.batch_delay_s == 0.0:
            return lone_batch(first)
        return choose_batch(self.queue.starting_with(first), self.policy, self.estimate, self.max_rows, now_s)
