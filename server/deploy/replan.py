"""Finds better plans for served models: measures and plans them, and measures doubtful profiles again."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from cohabit.planner.errors import CohabitError
from cohabit.planner.plan import Plan
from cohabit.planner.profile import NOISY
from cohabit.planner.shapes import Bucket
from cohabit.planner.sizing.shares import latency_weights
from cohabit.server.background import Background
from cohabit.server.config.config import ServeConfig
from cohabit.server.deploy.model import Model, Plans, PlansFound, demand_of, partitions_of, weight_bytes
from cohabit.server.deploy.notices import warn_of_noise
from cohabit.server.deploy.place import ModelPlacement
from cohabit.server.deploy.prepare import measured_profiles
from cohabit.server.deploy.worker import in_thread
from cohabit.server.engine.compute_lane import ComputeLane

_log = logging.getLogger("cohabit.profiles")

IDLE_S = 10.0
"""Interval that must be quiet before partition sizes are planned."""
INTERVAL_S = 60.0
"""Interval that must be quiet before doubtful profiles are measured again."""
IDLE_SHARE = 0.1
"""Maximum fraction of a quiet interval that lanes compute."""
DISAGREEING = 1.25
"""Ratio of measured to predicted time, or its reciprocal, above which a profile is measured again."""
LEAST_GAIN = 0.1
"""Share of the predicted latency that a new division must save to be used now; the next start always uses it."""


class Replanner:
    """Belongs to the event loop's thread. Each load of a model is measured again at most once."""

    def __init__(self, config: ServeConfig, placement: ModelPlacement, lanes: Sequence[ComputeLane]) -> None:
        self._config = config
        self._placement = placement
        self._lanes = lanes
        self._background = Background()
        self._climbing = Background()
        self._climbs = asyncio.Lock()
        self._measured_again: set[str] = set()
        """Partition ids (`Model.partition_id`)."""

    @property
    def is_busy(self) -> bool:
        return self._background.is_busy

    @property
    def measures_again(self) -> bool:
        """Whether doubtful profiles are measured again while the server is quiet."""
        return self._config.plans_later and self._config.device == "cpu"

    def begin(self, models: Sequence[Model], *, plan_next_start: bool = False) -> None:
        """Improve models with quick plans in the background, one after the other.

        With `plan_next_start`, the next start of these models is planned after that. Every partition size is planned
        once the server is quiet. One model of each family stands for all.
        """
        models = [family[0] for family in partitions_of(models).values()]
        quick = [model.key.name for model in models if not model.searched]
        if quick or (plan_next_start and self._placement.decider.is_divided_roughly):
            if quick and plan_next_start:
                _log.info("quick plans are in use until better ones are found", extra={"fields": {"models": quick}})
            self._background.keep("searching better plans", partial(self._improve_all, models, plan_next_start))
        else:
            warn_of_noise(models, measured_again=self.measures_again)
            self._begin_ladders(models)

    def _begin_ladders(self, models: Sequence[Model]) -> None:
        """Plan every partition size while the server is quiet, unless plans are made before the start."""
        if self._config.plans_later and not self._config.is_trial:
            self._climbing.keep("planning every partition size", partial(self._climb_all, models))

    async def _climb_all(self, models: Sequence[Model]) -> None:
        """Plan the ladder of each model, then its current size from the rungs next to it."""
        async with self._climbs:
            for model in models:
                await self._climb(model)
            fields = {"models": [model.key.name for model in models]}
            _log.info("every partition size is planned", extra={"fields": fields})
            await in_thread(self._placement.workers.release)

    async def _climb(self, model: Model) -> None:
        """Plan a model's ladder and its current size. Logs a CohabitError.

        Each rung is a search of its own, so that the searches for models that are loaded meanwhile come between.
        """
        placement = self._placement
        await self._until_idle()
        family = placement.memory.family_of(model)
        if not family or family[0].is_provisional:
            return
        model = family[0]
        begun, demand = model.found, model.demand
        try:
            while not await in_thread(placement.planner.climb, demand, begun.memory.workspace_bytes):
                if self.is_busy:
                    await self._until_idle()
            plans = await in_thread(placement.planner.best_plans, demand, begun.memory)
            if _is_better(plans, begun.plans):
                await placement.replan(model, begun.plans, plans, model.profiles)
        except CohabitError as error:
            fields = {**model.key.fields, "reason": str(error)}
            _log.warning("not every partition size is planned", extra={"fields": fields})

    async def _until_idle(self) -> None:
        """Wait for a quiet interval after which no other search is in progress."""
        while not await self._is_quiet(IDLE_S) or self.is_busy:
            pass

    async def _is_quiet(self, interval_s: float) -> bool:
        """Wait for an interval. Returns whether the lanes have computed for at most IDLE_SHARE of it."""
        before_s = self._computed_s
        await asyncio.sleep(interval_s)
        return self._computed_s - before_s <= IDLE_SHARE * interval_s

    @property
    def _computed_s(self) -> float:
        """Total time that the lanes have computed."""
        return sum(lane.device.computed_s for lane in self._lanes)

    async def close(self) -> None:
        """Cancel pending searches; models stay as they are."""
        await self._background.close()
        await self._climbing.close()

    async def watch(self) -> None:
        """Check profiles after each interval in which little was computed, until cancelled."""
        while True:
            if await self._is_quiet(INTERVAL_S):
                await self.check()

    async def check(self) -> None:
        """Measure and plan models again if their profiles are noisy or disagree with their executions.

        A busy start makes such profiles.
        """
        families = partitions_of(self._placement.memory.models.values())
        self._measured_again &= families.keys()
        found = (next(filter(self._is_doubtful, family), None) for family in families.values())
        doubtful = [model for model in found if model is not None]
        if doubtful:
            fields = {"models": [model.key.name for model in doubtful]}
            _log.info("profiles are in doubt, and are measured again", extra={"fields": fields})
        for model in doubtful:
            await self.improve(model, again=True)
            self._measured_again.add(model.partition_id)
        if doubtful:
            await in_thread(self._placement.workers.release)

    def _is_doubtful(self, model: Model) -> bool:
        if model.partition_id in self._measured_again or model.is_provisional:
            return False
        correction = self._lanes[model.lane].correction(model.key)
        return model.noise > NOISY or not 1 / DISAGREEING <= correction <= DISAGREEING

    async def _improve_all(self, models: Sequence[Model], plan_next_start: bool) -> None:
        """Improve all models, then raise the last OSError. The next try skips improved models."""
        failed: OSError | None = None
        for model in models:
            try:
                await self.improve(model)
            except OSError as error:  # for example, no process can be started
                failed = error
        if failed is not None:
            raise failed
        warn_of_noise(models, measured_again=self.measures_again)
        if not plan_next_start:
            self._begin_ladders(models)
            return
        if not any(model.is_provisional for model in models):
            try:
                await self._plan_next_start(models)
            except CohabitError as error:
                _log.warning("the next start is not planned", extra={"fields": {"reason": str(error)}})
            _log.info("every model has been measured and planned")
        self._begin_ladders(models)
        await in_thread(self._placement.workers.release)

    async def _plan_next_start(self, models: Sequence[Model]) -> None:
        """Store the plans for the next start of these models, then the division. Raises CohabitError.

        Until then, a start has the division and the plans in use now.

        They are used from now on, too, if that is predicted to save LEAST_GAIN of the latency.
        """
        loaded = partitions_of(self._placement.memory.models.values())
        families = [loaded[model.partition_id] for model in models if model.partition_id in loaded]
        planner, demands = self._placement.planner, [demand_of(family, whole=True) for family in families]
        every = [model for family in families for model in family]
        memory_bytes = self._placement.decider.memory_limit.of(weight_bytes(every))
        division = await in_thread(planner.division, demands, memory_bytes, low_priority=True, keep=False)
        found: dict[str, PlansFound] = {}
        for family, demand, memory, most in zip(
            families, demands, division.memories, division.most_batches, strict=True
        ):
            plans = await in_thread(planner.best_plans, demand.up_to(most), memory)
            found[family[0].partition_id] = PlansFound(plans, searched=True)
        await in_thread(planner.keep_division, demands, memory_bytes, division)
        await self._redivide(found)

    async def _redivide(self, found: Mapping[str, PlansFound]) -> None:
        """Divide memory for these plans, by partition id, if that saves enough and partitions are still the same."""
        memory = self._placement.memory
        gain = 0.0

        def chosen() -> Mapping[str, PlansFound] | None:
            nonlocal gain
            families, partitions = partitions_of(memory.models.values()), memory.partitions
            if families.keys() != found.keys() or not families:
                return None
            memories = [plans.memory for plans in found.values()]
            needed = partitions.lanes * memories[0].workspace_bytes + sum(m.partition_bytes for m in memories)
            gain = _gain(list(families.values()), [found[key].plans for key in families])
            if needed > partitions.arena_bytes or gain < LEAST_GAIN:
                return None
            return found

        if await self._placement.redivide(chosen):
            _log.info("memory is divided better", extra={"fields": {"predicted_gain": round(gain, 2)}})

    async def improve(self, model: Model, *, again: bool = False) -> None:
        """Measure and plan a model if needed, or always with `again`, while it is served. Logs a CohabitError."""
        try:
            await self._improve(model, again=again)
        except CohabitError as error:
            fields = {**model.key.fields, "reason": str(error)}
            _log.warning("no better plan was found", extra={"fields": fields})

    async def _improve(self, model: Model, *, again: bool) -> None:
        """Search better plans for a model's current partition, and switch to them between two executions.

        After a measurement, the new plans always replace the old ones. If the model was unloaded, another one of its
        family takes its place. Raises CohabitError.
        """
        placement = self._placement
        model = next(iter(placement.memory.family_of(model)), model)
        profiles = model.profiles
        if again or model.is_provisional:
            backend, workers = placement.memory.backend, placement.workers
            profiles = await in_thread(measured_profiles, model, self._config, backend, workers, again=again)
        elif model.searched:
            return
        begun, demand = model.found, replace(model.demand, profiles=profiles)
        plans = await in_thread(placement.planner.best_plans, demand, begun.memory)
        if profiles is model.profiles and not _is_better(plans, begun.plans):
            for member in placement.memory.family_of(model):
                if member.plans is begun.plans:
                    member.found = PlansFound(begun.plans, searched=True)
        elif await placement.replan(model, begun.plans, plans, profiles):
            _log.info("better plans are in use", extra={"fields": model.key.fields})


def _gain(families: Sequence[Sequence[Model]], plans: Sequence[Plans]) -> float:
    """Return the share of the weighted latency that `plans` are predicted to save."""
    models = [family[0] for family in families]
    compute_s = [model.profiles[min(model.profiles)].compute_s for model in models]
    weights = latency_weights([demand_of(family).rate_per_s for family in families], compute_s)
    now, then = (
        sum(weight * model.latency_s(made) for weight, model, made in zip(weights, models, used, strict=True))
        for used in ([model.plans for model in models], plans)
    )
    return 1 - then / now if now else 0.0


def _is_better(plans: Mapping[Bucket, Plan], than: Mapping[Bucket, Plan]) -> bool:
    """Whether `plans` have a lower predicted latency than `than` in any bucket."""
    pairs = [(plans[bucket].provenance, than[bucket].provenance) for bucket in plans]
    return any(new is not None and old is not None and new.latency_s < old.latency_s for new, old in pairs)
