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
    lane: int = 0

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

    @staticmethod
    def mean_idle_share(rate_per_s: float) -> float:
        """Return the mean fraction of `idle_s` added to requests of Poisson arrivals."""
        return 1 / (1 + rate_per_s * IDLE_AFTER_S)


NO_OVERHEADS: Final = Overheads()


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run of the simulated server."""

    latencies_s: NDArray[np.float64]
    """Of each arrival, from its sending to its answer, [arrivals]; nan if refused."""
    busy: tuple[float, ...]
    """Fraction of the time that each lane executed."""
    rows_per_execution: float


class _Lane:
    """A compute lane: its scheduler, and its current execution."""

    def __init__(self) -> None:
        self.scheduler = Scheduler(QUEUE_LIMIT)
        self.running: Batch | None = None
        self.last: tuple[ModelKey, float] | None = None
        """The last executed model, and the end of its execution."""
        self.wakes_s = math.inf
        """Next time to look for a delayed batch."""
        self.busy_s = 0.0


def simulate(
    models: Sequence[SimulatedModel],
    times_s: NDArray[np.float64],
    wanted: NDArray[np.int64],
    overheads: Overheads = NO_OVERHEADS,
    lanes: int = 1,
) -> Simulated:
    """Serve requests sent at `times_s`, [arrivals], ascending, to the models with indices `wanted`, [arrivals]."""
    server = [_Lane() for _ in range(lanes)]
    keys = [ModelKey(model.name, 1) for model in models]
    by_key = dict(zip(keys, models, strict=True))
    for key, model in by_key.items():
        server[model.lane].scheduler.add(key, model.predicted_s, model.policy, model.max_rows, model.recovery_s)
    latencies_s = np.full(len(times_s), math.nan)
    number_of: dict[Ticket, int] = {}
    events: list[tuple[float, int]] = []
    """Ends of executions, and times at which delayed batches may start, with the lane's number."""
    executions = rows = 0

    def dispatch(lane: _Lane, number: int, now_s: float) -> None:
        nonlocal executions, rows
        batch = lane.scheduler.next(now_s)
        lane.scheduler.shed(now_s)
        if batch is None:
            wake_s = lane.scheduler.wake_s(now_s)
            if wake_s < math.inf and wake_s != lane.wakes_s:
                lane.wakes_s = wake_s
                heapq.heappush(events, (wake_s, number))
            return
        model = by_key[batch.model]
        # After another model, a whole copy; after the same one, the rest of its recovery.
        seconds = model_seconds(batch)
        if lane.last is not None and lane.last[0] == batch.model:
            seconds += max(0.0, overheads.execution_factor * model.recovery_s - (now_s - lane.last[1]))
        else:
            seconds += overheads.execution_factor * model.load_s
        lane.running = batch
        lane.last = (batch.model, now_s + seconds)
        lane.busy_s += seconds
        executions, rows = executions + 1, rows + batch.rows
        heapq.heappush(events, (now_s + seconds, number))

    def advance(until_s: float) -> None:
        """Process the events before the next arrival."""
        while events and events[0][0] <= until_s:
            now_s, number = heapq.heappop(events)
            lane = server[number]
            batch = lane.running
            if batch is not None and lane.last is not None and now_s >= lane.last[1]:
                lane.running = None
                lane.scheduler.finished(batch, now_s, model_seconds(batch))
                for ticket in batch.tickets:
                    latencies_s[number_of.pop(ticket)] = now_s - ticket.arrived_s
            if lane.running is None:
                dispatch(lane, number, now_s)

    def model_seconds(batch: Batch) -> float:
        return overheads.of_execution(by_key[batch.model].seconds(batch.rows))

    # Arrivals in order: finish earlier executions, submit, and start an idle lane.
    for arrival, (now_s, which) in enumerate(zip(times_s.tolist(), wanted.tolist(), strict=True)):
        advance(now_s)
        lane_number = models[which].lane
        lane = server[lane_number]
        request = Request(keys[which], {}, 1, (), arrived_s=now_s)
        try:
            number_of[lane.scheduler.submit(now_s, request)] = arrival
        except RequestError:
            continue  # refused
        if lane.running is None:
            dispatch(lane, lane_number, now_s)
    advance(math.inf)
    end_s = max([float(times_s[-1]) if len(times_s) else 0.0, *(lane.last[1] for lane in server if lane.last)])
    busy = tuple(lane.busy_s / end_s if end_s else 0.0 for lane in server)
    return Simulated(latencies_s + overheads.of_requests(times_s), busy, rows / max(executions, 1))


def poisson(
    rates_per_s: Sequence[float], requests: int, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Draw the times of Poisson arrivals, [requests], and their models, [requests], at `rates_per_s` per model."""
    rng, total = np.random.default_rng(seed), sum(rates_per_s)
    times_s = np.cumsum(rng.exponential(1 / total, requests))
    wanted = rng.choice(len(rates_per_s), requests, p=np.array(rates_per_s) / total)
    return times_s, wanted.astype(np.int64)
