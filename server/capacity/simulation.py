"""Simulates clients' waiting times: the server's own scheduler, with a simulated clock and the plans' predicted times.

Pure and quick: a request takes about 20 us, however long its execution.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cohabit.planner.shapes import Bucket
from cohabit.server.errors import RequestError
from cohabit.server.ipc.model import ModelKey
from cohabit.server.ipc.request import Request
from cohabit.server.scheduling.batching import Batch
from cohabit.server.scheduling.policy import Policy
from cohabit.server.scheduling.queues import Ticket
from cohabit.server.scheduling.scheduler import Scheduler

QUEUE_LIMIT = 8192
"""Maximum number of waiting requests per model, as in the server."""

IDLE_AFTER_S = 0.02
"""Time constant with which a server without requests becomes idle: processors sleep, and others fill the caches."""


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """A model as the scheduler sees it."""

    name: str
    predicted_s: Mapping[Bucket, float]
    """Seconds of an execution by bucket."""
    recovery_s: float = 0.0
    """Seconds lost directly after an execution of the same model, while its residents are still copied back."""
    load_s: float = 0.0
    """Seconds to copy the whole model in, before an execution that does not follow one of the same model."""
    max_rows: int = 0
    """Maximum rows of a batch; 0 executes requests alone."""
    policy: Policy = field(default_factory=Policy)

    def seconds(self, rows: int) -> float:
        """Return the time of an execution of `rows`, padded to the next planned batch."""
        batch = min((b for b in self.predicted_s if b.batch >= rows), default=max(self.predicted_s))
        return self.predicted_s[batch]


@dataclass(frozen=True, slots=True)
class Overheads:
    """Times that plans do not include, in seconds."""

    request_s: float = 0.0
    """Per request, outside a compute lane: parsing, sockets, the client."""
    idle_s: float = 0.0
    """Additional time of a request to a server that was idle for long: processes wake up, and caches are cold."""
    execution_s: float = 0.0
    """Per execution on a compute lane, besides its ops."""
    execution_factor: float = 1.0
    """Measured over predicted time of executions and copies."""

    def of_execution(self, predicted_s: float) -> float:
        """Return the seconds of an execution, given its plan's."""
        return self.execution_factor * predicted_s + self.execution_s

    def of_requests(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each request's seconds outside a compute lane, [arrivals]; the first finds an idle server."""
        idle_share = 1 - np.exp(-np.diff(times_s, prepend=-np.inf) / IDLE_AFTER_S)
        return np.asarray(self.request_s + self.idle_s * idle_share)


NO_OVERHEADS: Final = Overheads()


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run of the simulated server."""

    latencies_s: NDArray[np.float64]
    """Of each arrival, from its sending to its answer, [arrivals]; nan if refused."""
    busy: float
    """Fraction of the time that the compute lane executed."""


def simulate(
    models: Sequence[SimulatedModel],
    times_s: NDArray[np.float64],
    wanted: NDArray[np.int64],
    overheads: Overheads = NO_OVERHEADS,
) -> Simulated:
    """Serve requests sent at `times_s`, [arrivals], ascending, to the models with indices `wanted`, [arrivals]."""
    keys = [ModelKey(model.name, 1) for model in models]
    by_key = dict(zip(keys, models, strict=True))
    scheduler = Scheduler(QUEUE_LIMIT)
    for key, model in by_key.items():
        scheduler.add(key, model.predicted_s, model.policy, model.max_rows, model.recovery_s)
    latencies_s = np.full(len(times_s), math.nan)
    number_of: dict[Ticket, int] = {}
    running: Batch | None = None
    last_model: ModelKey | None = None
    ends_s = busy_s = 0.0
    wakes_s = math.inf
    """Next time to look for a delayed batch."""
    events: list[float] = []
    """Ends of executions, and times at which delayed batches may start."""

    def dispatch(now_s: float) -> None:
        nonlocal running, last_model, ends_s, busy_s, wakes_s
        batch = scheduler.next(now_s)
        scheduler.shed(now_s)
        if batch is None:
            wake_s = scheduler.wake_s(now_s)
            if wake_s < math.inf and wake_s != wakes_s:
                wakes_s = wake_s
                heapq.heappush(events, wake_s)
            return
        model = by_key[batch.model]
        # After another model, a whole copy; after the same one, the rest of its recovery.
        seconds = model_seconds(batch)
        if last_model == batch.model:
            seconds += max(0.0, overheads.execution_factor * model.recovery_s - (now_s - ends_s))
        else:
            seconds += overheads.execution_factor * model.load_s
        running, last_model, ends_s = batch, batch.model, now_s + seconds
        busy_s += seconds
        heapq.heappush(events, ends_s)

    def advance(until_s: float) -> None:
        """Process the events before the next arrival."""
        nonlocal running
        while events and events[0] <= until_s:
            now_s = heapq.heappop(events)
            if running is not None and now_s >= ends_s:
                scheduler.finished(running, now_s, model_seconds(running))
                for ticket in running.tickets:
                    latencies_s[number_of.pop(ticket)] = now_s - ticket.arrived_s
                running = None
            if running is None:
                dispatch(now_s)

    def model_seconds(batch: Batch) -> float:
        return overheads.of_execution(by_key[batch.model].seconds(batch.rows))

    # Arrivals in order: finish earlier executions, submit, and start an idle lane.
    for arrival, (now_s, which) in enumerate(zip(times_s.tolist(), wanted.tolist(), strict=True)):
        advance(now_s)
        request = Request(keys[which], {}, 1, (), arrived_s=now_s)
        try:
            number_of[scheduler.submit(now_s, request)] = arrival
        except RequestError:
            continue  # refused
        if running is None:
            dispatch(now_s)
    advance(math.inf)
    end_s = max(float(times_s[-1]) if len(times_s) else 0.0, ends_s)
    busy = busy_s / end_s if end_s else 0.0
    return Simulated(latencies_s + overheads.of_requests(times_s), busy)


def poisson(
    rates_per_s: Sequence[float], requests: int, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Draw the times of Poisson arrivals, [requests], and their models, [requests], at `rates_per_s` per model."""
    rng, total = np.random.default_rng(seed), sum(rates_per_s)
    times_s = np.cumsum(rng.exponential(1 / total, requests))
    wanted = rng.choice(len(rates_per_s), requests, p=np.array(rates_per_s) / total)
    return times_s, wanted.astype(np.int64)
