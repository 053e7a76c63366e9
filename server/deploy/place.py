"""Places models in memory: prepare, divide, place, load. Others are served meanwhile, and move one at a time."""

import asyncio
import copy
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from cohabit.planner.errors import CohabitError, InfeasibleBudget, format_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.deployment import Division
from cohabit.runtime.errors import MemoryExceeded
from cohabit.runtime.heap import keep_freed_memory
from cohabit.runtime.lowering.lower import NotCached
from cohabit.runtime.shared_region.sharing import SHARINGS
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.deploy.bundle import damaged, division_of, fitting_bundle
from cohabit.server.deploy.divide import Planner
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.memory_map import draw
from cohabit.server.deploy.model import Model, Plans, Programs
from cohabit.server.deploy.partitions import Extent, Move, ReleaseForMove, moves, packed, vacate_all
from cohabit.server.deploy.prepare import (
    OnProgress,
    TimeLeft,
    measured_profiles,
    open_backend,
    prepare,
    warn_without_packing,
)
from cohabit.server.deploy.process_memory import measure_process_memory
from cohabit.server.deploy.replan import Replanner
from cohabit.server.deploy.worker import (
    MOST_AT_START,
    MOST_PREPARING,
    WorkerProcesses,
    failure_reason,
    in_thread,
)
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.errors import RequestError
from cohabit.server.ipc.model import DeviceUse, ModelKey
from cohabit.server.repository.scan import warn_of_ignored_config
from cohabit.server.repository.sources import ModelSource

_log = logging.getLogger("cohabit.placement")

Accept = Callable[[Model], Awaitable[None]]
"""Warms a loaded model up, and serves it. Raises what keeps it from being served."""
MakeRoom = Callable[[], Awaitable[None]]
"""Frees the memory that was found for models, by moving or displacing others."""


async def _accept(model: Model) -> None:
    return


async def _no_room_needed() -> None:
    return


@dataclass(frozen=True, slots=True)
class _Deployed:
    """How a model that is loaded runs."""

    plans: Plans
    searched: bool
    programs: Programs


@dataclass(frozen=True, slots=True)
class _MemoryMap:
    """Where models are, and how they run."""

    workspace_bytes: int
    held: Mapping[str, Extent]
    models: Mapping[str, Model]
    deployed: Mapping[str, _Deployed]
    """All three by owner."""


class _NotPlaced(Exception):
    """A model could not be loaded into an arena that has others; the reason is kept elsewhere."""


class ModelPlacement:
    """The device's memory, and the models in it. All methods belong to the event loop's thread.

    The memory is taken when the first models are placed, perhaps none: the start's. A lock serializes changes of the
    memory map.
    """

    def __init__(self, config: ServeConfig, lanes: Sequence[ComputeLane], workers: WorkerProcesses) -> None:
        """Open the device, in any thread. Raises DeviceError, or ConfigError for a bundle of another machine."""
        if config.process_memory_bytes is not None:
            keep_freed_memory(0)
        self.memory = PartitionedMemory(open_backend(config), config.compute_lanes)
        warn_without_packing(config)
        self.workers = workers
        self.planner = Planner(config, workers)
        self.memory_limit = config.memory
        """For all models. With --process-memory, it is replaced by what is measured at the start."""
        self.memory_bytes = 0
        """What all models may take. If none will be loaded later, the arena has only what they do take."""
        self.is_divided_roughly = False
        """Whether the start's division was made by a rule of thumb, because none was known."""
        self._config = config
        self._bundle = None if config.bundle is None else fitting_bundle(config.bundle, config)
        self._lanes = lanes
        self._preparing = asyncio.Semaphore(MOST_PREPARING)
        self._changing = asyncio.Lock()
        self.replanner = Replanner(config, self, lanes)
        self.on_change: Callable[[Model], None] = lambda model: None
        """Called when a model has another partition or other plans."""

    @property
    def models(self) -> dict[ModelKey, Model]:
        """The last load of each version that is loaded."""
        return {model.key: model for model in self.memory.models.values()}

    @property
    def memory_map(self) -> str:
        return draw(self._config.layout, self.memory_bytes, self.memory) if self.memory.models else ""

    @property
    def changing(self) -> asyncio.Lock:
        """Held while a model's plans or places change."""
        return self._changing

    @property
    def is_open(self) -> bool:
        return self.memory.arena is not None

    def has_displaced(self, model: Model) -> bool:
        """Whether a model has no memory any more, because its successor has it."""
        return model.owner not in self.memory.models

    def use(self) -> DeviceUse:
        return self.memory.use()

    def close(self) -> None:
        """Release everything. The engine must have stopped."""
        self.workers.close()
        self.memory.close()

    async def prepare(
        self, sources: Sequence[ModelSource], on_progress: OnProgress = lambda name, stage: None
    ) -> tuple[list[Model], dict[ModelKey, str]]:
        """Return the models that can be opened from the cache, or lowered and measured, and why the others cannot.

        The caller closes their stores, or places them.
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
                    model.profiles = await in_thread(measured_profiles, model, config, workers)
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
        """Divide memory, load prepared models, and have each accepted. Returns why some are not; these are closed.

        The start places all of its models. Later, one at a time is placed; unless it is accepted, the others are where
        they were. `old` is the model that it replaces: if there is no memory for both, its requests wait, and it leaves
        the memory once the new one is accepted. Raises CohabitError; if memory is too small, with the least sufficient
        size. Then all are closed.
        """
        failures: dict[ModelKey, str] = {}
        if self.is_open and not models:
            return failures
        assert not self.is_open or len(models) == 1
        closed = models

        async def tried(model: Model, step: Coroutine[None, None, None]) -> None:
            try:
                await step
            except Exception as error:
                failures[model.key] = await self._reason(model.source, error)

        try:
            async with self._changing:
                first = not self.is_open
                memories, make_room = await self._memories(models, old, on_progress)
                for done, (model, memory) in enumerate(zip(models, memories, strict=True)):
                    stage = f"{done} of {len(models)}, {model.key.name}"
                    await tried(model, self._plan(model, memory, first, partial(on_progress, "planning", stage)))
                planned = [model for model in models if model.key not in failures]
                if first:
                    await in_thread(self._open, memories)
                elif failures:
                    return failures
                with suppress(_NotPlaced):
                    async with self._restoring_on_failure():
                        await make_room()
                        self.memory.assign_lanes(planned)
                        for model in planned:
                            model.lane = model.lane if old is None else old.lane
                            on_progress(model.key.name, "bringing residents in")
                            await tried(model, self._admit(model, accept, throttle=not first))
                        if failures and not first:
                            raise _NotPlaced
                outside_bytes = self.memory.backend.outside_bytes
                if first and outside_bytes is not None:
                    fields = {"arena_bytes": self.memory.partitions.arena_bytes, "outside_bytes": outside_bytes}
                    _log.info("device memory in the arena and outside of it", extra={"fields": fields})
        except asyncio.CancelledError:
            closed = ()  # the engine stops, and a thread may still use them
            raise
        finally:
            for model in closed:
                if model not in self.memory.models.values():
                    model.store.close()
        return failures

    async def _plan(self, model: Model, memory: Memory, first: bool, on_search: Callable[[], None]) -> None:
        """Plan a model for this memory: as is known, or quickly if that is better than to wait for a search."""
        known = await in_thread(self.planner.known_plans, model.demand, memory)
        if known is None and self._bundle is not None:
            raise NotCached(f"{model.key.name}: the bundle has no undamaged plans of it")
        if known is None:
            on_search()
        if known is None and (self._config.plans_later or not first):
            model.plans = await in_thread(self.planner.quick_plans, model.demand, memory)
            return
        model.plans = await in_thread(self.planner.best_plans, model.demand, memory) if known is None else known
        model.searched = not model.is_provisional

    async def _reason(self, source: ModelSource, error: Exception) -> str:
        """Return why a model cannot be loaded; of a bundle, with the files that are damaged."""
        reason = failure_reason(source.name, error)
        if self._bundle is not None and isinstance(error, NotCached):
            return await in_thread(damaged, self._bundle, self._config, reason)
        return reason

    async def _memories(
        self, models: Sequence[Model], old: Model | None, on_progress: OnProgress
    ) -> tuple[list[Memory], MakeRoom]:
        """Return memory for each of these models, and what frees it."""
        if len(models) == 1 and self.memory.models:
            (model,) = models
            memory = await self._free_memory(model, None)
            if memory is not None:
                return [memory], _no_room_needed
            memory = None if old is None else await self._free_memory(model, old)
            if old is not None and memory is not None:
                return [memory], partial(self._displace, old)
        return await self._divided(models, old, on_progress)

    async def _free_memory(self, model: Model, without: Model | None) -> Memory | None:
        """Return the free memory in which a model is fastest, if `without` had none; None if it fits nowhere."""
        partitions = copy.deepcopy(self.memory.partitions)
        if without is not None:
            partitions.release(without.owner)
        memory = await in_thread(self.planner.memory_for, model.demand, partitions)
        if memory is None or (self._all_resident and memory.partition_bytes < model.parameter_bytes):
            return None
        return memory

    async def _divided(
        self, models: Sequence[Model], old: Model | None, on_progress: OnProgress
    ) -> tuple[list[Memory], MakeRoom]:
        """Divide memory among these models and those that are there; the latter move if they get less.

        Returns the memory of these models, and what frees it. Raises CohabitError if memory is too small.
        """
        memory, partitions = self.memory, self.memory.partitions
        others = [model for model in memory.models.values() if model is not old]
        if self._all_resident and others:
            raise await in_thread(self._no_room_for_all, models[0], others)
        if not self.is_open:
            self.memory_bytes = await in_thread(self._measured_memory, models)
        division = await in_thread(
            self._division, others, models, partial(on_progress, "planning", "dividing the memory")
        )
        self._leave_out_batches(models, division.most_batches[len(others) :])
        workspace = division.workspace_bytes
        held = {model.owner: partitions.held[model.owner] for model in others}
        shares, own = division.partition_bytes[: len(others)], division.partition_bytes[len(others) :]
        kept = {m.owner: min(nbytes, held[m.owner].nbytes) for m, nbytes in zip(others, shares, strict=True)}
        plans = {
            model.owner: await in_thread(self._first_plans, model, Memory(workspace, kept[model.owner]))
            for model in others
            if kept[model.owner] < held[model.owner].nbytes
        }
        make_room = partial(self._resize, {m.owner: m for m in others}, kept, workspace, plans, old)
        return [Memory(workspace, nbytes) for nbytes in own], make_room

    async def redivide(self, plans: Mapping[str, tuple[Plans, bool]]) -> None:
        """Give some models, by owner, the memory that these plans are for, and move what is in the way.

        The second value is whether a full search has found them. The sizes must fit together, and another workspace is
        for plans of all models. The caller holds `changing`. Raises CohabitError; then all models are where they were.
        """
        partitions = self.memory.partitions
        memories = {owner: made[min(made)].memory for owner, (made, _) in plans.items()}
        sizes = {owner: partitions.held[owner].nbytes for owner in self.memory.models}
        sizes |= {owner: memory.partition_bytes for owner, memory in memories.items()}
        (workspace,) = {memory.workspace_bytes for memory in memories.values()}
        async with self._restoring_on_failure():
            await self._resize(dict(self.memory.models), sizes, workspace, plans)

    async def _resize(
        self,
        models: Mapping[str, Model],
        sizes: Mapping[str, int],
        workspace: int,
        plans: Mapping[str, tuple[Plans, bool]],
        old: Model | None = None,
    ) -> None:
        """Pack the partitions of models, by owner, in these sizes, with new plans for some; `old` is displaced."""
        memory, partitions = self.memory, self.memory.partitions
        held = {owner: partitions.held[owner] for owner in models}
        wanted = packed(sizes, held, partitions.arena_bytes)
        # With several lanes, all workspaces but the first move when they grow. None may be in use when it shrinks.
        elsewhere = workspace < partitions.workspace_bytes or (
            partitions.lanes > 1 and workspace > partitions.workspace_bytes
        )
        steps = vacate_all(wanted) if elsewhere else moves(held, wanted, workspace)
        moving = {step.owner for step in steps}
        programs: dict[str, Programs] = {}
        try:
            for owner, model in models.items():  # all before any moves: an unsupported plan is refused first
                if owner in moving:
                    made, _ = plans.get(owner, (model.plans, model.searched))
                    programs[owner] = await in_thread(
                        memory.bind, model, made, wanted[owner], workspace_bytes=workspace, throttle=True
                    )
            if old is not None:
                await self._displace(old)
            await self._migrate(models, steps, workspace, plans, programs)
        except Exception:
            for owner, bound in programs.items():
                if models[owner].servable.programs is not bound:
                    await self._release_programs(models[owner], bound)
            raise

    @asynccontextmanager
    async def _restoring_on_failure(self) -> AsyncIterator[None]:
        """Change the memory map in this block. If that fails, every model is again where it was, and runs as it did.

        What the block replaces is kept until its end: programs, and models that it has displaced, which then end.
        """
        before = self._memory_map()
        try:
            yield
        except Exception:
            await self._restore(before)
            raise
        for owner, model in before.models.items():
            programs = before.deployed[owner].programs
            if owner not in self.memory.partitions.held:
                await self._release_programs(model, programs)
                await self._remove(model)
            elif model.servable.programs is not programs:
                await self._release_programs(model, programs)

    def _memory_map(self) -> _MemoryMap:
        memory = self.memory
        models = dict(memory.models)
        deployed = {owner: _Deployed(m.plans, m.searched, m.servable.programs) for owner, m in models.items()}
        return _MemoryMap(memory.partitions.workspace_bytes, dict(memory.partitions.held), models, deployed)

    async def _restore(self, before: _MemoryMap) -> None:
        """Take the memory map back to what it was. The next run of each model that has moved loads its residents."""
        memory, held = self.memory, self.memory.partitions.held
        moved = {
            owner: model
            for owner, model in before.models.items()
            if held.get(owner) != before.held.get(owner)
            or model.servable.programs is not before.deployed[owner].programs
        }
        for model in moved.values():
            self._lanes[model.lane].hold(model.key, True)
        for lane, executor in zip(self._lanes, memory.executors, strict=True):
            await lane.call_on_lane(executor.settle)
        memory.partitions.workspace_bytes = before.workspace_bytes
        memory.partitions.held = dict(before.held)
        for owner, model in moved.items():
            was, replaced = before.deployed[owner], model.servable.programs
            await self._lanes[model.lane].call_on_lane(partial(self._revert, model, was.programs))
            if replaced is not was.programs:
                await self._release_programs(model, replaced)
            self._switched(model, was.plans, searched=was.searched)
            self._lanes[model.lane].hold(model.key, False)

    def _revert(self, model: Model, programs: Programs) -> None:
        """Run a model's earlier programs again. Compute lane's thread."""
        model.servable.switch(programs)
        for program in programs.values():
            self.memory.executors[model.lane].invalidate(program)

    def _division(self, others: list[Model], models: Sequence[Model], on_divided: Callable[[], None]) -> Division:
        """Return how the memory is divided among models, those that are there first. Raises InfeasibleBudget."""
        if self._bundle is not None:
            return division_of(self._bundle, [model.source for model in models])
        partitions = self.memory.partitions
        at_start = not self.is_open

        def dividing() -> None:
            self.is_divided_roughly = at_start and self._config.plans_later
            on_divided()

        return self.planner.division(
            [*(model.demand for model in others), *(model.whole_demand for model in models)],
            self.memory_bytes if at_start else partitions.arena_bytes,
            partitions.workspace_bytes if others else 0,
            dividing,
            rough=at_start and self._config.plans_later,
        )

    @staticmethod
    def _leave_out_batches(models: Sequence[Model], most_batches: Sequence[int]) -> None:
        """Have models planned up to the batches of a division, and log of which it leaves larger ones out."""
        for model, most in zip(models, most_batches, strict=bool(most_batches)):
            ModelPlacement._set_most_batch(model, most)
        if fewer := {model.key.name: model.most_batch for model in models if model.most_batch is not None}:
            _log.info(
                "largest batches run as several smaller ones: their activations would take memory that parameters need",
                extra={"fields": {"largest": fewer}},
            )

    @staticmethod
    def _set_most_batch(model: Model, most: int) -> None:
        model.most_batch = most if most < max(model.lowered.graphs).batch else None

    def _measured_memory(self, models: Sequence[Model]) -> int:
        """Return the memory for all models of the start. Raises ConfigError if --process-memory leaves too little."""
        config = self._config
        if config.process_memory_bytes is None:
            return self.memory_limit.of(sum(model.weight_bytes for model in models))
        measured = measure_process_memory(config.process_memory_bytes, models, config)
        if self._bundle is not None:
            measured.require(self._bundle.memory_bytes)
            return self._bundle.memory_bytes
        measured.require(self.planner.least_memory([model.whole_demand for model in models], measured.models_bytes))
        self.memory_limit = FixedSize(measured.models_bytes)
        return measured.models_bytes

    def _open(self, memories: Sequence[Memory]) -> None:
        """Take the arena: all memory if models may be loaded later, else what these take."""
        config, partitions = self._config, self.memory.partitions
        self.workers.release()
        workspace = memories[0].workspace_bytes if memories else 0
        taken = partitions.lanes * workspace + sum(memory.partition_bytes for memory in memories)
        only_these = config.model_control == "none" and config.has_partitions
        self.memory.open(taken if only_these else self.memory_bytes)
        partitions.grow_workspace(workspace)
        if config.layout in SHARINGS and memories:
            self.memory.share(SHARINGS[config.layout])

    @property
    def _all_resident(self) -> bool:
        return self._config.layout == "resident"

    def _no_room_for_all(self, model: Model, others: list[Model]) -> CohabitError:
        """Return the error for a model that does not fit where every parameter must be resident."""
        partitions, name = self.memory.partitions, model.key.name
        workspace = self.planner.least_workspace(model.demand, partitions.arena_bytes)
        if partitions.lanes > 1 and workspace > partitions.workspace_bytes > 0:
            return MemoryExceeded(
                f"{name}: its activations need a workspace of {format_bytes(workspace)}, each of the"
                f" {partitions.lanes} lanes has {format_bytes(partitions.workspace_bytes)}; load it at the start, or"
                " before the others"
            )
        taken = sum(partitions.held[other.owner].nbytes for other in others) + partitions.workspaces.nbytes
        return InfeasibleBudget(name, None, partitions.arena_bytes, taken + model.parameter_bytes)

    def _first_plans(self, model: Model, memory: Memory) -> tuple[Plans, bool]:
        """Return plans to begin with, and whether they are a full search's."""
        known = self.planner.known_plans(model.demand, memory)
        return known or self.planner.quick_plans(model.demand, memory), known is not None

    async def _admit(self, model: Model, accept: Accept, *, throttle: bool) -> None:
        """Load a model and have it accepted; otherwise its memory is free again, and its store open."""
        await self._load(model, throttle=throttle)
        try:
            await accept(model)
        except Exception:
            await self._release_programs(model, model.servable.programs)
            self.memory.remove(model)
            raise

    async def _load(self, model: Model, *, throttle: bool) -> None:
        """Allocate the memory of a model's plans, which is free, bind them, and load its residents."""
        memory, lane = self.memory, self._lanes[model.lane]
        model.owner = memory.new_owner(model.key)
        if memory.shared is not None:
            memory.add(model, await in_thread(memory.bind_shared, model))
            return
        wanted = model.plans[min(model.plans)].memory
        grown = memory.partitions.grow_workspace(wanted.workspace_bytes)
        extent = memory.partitions.take(model.owner, wanted.partition_bytes)
        assert grown
        assert extent is not None
        programs: Programs = {}
        try:
            programs = await in_thread(memory.bind, model, model.plans, extent, throttle=throttle)
            await lane.perform(memory.resident_load(programs, model.lane))
            memory.add(model, programs)
        except BaseException:
            await self._release_programs(model, programs)
            memory.partitions.release(model.owner)
            raise

    async def _migrate(
        self,
        models: Mapping[str, Model],
        steps: Sequence[ReleaseForMove | Move],
        workspace: int,
        plans: Mapping[str, tuple[Plans, bool]],
        programs: Mapping[str, Programs],
    ) -> None:
        """Move models, by owner, one at a time."""
        partitions = self.memory.partitions
        for step in steps:
            if isinstance(step, ReleaseForMove):
                model = models[step.owner]
                self._lanes[model.lane].hold(model.key, True)
                partitions.release(step.owner)
        if partitions.lanes > 1:  # with a single lane, background work is in order already
            for lane in sorted({models[s.owner].lane for s in steps if isinstance(s, ReleaseForMove)}):
                await self._lanes[lane].call_on_lane(self.memory.executors[lane].settle)
        partitions.grow_workspace(workspace)
        for step in steps:
            if not isinstance(step, ReleaseForMove):
                model = models[step.owner]
                partitions.put(step.owner, step.extent)
                made, searched = plans.get(step.owner, (model.plans, model.searched))
                await self._move(model, made, searched, programs[step.owner])

    async def replan(self, model: Model, plans: Plans) -> None:
        """Switch a model to a full search's plans for its present partition. The caller holds `changing`.

        Raises CohabitError; then it runs its present plans on.
        """
        extent, before = self.memory.partitions.held[model.owner], model.plans
        programs = await in_thread(self.memory.bind, model, plans, extent, throttle=True)
        async with self._restoring_on_failure():
            if plans[min(plans)].residents == before[min(before)].residents:
                await self._lanes[model.lane].call_on_lane(lambda: model.servable.switch(programs))
                self._switched(model, plans, searched=True)
            else:
                await self._move(model, plans, True, programs)

    async def _move(self, model: Model, plans: Plans, searched: bool, programs: Programs) -> None:
        """Load a model's residents for new programs while its requests wait, then switch to these programs."""
        lane = self._lanes[model.lane]
        lane.hold(model.key, True)
        await lane.call_on_lane(lambda: model.servable.switch(programs))
        await lane.perform(self.memory.resident_load(programs, model.lane))
        self._switched(model, plans, searched=searched)
        lane.hold(model.key, False)

    def _switched(self, model: Model, plans: Plans, *, searched: bool) -> None:
        model.plans, model.searched = plans, searched
        self._set_most_batch(model, max(plans).batch)
        self._lanes[model.lane].replan(model.servable)
        self.on_change(model)

    async def retire(self, model: Model, timeout_s: float) -> None:
        """End a model: wait for its requests, then release its memory. The caller refuses new requests.

        The waiting requests of one that was displaced are refused; their front ends send them to its successor.
        """
        if not self.has_displaced(model):
            await self._lanes[model.lane].finish(model.key, timeout_s)
        await self._vacate(model, forget=True)

    async def replaced(self, model: Model, timeout_s: float) -> None:
        """End a load of a version of which a newer one is served, as `retire` does."""
        lane = self._lanes[model.lane]
        if self.has_displaced(model):
            lane.hand_back(model.key)
        else:
            await lane.finish(model.key, timeout_s, older_only=True)
        await self._vacate(model, forget=False)

    async def _displace(self, model: Model) -> None:
        """Give up a model's bytes for its successor's. Its requests wait, its store and programs stay."""
        lane = self._lanes[model.lane]
        lane.hold(model.key, True)
        await lane.call_on_lane(self.memory.executors[model.lane].settle)
        self.memory.partitions.release(model.owner)

    async def _vacate(self, model: Model, forget: bool) -> None:
        """Release the bytes of a model that no request runs on; with `forget`, its lane knows it no more."""
        async with self._changing:
            if forget:
                self._lanes[model.lane].remove(model.key)
            if not self.has_displaced(model):
                await self._release_programs(model, model.servable.programs)
                await self._remove(model)

    async def _release_programs(self, model: Model, programs: Programs) -> None:
        """Release programs that no longer run, unless the lane has stopped."""
        with suppress(RequestError):
            await self._lanes[model.lane].call_on_lane(lambda: self.memory.release_programs(programs, model.lane))

    async def _remove(self, model: Model) -> None:
        """Release a model's bytes and close its store, on another thread because that takes long."""
        self.memory.remove(model)
        await in_thread(model.store.close)
