"""Capacity planning: which models fit into how much memory, and their simulated latencies. Needs no server."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cohabit.planner.errors import InfeasibleBudget, format_bytes
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.division import divide
from cohabit.planner.sizing.fitting import plan_model
from cohabit.planner.sizing.problem import Division, LayoutName, ModelDemand
from cohabit.server.capacity.simulation import NO_OVERHEADS, Overheads, SimulatedModel, poisson, simulate
from cohabit.server.errors import ConfigError
from cohabit.server.scheduling.policy import Policy

REQUESTS: Final = 20_000
"""Requests simulated for each figure: 200 of them are above p99."""
SATURATED_BUSY: Final = 0.98
"""Busy fraction above which a lane's queue grows without limit: latencies then depend on the simulated time."""
_STEPS = 10
"""Number of memory sizes of a curve, from the minimum to that of all-resident models."""
_RATE_PRECISION = 0.02
_RAM_BYTES, _RAM_COPIES = 256 << 20, 5
_LEAST_SHARE = 1e-3
"""Fraction of the rate at which a lane is always busy: hardly any request meets another."""


@dataclass(frozen=True)
class Candidate:
    """A model that may be served: the planner's input, and the scheduling of its requests."""

    demand: ModelDemand
    weight_bytes: int
    """Includes tables that stay in host memory."""
    max_rows: int = 0
    policy: Policy = field(default_factory=Policy)


class ModelFit(msgspec.Struct, frozen=True):
    """A model's part of a fit. Times in seconds, from the sending of a request to its answer."""

    name: str
    rate_per_s: float
    partition_bytes: int
    resident_s: float
    """Of an execution at batch 1 with all weights in memory."""
    latency_s: float
    """Of an execution at batch 1 by its plan."""
    p50_s: float
    p99_s: float


class Fit(msgspec.Struct, frozen=True):
    """Simulated results of serving some models in some memory."""

    layout: LayoutName
    memory_bytes: int
    workspace_bytes: int
    rate_per_s: float
    p50_s: float
    p99_s: float
    mean_s: float
    busy: float
    """Fraction of the time that the busiest lane executes."""
    refused: float
    """Fraction of the requests."""
    models: tuple[ModelFit, ...]

    @property
    def is_saturated(self) -> bool:
        return self.busy >= SATURATED_BUSY

    def meets(self, slo_s: float) -> bool:
        return self.p99_s <= slo_s and self.refused == 0.0 and not self.is_saturated


class HighestRate(msgspec.Struct, frozen=True):
    """The highest total rate that meets an SLO in some memory; 0 if none does."""

    memory_bytes: int
    rate_per_s: float


@dataclass(frozen=True)
class _PlannedModels:
    """A division of memory, and the models with their plans for it."""

    division: Division
    models: list[SimulatedModel]


class Capacity:
    """Fits some models into memory, with quick plans, or with those that a full search has stored in a library."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        layout: LayoutName,
        *,
        overheads: Overheads = NO_OVERHEADS,
        library: Library | None = None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.candidates = candidates
        self.layout: LayoutName = layout
        self._overheads, self._library, self._on_progress = overheads, library, on_progress
        self._plans: dict[int, _PlannedModels] = {}
        """By memory in bytes."""

    @property
    def least_bytes(self) -> int:
        """The minimum memory in which all models can be served, however slowly."""
        try:
            return divide(self._demands, 1, self.layout).memory_bytes
        except InfeasibleBudget as error:
            return error.least_bytes

    @property
    def most_bytes(self) -> int:
        """The memory in which all weights stay."""
        try:
            return divide(self._demands, 1, "resident").memory_bytes
        except InfeasibleBudget as error:
            return error.least_bytes

    def fit(self, memory_bytes: int, rates_per_s: Sequence[float], requests: int = REQUESTS) -> Fit:
        """Simulate the models in this memory at these rates. Raises InfeasibleBudget with the minimum memory."""
        planned = self._plans_in(memory_bytes)
        times_s, wanted = poisson(rates_per_s, requests)
        simulated = simulate(planned.models, times_s, wanted, self._overheads)
        fits = []
        for number, (candidate, model) in enumerate(zip(self.candidates, planned.models, strict=True)):
            smallest = min(model.predicted_s)
            p50_s, p99_s = _percentiles(simulated.latencies_s[wanted == number])
            fits.append(
                ModelFit(
                    name=model.name,
                    rate_per_s=rates_per_s[number],
                    partition_bytes=planned.division.partition_bytes[number],
                    resident_s=candidate.demand.profiles[smallest].compute_s,
                    latency_s=model.predicted_s[smallest] + model.load_s,
                    p50_s=p50_s,
                    p99_s=p99_s,
                )
            )
        p50_s, p99_s = _percentiles(simulated.latencies_s)
        return Fit(
            layout=self.layout,
            memory_bytes=memory_bytes,
            workspace_bytes=planned.division.workspace_bytes,
            rate_per_s=sum(rates_per_s),
            p50_s=p50_s,
            p99_s=p99_s,
            mean_s=float(np.nanmean(simulated.latencies_s)),
            busy=simulated.busy,
            refused=float(np.isnan(simulated.latencies_s).mean()),
            models=tuple(fits),
        )

    def curve(self, rates_per_s: Sequence[float]) -> list[Fit]:
        """Return fits over memory sizes from the minimum to that of all-resident models."""
        least, most = self.least_bytes, max(self.most_bytes, self.least_bytes)
        sizes = np.geomspace(least, most, _STEPS) if most > least else np.array([least])
        return [self.fit(math.ceil(size), rates_per_s) for size in sizes]

    def least_memory(self, fits: Sequence[Fit], slo_s: float) -> Fit | None:
        """Return the smallest of some fits that meets an SLO."""
        return next((fit for fit in sorted(fits, key=lambda f: f.memory_bytes) if fit.meets(slo_s)), None)

    def highest_rate(self, memory_bytes: int, rates_per_s: Sequence[float], slo_s: float) -> HighestRate:
        """Search the highest total rate, in the proportions of `rates_per_s`, that meets an SLO."""
        total = sum(rates_per_s)

        def meets(factor: float) -> bool:
            self._on_progress(f"at {factor * total:.3g} requests/s")
            return self.fit(memory_bytes, [rate * factor for rate in rates_per_s]).meets(slo_s)

        # Upper bound: the lane is always busy, with the batches that take the least time per row.
        models = self._plans_in(memory_bytes).models
        least_s = [min(seconds / bucket.batch for bucket, seconds in m.predicted_s.items()) for m in models]
        high = 1.0 / sum(rate * seconds for rate, seconds in zip(rates_per_s, least_s, strict=True))
        low = _LEAST_SHARE * high
        if not meets(low):
            return HighestRate(memory_bytes, 0.0)  # even requests that meet no other are too slow
        while high - low > _RATE_PRECISION * high:
            middle = (low + high) / 2
            low, high = (middle, high) if meets(middle) else (low, middle)
        return HighestRate(memory_bytes, low * total)

    @property
    def _demands(self) -> list[ModelDemand]:
        return [candidate.demand for candidate in self.candidates]

    def _plans_in(self, memory_bytes: int) -> _PlannedModels:
        """Divide memory and plan every model."""
        if memory_bytes not in self._plans:
            division = divide(self._demands, memory_bytes, self.layout)
            models = []
            for candidate, memory in zip(self.candidates, division.memories, strict=True):
                self._on_progress(f"planning {candidate.demand.name} in {format_bytes(memory_bytes)}")
                models.append(self._simulated_model(candidate, memory))
            self._plans[memory_bytes] = _PlannedModels(division, models)
        return self._plans[memory_bytes]

    def _simulated_model(self, candidate: Candidate, memory: Memory) -> SimulatedModel:
        demand = candidate.demand
        if self.layout == "time_shared":  # a whole model is copied in before it runs
            profile = demand.profiles[min(demand.profiles)]
            link = profile.swap_in
            if profile.window_bytes:  # copies of the profile's link stay in the processor's cache
                link = msgspec.structs.replace(link, bandwidth_bytes_per_s=_ram_bandwidth_bytes_per_s())
            graph = demand.graphs[min(demand.graphs)]
            copies = [link.seconds(t.nbytes) for t in graph.tensors if t.kind == "parameter"]
            times = {bucket: profile.compute_s for bucket, profile in demand.profiles.items()}
            return SimulatedModel(
                demand.name, times, load_s=sum(copies), max_rows=candidate.max_rows, policy=candidate.policy
            )
        known = None if self._library is None else self._library.plans(demand, memory, "best")
        plans = known or plan_model(demand, memory, quick=True)
        predicted_s: dict[Bucket, float] = {}
        recovery_s = 0.0
        for bucket, plan in plans.items():
            assert plan.provenance is not None
            predicted_s[bucket] = plan.provenance.latency_s
            if bucket == min(plans):
                recovery_s = max(plan.provenance.period_s - plan.provenance.latency_s, 0.0)
        return SimulatedModel(demand.name, predicted_s, recovery_s, 0.0, candidate.max_rows, candidate.policy)


def shared_out(total_per_s: float, names: Sequence[str], given: Mapping[str, float]) -> list[float]:
    """Return a rate per model: the given ones, and equal parts of the rest of the total for the others.

    Raises ConfigError if nothing is left for a model, or the given rates exceed the total.
    """
    left = total_per_s - sum(given.get(name, 0.0) for name in names)
    missing = [name for name in names if name not in given]
    if missing and left <= 0:
        raise ConfigError(
            f"--rates: nothing is left of --rate {total_per_s:g} for {', '.join(missing)}; give them a rate, or more"
            " --rate"
        )
    if not missing and abs(left) > 1e-9 * total_per_s:
        raise ConfigError(
            f"--rates: the models have {total_per_s - left:g} requests per second, --rate says {total_per_s:g}; leave"
            " it out"
        )
    return [given[name] if name in given else left / len(missing) for name in names]


@cache
def _ram_bandwidth_bytes_per_s() -> float:
    """Return the bandwidth of copies in RAM that are too large for the processor's cache."""
    copied = np.ones(_RAM_BYTES, np.uint8)
    target = np.empty_like(copied)
    seconds = []
    for _ in range(_RAM_COPIES):
        start_s = time.thread_time()  # excludes other processes on a busy machine
        np.copyto(target, copied)
        seconds.append(time.thread_time() - start_s)
    return _RAM_BYTES / float(np.median(seconds))


def _percentiles(latencies_s: NDArray[np.float64]) -> tuple[float, float]:
    answered = latencies_s[~np.isnan(latencies_s)]
    if not len(answered):
        return math.inf, math.inf
    p50_s, p99_s = np.percentile(answered, (50, 99))
    return float(p50_s), float(p99_s)
