"""Places models in device memory: prepares, decides, migrates. Models in service move one at a time."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial

from cohabit.planner.memory import Memory
from cohabit.planner.profile import Profile
from cohabit.planner.shapes import Bucket
from cohabit.runtime.heap import keep_freed_memory
from cohabit.runtime.lowering.lower import NotCached
from cohabit.server.config.config import LAYOUTS, ServeConfig
from cohabit.server.deploy.bundle import damaged, fitting_bundle
from cohabit.server.deploy.decide import Decider, Resizing
from cohabit.server.deploy.divide import Planner
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.memory_map import draw
from cohabit.server.deploy.migrate import Accept, Migrator
from cohabit.server.deploy.model import Model, Plans, PlansFound, partitions_of
from cohabit.server.deploy.notices import warn_without_packing
from cohabit.server.deploy.prepare import OnProgress, TimeLeft, measured_profiles, open_backend, prepare
from cohabit.server.deploy.worker import (
    MOST_AT_START,
    MOST_PREPARING,
    WorkerProcesses,
    failure_reason,
    in_thread,
)
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.ipc.model import DeviceUse, ModelKey
from cohabit.server.repository.scan import warn_of_ignored_config
from cohabit.server.repository.sources import ModelSource

_log = logging.getLogger("cohabit.placement")


async def _accept(model: Model) -> None:
    return


class _NotPlaced(Exception):
    """Rolls back the memory map after a failed load; `failures` already has the reason."""


class ModelPlacement:
    """The device's memory, and the models in it. All methods belong to the event loop's thread.

    The first `place`, at the start, allocates the arena, even without models. A lock serializes changes of the memory
    map.
    """

    def __init__(self, config: ServeConfig, lanes: Sequence[ComputeLane], workers: WorkerProcesses) -> None:
        """Open the device; any thread. Raises DeviceError, or ConfigError for a bundle made for another machine."""
        if config.process_memory_bytes is not None:
            keep_freed_memory(0)
        self.memory = PartitionedMemory(open_backend(config), config.compute_lanes)
        warn_without_packing(config)
        self.workers = workers
        self.planner = Planner(config, workers)
        self._config = config
        self._bundle = None if config.bundle is None else fitting_bundle(config.bundle, config)
        self.decider = Decider(config, self._bundle, self.memory, self.planner)
        self.migrator = Migrator(self.memory, lanes, lambda model: self.on_change(model))
        self.on_change: Callable[[Model], None] = lambda model: None
        """Called when a model's partition or plans have changed."""
        self._lanes = lanes
        for number, lane in enumerate(lanes):
            lane.on_waiting = partial(workers.set_waiting, number)
        self._preparing = asyncio.Semaphore(MOST_PREPARING)
        self._changing = asyncio.Lock()
        """Held while a model's plans or extent change."""

    @property
    def models(self) -> dict[ModelKey, Model]:
        """The latest load of each loaded version."""
        return {model.key: model for model in self.memory.models.values()}

    @property
    def memory_map(self) -> str:
        return draw(self._config.layout, self.decider.memory_bytes, self.memory) if self.memory.models else ""

    @property
    def is_open(self) -> bool:
        return self.memory.arena is not None

    def is_displaced(self, model: Model) -> bool:
        """Whether its successor has taken over a model's memory."""
        return model.load_id not in self.memory.models

    def use(self) -> DeviceUse:
        return self.memory.use()

    def close(self) -> None:
        """Release everything. The engine must have stopped."""
        self.workers.close()
        self.memory.close()

    async def prepare(
        self, sources: Sequence[ModelSource], on_progress: OnProgress = lambda name, stage: None
    ) -> tuple[list[Model], dict[ModelKey, str]]:
        """Open models from the cache, or lower and measure them. Returns them, and each failure's reason.

        The caller places each model, or closes its store.
        """
        config, workers, failures = self._config, self.workers, dict[ModelKey, str]()
        at_start = asyncio.Semaphore(1 if workers.inline else MOST_AT_START)
        limit = self._preparing if self.is_open else at_start
        progress = TimeLeft(sources)

        async def prepared(source: ModelSource) -> Model | None:
            try:
                async with limit:
                    on_progress(source.name, f"preparing{progress.left}")
                    model = await in_thread(
                        prepare, source, config, self.memory.backend, workers, on_progress, throttle=self.is_open
                    )
                    warn_of_ignored_config(source, config.device)
            except Exception as error:
                failures[source.key] = await self._reason(source, error)
                return None
            finally:
                progress.done(source)
            return model

        found = await asyncio.gather(*map(prepared, sources))
        models = [model for model in found if model is not None]
        if not config.plans_later:
            for model in [model for model in models if model.is_provisional]:
                on_progress(model.source.name, "measuring")
                try:
                    model.profiles = await in_thread(measured_profiles, model, config, self.memory.backend, workers)
                except Exception as error:
                    failures[model.key] = await self._reason(model.source, error)
                    models.remove(model)
                    model.store.close()
        return models, failures

    async def place(
        self,
        models: Sequence[Model],
        old: Model | None = None,
        accept: Accept = _accept,
        on_progress: OnProgress = lambda name, stage: None,
    ) -> dict[ModelKey, str]:
        """Divide memory, then load and accept each prepared model. Returns failure reasons; failed models are closed.

        The start places all of its models. Later calls place one model; if it is not accepted, the others return to
        their extents. `old` is the model being replaced: if memory does not hold both, the requests of `old` wait, and
        `old` is removed once the new model is accepted. Raises CohabitError, with the least sufficient size if memory
        is too small; all of `models` are then closed.
        """
        failures: dict[ModelKey, str] = {}
        if self.is_open and not models:
            return failures
        assert not self.is_open or len(models) == 1
        closed = models

        async def recording_failure(model: Model, step: Coroutine[None, None, None]) -> None:
            try:
                await step
            except Exception as error:
                failures[model.key] = await self._reason(model.source, error)

        try:
            async with self._changing:
                # Decide: the memory of each model, and the loaded ones that must move or go.
                first = not self.is_open
                decision = await self.decider.decide(models, old, on_progress)
                # Plan before memory changes: a model without plans must not displace others.
                # The models of a family have the same plans, so that their residents have the same addresses.
                found = {key: family[0].found for key, family in partitions_of(self.memory.models.values()).items()}
                for done, model in enumerate(models):
                    if model.partition_id in found:
                        model.found = found[model.partition_id]
                        continue
                    stage, memory = (
                        f"{done} of {len(models)}, {model.key.name}",
                        decision.memories[model.partition_id],
                    )
                    await recording_failure(
                        model, self.decider.plan(model, memory, partial(on_progress, "planning", stage))
                    )
                    if model.key not in failures:
                        found[model.partition_id] = model.found
                planned = [model for model in models if model.key not in failures]
                if first:
                    await in_thread(self._open, list(decision.memories.values()))
                elif failures:
                    return failures
                # Move loaded models, then load the new ones. A failure rolls back later calls only: at the start, the
                # other models are still served.
                with suppress(_NotPlaced):
                    async with self.migrator.restoring_on_failure():
                        await self.migrator.free_memory(decision)
                        self.memory.assign_lanes(planned)
                        for model in planned:
                            model.lane = model.lane if old is None else old.lane
                            on_progress(model.key.name, "loading residents")
                            await recording_failure(model, self.migrator.load(model, accept, throttle=not first))
                        if failures and not first:
                            raise _NotPlaced
                if first:
                    await in_thread(self.decider.warn_of_process_memory)
                outside_bytes = self.memory.backend.outside_bytes
                if first and outside_bytes is not None:
                    fields = {"arena_bytes": self.memory.partitions.arena_bytes, "outside_bytes": outside_bytes}
                    _log.info("device memory in the arena and outside of it", extra={"fields": fields})
        except asyncio.CancelledError:
            closed = ()  # the engine is stopping, and a thread may still use the stores
            raise
        finally:
            for model in closed:
                if model not in self.memory.models.values():
                    model.store.close()
        return failures

    async def redivide(self, choose: Callable[[], Mapping[str, PlansFound] | None]) -> bool:
        """Resize partitions, by their ids, to the memory of chosen plans, and move others out of the way.

        `choose` is called once nothing else changes the memory map. It returns None if its choice no longer fits the
        loaded models; then nothing changes. Sizes must fit together. To change the workspace, it returns plans for all
        models. Returns whether memory was divided. Raises CohabitError; then all models are where they were.
        """
        async with self._changing:
            plans = choose()
            if not plans:
                return False
            models = partitions_of(self.memory.models.values())
            sizes = {key: self.memory.partitions.held[key].nbytes for key in models}
            sizes |= {key: found.memory.partition_bytes for key, found in plans.items()}
            (workspace,) = {found.memory.workspace_bytes for found in plans.values()}
            async with self.migrator.restoring_on_failure():
                await self.migrator.resize(Resizing(models, sizes, workspace, plans))
        return True

    async def replan(self, model: Model, before: Plans, plans: Plans, profiles: dict[Bucket, Profile]) -> bool:
        """Switch a model's family to a full search's plans for its partition, and to the profiles of these plans.

        Returns False if it was displaced or no longer runs `before`; the model itself may have been unloaded. Raises
        CohabitError; all then keep their plans and profiles.
        """
        async with self._changing:
            family = self.memory.family_of(model)
            if not family or family[0].plans is not before:
                return False
            kept = [member.profiles for member in family]
            for member in family:
                member.profiles = profiles
            try:
                await self.migrator.switch(family, plans)
            except BaseException:
                for member, earlier in zip(family, kept, strict=True):
                    member.profiles = earlier
                raise
        return True

    async def retire(self, model: Model, timeout_s: float) -> None:
        """Retire a model: wait for its requests, then release its memory. The caller refuses new requests.

        Waiting requests of a displaced model are refused; the front end resends them to its successor.
        """
        if not self.is_displaced(model):
            await self._lanes[model.lane].finish(model.key, timeout_s)
        async with self._changing:
            self._lanes[model.lane].remove(model.key)
            await self._vacate(model)

    async def retire_replaced(self, model: Model, timeout_s: float) -> None:
        """Retire a load that a newer load of the same version has replaced."""
        lane = self._lanes[model.lane]
        if self.is_displaced(model):
            lane.redirect_waiting(model.key)
        else:
            await lane.finish(model.key, timeout_s, older_only=True)
        async with self._changing:
            await self._vacate(model)

    async def _vacate(self, model: Model) -> None:
        if not self.is_displaced(model):
            await self.migrator.vacate(model)

    def _open(self, memories: Sequence[Memory]) -> None:
        """Allocate the arena: all memory if models may be loaded later, else what these need."""
        config, partitions = self._config, self.memory.partitions
        self.workers.release()
        workspace = memories[0].workspace_bytes if memories else 0
        taken = partitions.lanes * workspace + sum(memory.partition_bytes for memory in memories)
        only_these = config.model_control == "none" and config.has_partitions
        self.memory.open(taken if only_these else self.decider.memory_bytes)
        partitions.grow_workspace(workspace)
        if not config.has_partitions and memories:
            self.memory.share(LAYOUTS[config.layout])

    async def _reason(self, source: ModelSource, error: Exception) -> str:
        """Return why a model cannot be loaded, including a bundle's damaged files."""
        reason = failure_reason(source.name, error)
        if self._bundle is not None and isinstance(error, NotCached):
            return await in_thread(damaged, self._bundle, self._config, reason)
        return reason
