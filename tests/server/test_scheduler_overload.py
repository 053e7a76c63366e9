"""The scheduler under too much load, in a simulation: a device that takes its time, a clock that jumps."""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import QueueFull, RequestTimedOut
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import Scheduler

NAMES = ("a", "b", "c", "d")
SWAP_BOUND = {Bucket(1): 8e-3, Bucket(2): 9e-3, Bucket(4): 11e-3, Bucket(8): 15e-3}
COMPUTE_BOUND = {Bucket(1): 8e-3, Bucket(2): 16e-3, Bucket(4): 32e-3, Bucket(8): 64e-3}


@dataclass
class Outcome:
    answered: int = 0
    late: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    longest_refusal_s: float = 0.0
    most_waiting: int = 0
    duration_s: float = 0.0

    @property
    def per_s(self) -> float:
        return self.answered / self.duration_s


@dataclass
class Simulation:
    """One device and Poisson arrivals, for `duration_s`."""

    predicted_s: Mapping[Bucket, float]
    rate_per_s: float
    timeout_s: float | None = None
    queue_limit: int = 64
    duration_s: float = 10.0
    slowness: Callable[[random.Random], float] = lambda rng: rng.lognormvariate(0.0, 0.1)
    """Actual over predicted time."""

    def run(self, seed: int = 0) -> Outcome:
        rng, outcome = random.Random(seed), Outcome(duration_s=self.duration_s)
        scheduler = Scheduler(self.queue_limit)
        for name in NAMES:
            scheduler.add(ModelKey(name, 1), self.predicted_s, max_rows=8)
        now_s, arrival_s = 0.0, rng.expovariate(self.rate_per_s)
        while now_s < self.duration_s:
            work = scheduler.next(now_s)
            end_s = math.inf
            if work is not None:
                end_s = now_s + self.predicted_s[_padded(work.rows)] * self.slowness(rng)
            begun_s = now_s
            while min(arrival_s, scheduler.expiry_s()) < end_s:
                if scheduler.expiry_s() < arrival_s:
                    now_s = max(now_s, scheduler.expiry_s() + 1e-6)
                    self._refuse(outcome, scheduler.shed(now_s), now_s)
                    continue
                now_s = max(now_s, arrival_s)
                arrival_s += rng.expovariate(self.rate_per_s)
                self._arrive(outcome, scheduler, rng, now_s)
                if work is None:
                    break
            if work is not None:
                now_s = end_s
                scheduler.finished(work, now_s, now_s - begun_s)
                for ticket in work.tickets:
                    outcome.answered += 1
                    outcome.late += ticket.deadline_s is not None and now_s > ticket.deadline_s
            outcome.most_waiting = max(outcome.most_waiting, len(scheduler._tickets))
        return outcome

    def _arrive(self, outcome: Outcome, scheduler: Scheduler, rng: random.Random, now_s: float) -> None:
        asked = Request(ModelKey(rng.choice(NAMES), 1), {}, 1, (), timeout_s=self.timeout_s)
        try:
            scheduler.submit(now_s, asked)
        except (QueueFull, RequestTimedOut) as error:
            outcome.refused[type(error).__name__] += 1

    def _refuse(self, outcome: Outcome, hopeless: list[Ticket], now_s: float) -> None:
        for ticket in hopeless:
            outcome.refused["shed"] += 1
            outcome.longest_refusal_s = max(outcome.longest_refusal_s, now_s - ticket.arrived_s)


def _padded(rows: int) -> Bucket:
    return min(bucket for bucket in SWAP_BOUND if bucket.batch >= rows)


def saturation_per_s(predicted_s: Mapping[Bucket, float]) -> float:
    return max(bucket.batch / seconds for bucket, seconds in predicted_s.items())


@pytest.mark.parametrize("seconds", [SWAP_BOUND, COMPUTE_BOUND], ids=["swap-bound", "compute-bound"])
def test_five_times_too_much_keeps_the_device_as_busy_as_it_can_be(seconds: Mapping[Bucket, float]) -> None:
    capacity = saturation_per_s(seconds)
    outcome = Simulation(seconds, 5 * capacity).run()
    assert outcome.per_s >= 0.95 * capacity
    assert outcome.most_waiting <= 64 * len(NAMES)
    assert set(outcome.refused) == {"QueueFull"}


@pytest.mark.parametrize(
    ("seconds", "timeout_s", "share"),
    [
        (SWAP_BOUND, 50e-3, 0.7),  # four models' full batches take 60 ms: some must be smaller
        (SWAP_BOUND, 120e-3, 0.95),
        (COMPUTE_BOUND, 50e-3, 0.85),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_what_is_answered_under_overload_is_in_time_and_as_much_as_can_be(
    seconds: Mapping[Bucket, float], timeout_s: float, share: float, seed: int
) -> None:
    """A nearest deadline that made small batches of large ones would halve what is answered."""
    capacity = saturation_per_s(seconds)
    outcome = Simulation(seconds, 2 * capacity, timeout_s).run(seed)
    assert outcome.late <= 0.01 * outcome.answered
    assert outcome.per_s >= share * capacity
    assert outcome.longest_refusal_s <= timeout_s


def test_nothing_is_refused_where_everything_can_be_answered() -> None:
    outcome = Simulation(SWAP_BOUND, 0.5 * saturation_per_s(SWAP_BOUND), timeout_s=120e-3).run()
    assert (outcome.late, outcome.refused) == (0, {})


def test_slow_device_is_found_out_and_promises_are_kept_again() -> None:
    """Everything takes twice as long as predicted."""
    slow = Simulation(
        COMPUTE_BOUND,
        2 * saturation_per_s(COMPUTE_BOUND),
        timeout_s=50e-3,
        slowness=lambda rng: rng.lognormvariate(math.log(2.0), 0.1),
    )
    outcome = slow.run()
    assert outcome.late <= 0.015 * outcome.answered
    assert outcome.per_s >= 0.7 * saturation_per_s(COMPUTE_BOUND) / 2


def test_hiccups_of_the_device_do_not_stop_it_from_answering() -> None:
    """One execution in fifty takes ten times as long."""
    hiccups = Simulation(
        COMPUTE_BOUND,
        saturation_per_s(COMPUTE_BOUND),
        timeout_s=50e-3,
        slowness=lambda rng: 10.0 if rng.random() < 0.02 else 1.0,
    )
    outcome = hiccups.run()
    assert outcome.per_s >= 0.5 * saturation_per_s(COMPUTE_BOUND)
