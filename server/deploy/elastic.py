"""Divides memory again among served models when measured request rates justify moving them."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.shares import Curve, Point, latency_weights, share_out, weighted_latency_s
from cohabit.server.deploy.model import Model, PlansFound, partitions_of
from cohabit.server.deploy.place import ModelPlacement
from cohabit.server.deploy.replan import Replanner
from cohabit.server.deploy.worker import in_thread

_log = logging.getLogger("cohabit.elastic")

INTERVAL_S = 1.0
LEAST_WINDOW_S = 2.0
REQUESTS_PER_MODEL = 25
"""Minimum number of requests in a window, averaged over models: rates from fewer are noise."""
LEAST_GAIN = 0.1
"""Share of the predicted latency that a division must save; smaller gains are within the noise of measured rates."""

Requests = Callable[[], Mapping[str, int]]
"""Returns each served model's number of requests since it was loaded, by load id (`Model.load_id`)."""


@dataclass(slots=True)
class _Sizes:
    """Plans of a family for partitions of several sizes."""

    workspace_bytes: int
    profiles: Mapping[Bucket, Profile]
    """Profiles that the plans are for: a model with new measurements is planned again."""
    plans: dict[int, PlansFound]
    """By partition size in bytes."""

    def curve(self, model: Model) -> Curve:
        """Return predicted latency by partition size. The model's current plans replace those of the same size."""
        self.plans[model.found.memory.partition_bytes] = model.found
        return tuple(Point(nbytes, model.latency_s(found.plans)) for nbytes, found in sorted(self.plans.items()))


class Elastic:
    """Watches request rates, and divides memory again if that is predicted to save LEAST_GAIN of the latency.

    Belongs to the event loop's thread. Plans are made ahead of time, in a low-priority process.
    """

    def __init__(
        self,
        placement: ModelPlacement,
        replanner: Replanner,
        requests: Requests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.divisions = 0
        """Number of times memory was divided again."""
        self._placement = placement
        self._replanner = replanner
        self._requests = requests
        self._clock = clock
        self._sizes: dict[str, _Sizes] = {}
        """By partition id."""
        self._counted: deque[tuple[float, dict[str, int]]] = deque()
        """The window's counts: the time, and each model's number of requests until then."""
        self._first: dict[str, int] = {}
        """Each model's number of requests when first seen."""

    async def watch(self) -> None:
        """Check the rates after each interval, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            await self.check()

    async def check(self) -> None:
        """Divide memory again if the window's rates justify it. Raises CohabitError.

        New models are planned afterwards; until then they keep their partitions.
        """
        models = dict(self._placement.memory.models)
        rates_per_s = self._rates_per_s()
        if rates_per_s is None or rates_per_s.keys() != models.keys():
            return
        families = {key: family[0] for key, family in partitions_of(models.values()).items()}
        unplanned = self._unplanned(families)
        if len(unplanned) == len(families):
            await self._plan(unplanned)
            unplanned = {}
        if self._sizes and self._placement.memory.models == models:
            await self._divide(models, rates_per_s)
        await self._plan(unplanned)

    async def _divide(self, loaded: Mapping[str, Model], rates_of: Mapping[str, float]) -> None:
        """Divide memory again among planned families if that saves enough. The others keep their sizes.

        `loaded` has the models, and `rates_of` their requests per second, by load id.
        """
        placement, partitioned = self._placement, partitions_of(loaded.values())
        models = {key: family[0] for key, family in partitioned.items()}
        rates_per_s = {key: sum(rates_of[model.load_id] for model in family) for key, family in partitioned.items()}
        partitions = placement.memory.partitions
        memory_bytes = partitions.arena_bytes - partitions.workspaces.nbytes
        workspace_bytes = partitions.workspace_bytes
        sizes = {
            key: self._sizes.get(key) or _Sizes(workspace_bytes, model.profiles, {})
            for key, model in models.items()
        }
        chosen, gain = await in_thread(_share_out, models, sizes, rates_per_s, memory_bytes)
        if gain < LEAST_GAIN:
            return
        changed: dict[str, PlansFound] = {}

        def choose() -> dict[str, PlansFound] | None:
            if placement.memory.models != loaded or workspace_bytes != partitions.workspace_bytes:
                return None  # models were loaded, unloaded or moved meanwhile
            for key, size in chosen.items():
                if size != partitions.held[key].nbytes:
                    changed[key] = sizes[key].plans[size]
            return changed

        start_s = self._clock()
        if not await placement.redivide(choose):
            return
        scale = sum(model.rate_per_s for model in loaded.values()) / sum(rates_of.values())
        for load_id, model in loaded.items():  # models that are loaded later are compared with these rates
            model.rate_per_s = rates_of[load_id] * scale
        self.divisions += 1
        self._counted.clear()
        fields = {
            "models": [model.key.name for key in changed for model in partitioned[key]],
            "predicted_gain": round(gain, 2),
            "seconds": round(self._clock() - start_s, 2),
        }
        _log.info("memory was divided again by measured request rates", extra={"fields": fields})
        now = partitions_of(placement.memory.models.values())
        self._replanner.begin([now[key][0] for key in changed if key in now])

    def _rates_per_s(self) -> dict[str, float] | None:
        """Return each model's requests per second in the shortest sufficient window; None if there is none yet."""
        counts = dict(self._requests())
        self._first = {load_id: self._first.get(load_id, count) for load_id, count in counts.items()}
        self._counted.append((self._clock(), counts))

        def before_of(counted: Mapping[str, int], load_id: str) -> int:
            return counted.get(load_id, self._first[load_id])

        now_s = self._counted[-1][0]

        def is_enough(begin: tuple[float, dict[str, int]]) -> bool:
            requests = sum(count - before_of(begin[1], load_id) for load_id, count in counts.items())
            partitions = len(self._placement.memory.partitions.held)
            return now_s - begin[0] >= LEAST_WINDOW_S and requests >= REQUESTS_PER_MODEL * partitions

        while len(self._counted) > 1 and is_enough(self._counted[1]):
            self._counted.popleft()
        begin_s, before = begin = self._counted[0]
        if not counts or not is_enough(begin):
            return None
        # Add one request each: a model without requests in this window may get some in the next.
        return {
            load_id: (count - before_of(before, load_id) + 1) / (now_s - begin_s)
            for load_id, count in counts.items()
        }

    def _unplanned(self, models: Mapping[str, Model]) -> dict[str, Model]:
        """Return the families without plans for several sizes, and forget unloaded ones."""
        workspace_bytes = self._placement.memory.partitions.workspace_bytes
        self._sizes = {
            key: sizes
            for key, sizes in self._sizes.items()
            if key in models and (sizes.workspace_bytes, sizes.profiles) == (workspace_bytes, models[key].profiles)
        }
        return {key: model for key, model in models.items() if key not in self._sizes}

    async def _plan(self, models: Mapping[str, Model]) -> None:
        """Plan models for several sizes. Stops while the replanner is busy, because profiles may still change."""
        workspace_bytes = self._placement.memory.partitions.workspace_bytes
        for key, model in models.items():
            if self._replanner.is_busy:
                return
            made = await in_thread(self._placement.planner.first_plans_by_size, model.demand, workspace_bytes)
            found = [PlansFound(plans, searched=searched) for plans, searched in made]
            by_size = {plans.memory.partition_bytes: plans for plans in found}
            self._sizes[key] = _Sizes(workspace_bytes, model.profiles, by_size)


def _share_out(
    models: Mapping[str, Model], sizes: Mapping[str, _Sizes], rates_per_s: Mapping[str, float], memory_bytes: int
) -> tuple[dict[str, int], float]:
    """Return the best partition sizes, by partition id, and the share of the predicted latency that they save."""
    curves = [sizes[key].curve(model) for key, model in models.items()]
    compute_s = [model.profiles[min(model.profiles)].compute_s for model in models.values()]
    weights = latency_weights([rates_per_s[key] for key in models], compute_s)
    now = [Point(model.found.memory.partition_bytes, model.latency_s(model.plans)) for model in models.values()]
    chosen = share_out(curves, weights, memory_bytes)
    gain = 1 - weighted_latency_s(chosen, weights) / weighted_latency_s(now, weights)
    return {key: point.partition_bytes for key, point in zip(models, chosen, strict=True)}, gain
