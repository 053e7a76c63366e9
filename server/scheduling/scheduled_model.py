"""What the scheduler knows of one model: its queue, what its config says, and how long its executions take."""

from server.scheduling.batching import Batch, alone, batch_of
from server.scheduling.estimates import Estimate, SwapTiming
from server.scheduling.limits import Admission
from server.scheduling.policy import Policy
from server.scheduling.queues import ModelQueue, Ticket


class ScheduledModel:
    """Belongs to the scheduler, which changes it."""

    def __init__(self, generation: int) -> None:
        self.first_generation = self.generation = generation
        self.queue = ModelQueue()
        self.admission = Admission(Policy())
        self.apply(self.admission.policy)
        self.estimate = Estimate({})
        self.most_rows = 0
        self.readiness = SwapTiming()
        self.held = False

    def apply(self, policy: Policy) -> None:
        """Follow this policy from now on."""
        self.policy = self.admission.policy = policy

    def batch(self, first: Ticket, now_s: float) -> Batch:
        """The requests that would be executed with this one."""
        if len(self.queue) == 1 and self.policy.batch_delay_s == 0.0:
            return alone(first)
        return batch_of(self.queue.led_by(first), self.policy, self.estimate, self.most_rows, now_s)
