"""Places models in memory while others are served, and moves those one at a time to make room."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from cohabit.planner.errors import CohabitError, InfeasibleBudget, format_bytes
from cohabit.planner.memory import Memory
from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import MemoryExceeded
from cohabit.server.engine.compute_lanes import ComputeLanes
from cohabit.server.errors import RequestError
from cohabit.server.models import planning
from cohabit.server.models.known_models import Plans
from cohabit.server.models.prepared import Prepared, warn_of_noise
from cohabit.server.models.preparer import ModelPreparer, is_better
from cohabit.server.placement.device_memory import PartitionedMemory, PlacedModel, Programs
from cohabit.server.placement.moves import Move, ReleaseForMove, moves, packed, vacate_all
from cohabit.server.placement.partitions import Extent

if TYPE_CHECKING:
    from cohabit.server.placement.lifecycle import Lifecycle

_log = logging.getLogger("cohabit.placement")

StopOld = Callable[[PlacedModel], Awaitable[None]]
"""Stops serving a placed model whose memory is needed for the one that replaces it."""


class ModelPlacement:
    """All methods belong to the event loop's thread. A lock serializes changes of the memory map."""

    def __init__(self, memory: PartitionedMemory, preparer: ModelPreparer, all_resident: bool) -> None:
        self.memory = memory
        self.preparer = preparer
        self._all_resident = all_resident
        """Whether every parameter must be resident."""
        self._places = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, lanes: ComputeLanes, lifecycle: "Lifecycle") -> None:
        """Begin, and improve the plans of the models that are placed, where they are quick ones.

        `lifecycle` is told of the models that are moved to make room for others.
        """
        self._lanes = lanes
        self._lifecycle = lifecycle
        placed_models = list(self.memory.placed_models.values())
        quick = [
            placed.key.name for placed in placed_models if not self.preparer.is_best(placed.prepared, placed.plans)
        ]
        if quick:
            _log.info("quick plans are in use until better ones are found", extra={"fields": {"models": quick}})
            self._start(self._improve_all(placed_models))

    async def close(self) -> None:
        """Cancel pending searches; models stay as they are."""
        self.preparer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def place(self, prepared: Prepared, old: PlacedModel | None, stop_old: StopOld) -> PlacedModel:
        """Place and load a model. Raises CohabitError; if memory is too small, with the least sufficient size."""
        async with self._places:
            room = await self._room(prepared, None)
            if room is None and old is not None:
                room = await self._room(prepared, old)
                if room is not None:
                    await self._vacate_old(old, stop_old)
            if room is None:
                room = await self._make_room(prepared, old, stop_old)
            plans = await asyncio.to_thread(self.preparer.quick_plans, prepared, room)
            lane = self.memory.least_busy_lane() if old is None else old.lane
            placed = await self._install(prepared, room, plans, lane)
        self._start(self.improve(placed))
        return placed

    async def retire(self, placed: PlacedModel, timeout_s: float) -> None:
        """Wait for a model's requests, then release its memory. The caller refuses new requests."""
        await self._lanes[placed.lane].finish(placed.key, timeout_s)
        async with self._places:
            await self._vacate(placed, forget=True)

    async def release(self, placed: PlacedModel) -> None:
        """Release the memory of a replaced load whose requests are answered."""
        async with self._places:
            await self._vacate(placed, forget=False)

    async def _room(self, prepared: Prepared, without: PlacedModel | None) -> Memory | None:
        owner = None if without is None else without.owner
        room = await asyncio.to_thread(self._cached_room, prepared, owner)
        if room is None or (self._all_resident and room.partition_bytes < prepared.parameter_bytes):
            return None
        return room

    def _cached_room(self, prepared: Prepared, without: str | None) -> Memory | None:
        """Return the best room for a model in free memory, cached by that; None if it does not fit.

        The bytes of the owner `without` count as free. The caller holds the lock.
        """
        partitions, rooms = self.memory.partitions, prepared.known.rooms
        held = tuple(sorted(extent for owner, extent in partitions.held.items() if owner != without))
        free = (partitions.workspace_bytes if held else 0, held)
        if free not in rooms:
            workspaces = self.preparer.workspaces(prepared, partitions.arena_bytes)
            within = self.memory.rooms(workspaces, without)
            rooms[free] = self.preparer.quick_planners.call(planning.fit, prepared.demand, within)
        return rooms[free]

    async def _install(self, prepared: Prepared, room: Memory, plans: Plans, lane: int) -> PlacedModel:
        """Allocate a room that is free, and load a model into it."""
        memory = self.memory
        owner = memory.new_owner(prepared.source.key)
        grown = memory.partitions.grow_workspace(room.workspace_bytes)
        extent = memory.partitions.take(owner, room.partition_bytes)
        assert grown
        assert extent is not None
        programs: Programs = {}
        try:
            programs = await asyncio.to_thread(memory.bind, owner, prepared, plans, extent, lane, yields=True)
            await self._lanes[lane].perform(memory.resident_load(programs, lane))
            return memory.add(owner, prepared, plans, programs, lane)
        except BaseException:
            await self._release_later(lane, programs)
            memory.partitions.release(owner)
            raise

    async def _vacate_old(self, old: PlacedModel, stop_old: StopOld) -> None:
        await stop_old(old)
        await self._vacate(old, forget=True)

    async def _vacate(self, placed: PlacedModel, forget: bool) -> None:
        """Release a model's bytes once its copies have ended."""
        if placed.owner not in self.memory.placed_models:
            return
        if forget:
            self._lanes.remove(placed.key)
        await self._lanes[placed.lane].call_on_lane(
            lambda: self._release_programs(placed.lane, placed.servable.programs)
        )
        await self._remove(placed)

    def _release_programs(self, lane: int, programs: Mapping[Bucket, Program]) -> None:
        """Wait for the lane's copies, and release the programs. Lane's thread."""
        executor = self.memory.executors[lane]
        executor.settle()
        for program in programs.values():
            executor.release(program)

    async def _remove(self, placed: PlacedModel) -> None:
        """Release a model's bytes and close its store, on another thread because that takes long."""
        self.memory.remove(placed.owner)
        await asyncio.to_thread(placed.prepared.store.close)

    async def _make_room(self, prepared: Prepared, old: PlacedModel | None, stop_old: StopOld) -> Memory:
        """Divide memory again, and move the models that get less. Raises CohabitError if memory is too small."""
        memory = self.memory
        others = [placed for placed in memory.placed_models.values() if placed is not old]
        if self._all_resident:
            raise await asyncio.to_thread(self._no_room_for_all, prepared, others)
        division = await asyncio.to_thread(
            self.preparer.quick_planners.call,
            planning.divide,
            [*(placed.prepared.demand for placed in others), prepared.demand],
            memory.partitions.arena_bytes,
            "partitioned",
            memory.partitions.lanes,
            memory.partitions.workspace_bytes if others else 0,
        )
        workspace = division.workspace_bytes
        held = {placed.owner: memory.partitions.held[placed.owner] for placed in others}
        *shares, share = division.partition_bytes
        kept = {t.owner: min(size, held[t.owner].nbytes) for t, size in zip(others, shares, strict=True)}
        wanted = packed(kept, held, memory.partitions.arena_bytes)
        plans = await self._plans_for(others, wanted, workspace)
        # With several lanes, all workspaces but the first move when they grow.
        elsewhere = memory.partitions.lanes > 1 and workspace > memory.partitions.workspace_bytes
        steps = vacate_all(wanted) if elsewhere else moves(held, wanted, workspace)
        moving = {step.owner for step in steps}
        programs = await self._bind_all([t for t in others if t.owner in moving], wanted, plans, workspace)
        if old is not None:
            await self._vacate_old(old, stop_old)
        await self._migrate({t.owner: t for t in others}, steps, workspace, plans, programs)
        for placed in others:
            if placed.owner in plans:
                self._start(self.improve(placed))
        return Memory(workspace, share)

    def _no_room_for_all(self, prepared: Prepared, others: list[PlacedModel]) -> CohabitError:
        """Return the error for a model that does not fit where every parameter must be resident."""
        partitions, name = self.memory.partitions, prepared.source.name
        workspace = min(self.preparer.workspaces(prepared, partitions.arena_bytes), default=0)
        if partitions.lanes > 1 and workspace > partitions.workspace_bytes > 0:
            return MemoryExceeded(
                f"{name}: its activations need a workspace of {format_bytes(workspace)}, each of the"
                f" {partitions.lanes} lanes has {format_bytes(partitions.workspace_bytes)}; load it at the start, or"
                " before the others"
            )
        taken = sum(partitions.held[t.owner].nbytes for t in others) + partitions.workspaces.nbytes
        return InfeasibleBudget(name, None, partitions.arena_bytes, taken + prepared.parameter_bytes)

    async def _plans_for(
        self, placed_models: list[PlacedModel], wanted: Mapping[str, Extent], workspace: int
    ) -> dict[str, Plans]:
        """Return quick plans for the models whose partition shrinks."""
        return {
            t.owner: await asyncio.to_thread(
                self.preparer.quick_plans, t.prepared, Memory(workspace, wanted[t.owner].nbytes)
            )
            for t in placed_models
            if wanted[t.owner].nbytes < self.memory.partitions.held[t.owner].nbytes
        }

    async def _bind_all(
        self,
        placed_models: list[PlacedModel],
        wanted: Mapping[str, Extent],
        plans: Mapping[str, Plans],
        workspace: int,
    ) -> dict[str, Programs]:
        """Bind programs at the wanted extents, so that an unsupported plan is refused before any model moves."""
        bind = partial(self.memory.bind, workspace_bytes=workspace, yields=True)
        programs: dict[str, Programs] = {}
        for t in placed_models:
            made = plans.get(t.owner, t.plans)
            programs[t.owner] = await asyncio.to_thread(bind, t.owner, t.prepared, made, wanted[t.owner], t.lane)
        return programs

    async def _migrate(
        self,
        placed_models: Mapping[str, PlacedModel],
        steps: Sequence[ReleaseForMove | Move],
        workspace: int,
        plans: Mapping[str, Plans],
        programs: Mapping[str, Programs],
    ) -> None:
        partitions = self.memory.partitions
        for step in steps:
            if isinstance(step, ReleaseForMove):
                placed = placed_models[step.owner]
                self._lanes[placed.lane].hold(placed.key, True)
                partitions.release(step.owner)
        if partitions.lanes > 1:  # with a single lane, background work is in order already
            for lane in sorted({placed_models[s.owner].lane for s in steps if isinstance(s, ReleaseForMove)}):
                await self._lanes[lane].call_on_lane(self.memory.executors[lane].settle)
        partitions.grow_workspace(workspace)
        for step in steps:
            if not isinstance(step, ReleaseForMove):
                placed = placed_models[step.owner]
                partitions.put(step.owner, step.extent)
                await self._move(placed, plans.get(step.owner, placed.plans), programs[step.owner])

    async def _move(self, placed: PlacedModel, plans: Plans, programs: Programs) -> None:
        """Load a model's residents for new programs while its requests wait, then switch to these programs."""
        self._lanes[placed.lane].hold(placed.key, True)
        old = placed.servable.programs
        try:
            await self._lanes[placed.lane].perform(self.memory.resident_load(programs, placed.lane))
            await self._lanes[placed.lane].call_on_lane(lambda: placed.servable.switch(programs))
        except CohabitError as error:
            self._lanes.remove(placed.key)
            await self._release_later(placed.lane, programs, old)
            await self._remove(placed)
            self._lifecycle.lost(placed, str(error))
            return
        self._switched(placed, plans)
        self._lanes[placed.lane].hold(placed.key, False)
        await self._release_later(placed.lane, old)

    async def _release_later(self, lane: int, *programs: Mapping[Bucket, Program]) -> None:
        """Release programs that no longer run, unless the lane has stopped."""
        for some in programs:
            with suppress(RequestError):
                await self._lanes[lane].call_on_lane(partial(self._release_programs, lane, some))

    def _switched(self, placed: PlacedModel, plans: Plans) -> None:
        placed.plans = plans
        self._lanes[placed.lane].replan(placed.servable)
        self._lifecycle.changed(placed)

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _improve_all(self, placed_models: Sequence[PlacedModel]) -> None:
        """Improve the plans of the start's models one after the other, then plan what they begin with next time."""
        for placed in placed_models:
            await self.improve(placed)
        models = [placed.prepared for placed in placed_models]
        if not any(model.known.is_provisional for model in models):
            try:
                await asyncio.to_thread(self.preparer.plan_next_start, models)
            except CohabitError as error:
                _log.warning("the next start is not planned", extra={"fields": {"reason": str(error)}})
            _log.info("every model has been measured and planned")
        await asyncio.to_thread(self.preparer.release)

    async def improve(self, placed: PlacedModel, *, again: bool = False) -> None:
        """Measure and plan a model better, if it is not yet; `again` in any case. It is served meanwhile."""
        try:
            await self._improve_plans(placed, again=again)
        except CohabitError as error:
            fields = {**placed.key.fields, "reason": str(error)}
            _log.warning("no better plan was found", extra={"fields": fields})

    async def _improve_plans(self, placed: PlacedModel, *, again: bool) -> None:
        """Search better plans for a model's present partition, and switch to them between two executions.

        A model that is measured first keeps no plan from before that. Raises CohabitError.
        """
        begun = placed.plans
        plan = begun[min(begun)]
        room = plan.memory
        measured = await asyncio.to_thread(self.preparer.measured, placed.prepared, again=again)
        if measured is not placed.prepared:
            warn_of_noise(measured)
        plans = await asyncio.to_thread(self.preparer.best_plans, measured, room)
        async with self._places:
            if placed.plans is not begun or placed.owner not in self.memory.placed_models:
                return
            if measured is placed.prepared and not is_better(plans, begun):
                return
            placed.prepared = measured
            extent = self.memory.partitions.held[placed.owner]
            programs = await asyncio.to_thread(
                self.memory.bind, placed.owner, placed.prepared, plans, extent, placed.lane, yields=True
            )
            if plans[min(plans)].residents == plan.residents:
                old = placed.servable.programs
                await self._lanes[placed.lane].call_on_lane(lambda: placed.servable.switch(programs))
                await self._release_later(placed.lane, old)
                self._switched(placed, plans)
            else:
                await self._move(placed, plans, programs)
        _log.info("better plans are in use", extra={"fields": placed.key.fields})
