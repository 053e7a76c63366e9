"""Finds models a place in memory while others are served, moving those one at a time where there is no room."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from planner.errors import CohabitError, InfeasibleBudget, format_bytes
from planner.sizing.fitting import Room, workspaces_for
from runtime.binding.program import Program
from runtime.errors import MemoryExceeded
from server.engine.compute_lanes import ComputeLanes
from server.errors import RequestError
from server.models.known_models import Plans
from server.models.prepared import Prepared
from server.models.preparer import ModelPreparer, is_better
from server.placement.device_memory import PartitionedMemory, PlacedModel, Programs
from server.placement.moves import Move, Vacate, moves, packed, vacate_all
from server.placement.partitions import Extent

_log = logging.getLogger("cohabit.placement")

MakeWay = Callable[[PlacedModel], Awaitable[None]]
"""Told that a model's version so far must go before the new one can come."""


class PlacementListener(Protocol):
    """Hears what happens to models that nobody has asked anything of."""

    def changed(self, placed: PlacedModel) -> None:
        """It has another partition, or other plans."""
        ...

    def lost(self, placed: PlacedModel, reason: str) -> None:
        """It could not be moved and is not there any more."""
        ...


class ModelPlacement:
    """All methods belong to the event loop's thread. What changes places in memory happens one after the other."""

    def __init__(self, memory: PartitionedMemory, preparer: ModelPreparer, keeps_all: bool) -> None:
        self.memory = memory
        self.preparer = preparer
        self._keeps_all = keeps_all
        """Whether every parameter must be resident."""
        self._places = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, lanes: ComputeLanes, listener: PlacementListener) -> None:
        self._lanes = lanes
        self._listener = listener

    async def close(self) -> None:
        """End what is under way; models stay as they are."""
        self.preparer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def place(self, prepared: Prepared, old: PlacedModel | None, make_way: MakeWay) -> PlacedModel:
        """Bring a model in. Raises CohabitError, with the least memory that would do if there is too little."""
        async with self._places:
            room = await self._room(prepared, None)
            if room is None and old is not None:
                room = await self._room(prepared, old)
                if room is not None:
                    await self._vacate_old(old, make_way)
            if room is None:
                room = await self._make_room(prepared, old, make_way)
            plans = await asyncio.to_thread(self.preparer.quick_plans, prepared, room)
            lane = self.memory.least_busy_lane() if old is None else old.lane
            placed = await self._settle(prepared, room, plans, lane)
        self._improve_later(placed)
        return placed

    async def retire(self, placed: PlacedModel, timeout_s: float) -> None:
        """Answer what a model has been asked, then give its memory back. Nobody may ask it anything new."""
        await self._lanes.finish(placed.name, timeout_s)
        async with self._places:
            await self._vacate(placed, forget=True)

    async def release(self, placed: PlacedModel) -> None:
        """Give back the memory of a version that has been replaced and has nothing left to do."""
        async with self._places:
            await self._vacate(placed, forget=False)

    async def _room(self, prepared: Prepared, without: PlacedModel | None) -> Room | None:
        owner = None if without is None else without.owner
        room = await asyncio.to_thread(self._fitting, prepared, owner)
        if room is None or (self._keeps_all and room.partition_bytes < prepared.parameter_bytes):
            return None
        return room

    def _fitting(self, prepared: Prepared, without: str | None) -> Room | None:
        """What the model should have of what is free, by heart if it was asked for before. Nobody else moves now."""
        partitions, rooms = self.memory.partitions, prepared.known.rooms
        held = tuple(sorted(extent for owner, extent in partitions.held.items() if owner != without))
        free = (partitions.workspace_bytes if held else 0, held)
        if free not in rooms:
            rooms[free] = self.memory.room_for(prepared, without)
        return rooms[free]

    async def _settle(self, prepared: Prepared, room: Room, plans: Plans, lane: int) -> PlacedModel:
        """Bring a model into a room that is free."""
        memory = self.memory
        owner = memory.new_owner(prepared.source.name)
        grown = memory.partitions.grow_workspace(room.workspace_bytes)
        extent = memory.partitions.take(owner, room.partition_bytes)
        assert grown
        assert extent is not None
        programs: Programs = {}
        try:
            programs = await asyncio.to_thread(memory.bind, prepared, plans, extent, lane, gently=True)
            await self._lanes[lane].perform(memory.resident_load(programs, lane))
            return memory.add(owner, prepared, plans, programs, lane)
        except BaseException:
            await self._dismiss_later(lane, programs)
            memory.partitions.release(owner)
            raise

    async def _vacate_old(self, old: PlacedModel, make_way: MakeWay) -> None:
        await make_way(old)
        await self._vacate(old, forget=True)

    async def _vacate(self, placed: PlacedModel, forget: bool) -> None:
        """Free a placed's bytes once no copy to them is on its way."""
        if placed.owner not in self.memory.placed_models:
            return
        if forget:
            self._lanes.remove(placed.name)
        await self._lanes[placed.lane].between(lambda: self._dismiss(placed.lane, placed.servable.programs))
        await self._leave(placed)

    def _dismiss(self, lane: int, programs: Mapping[int, Program]) -> None:
        """Let the lane finish, and give back what the programs hold. On the lane's thread."""
        executor = self.memory.executors[lane]
        executor.settle()
        for program in programs.values():
            executor.dismiss(program)

    async def _leave(self, placed: PlacedModel) -> None:
        """Give back its bytes, and those of its store, which takes long enough to be no work for the event loop."""
        self.memory.leave(placed.owner)
        await asyncio.to_thread(placed.prepared.store.close)

    async def _make_room(self, prepared: Prepared, old: PlacedModel | None, make_way: MakeWay) -> Room:
        """Share the memory out anew, and move whoever gets less. Raises CohabitError if the memory is too small."""
        memory = self.memory
        others = [placed for placed in memory.placed_models.values() if placed is not old]
        if self._keeps_all:
            raise await asyncio.to_thread(self._no_room_to_keep_all, prepared, others)
        workspace, sizes = await asyncio.to_thread(
            self.preparer.shares,
            [*(placed.prepared for placed in others), prepared],
            memory.partitions.arena_bytes,
            memory.partitions.workspace_bytes if others else 0,
            memory.partitions.lanes,
        )
        held = {placed.owner: memory.partitions.held[placed.owner] for placed in others}
        kept = {t.owner: min(size, held[t.owner].nbytes) for t, size in zip(others, sizes[:-1], strict=True)}
        wanted = packed(kept, held, memory.partitions.arena_bytes)
        plans = await self._plans_for(others, wanted, workspace)
        # With several lanes, all workspaces but the first begin elsewhere when they grow.
        elsewhere = memory.partitions.lanes > 1 and workspace > memory.partitions.workspace_bytes
        steps = vacate_all(wanted) if elsewhere else moves(held, wanted, workspace)
        moving = {step.owner for step in steps}
        programs = await self._bound([t for t in others if t.owner in moving], wanted, plans, workspace)
        if old is not None:
            await self._vacate_old(old, make_way)
        await self._migrate({t.owner: t for t in others}, steps, workspace, plans, programs)
        for placed in others:
            if placed.owner in plans:
                self._improve_later(placed)
        return Room(workspace, sizes[-1])

    def _no_room_to_keep_all(self, prepared: Prepared, others: list[PlacedModel]) -> CohabitError:
        """Say what lacks where every parameter must be resident and nobody is moved."""
        partitions, name = self.memory.partitions, prepared.source.name
        workspace = min(workspaces_for(prepared.demand, partitions.arena_bytes), default=0)
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
        """Plans to begin with, for those whose partition is to be smaller."""
        return {
            t.owner: await asyncio.to_thread(
                self.preparer.quick_plans, t.prepared, Room(workspace, wanted[t.owner].nbytes)
            )
            for t in placed_models
            if wanted[t.owner].nbytes < self.memory.partitions.held[t.owner].nbytes
        }

    async def _bound(
        self,
        placed_models: list[PlacedModel],
        wanted: Mapping[str, Extent],
        plans: Mapping[str, Plans],
        workspace: int,
    ) -> dict[str, Programs]:
        """Programs at the places where models are wanted; what could be refused is refused before anybody moves."""
        return {
            t.owner: await asyncio.to_thread(
                self.memory.bind,
                t.prepared,
                plans.get(t.owner, t.plans),
                wanted[t.owner],
                t.lane,
                workspace_bytes=workspace,
                gently=True,
            )
            for t in placed_models
        }

    async def _migrate(
        self,
        placed_models: Mapping[str, PlacedModel],
        steps: Sequence[Vacate | Move],
        workspace: int,
        plans: Mapping[str, Plans],
        programs: Mapping[str, Programs],
    ) -> None:
        partitions = self.memory.partitions
        for step in steps:
            if isinstance(step, Vacate):
                self._lanes.hold(placed_models[step.owner].name, True)
                partitions.release(step.owner)
        await self._at_rest({placed_models[step.owner].lane for step in steps if isinstance(step, Vacate)})
        partitions.grow_workspace(workspace)
        for step in steps:
            if not isinstance(step, Vacate):
                placed = placed_models[step.owner]
                partitions.put(step.owner, step.extent)
                await self._move(placed, plans.get(step.owner, placed.plans), programs[step.owner])

    async def _at_rest(self, lanes: set[int]) -> None:
        """Let lanes end what they do for models that are held. A single lane does things in their order anyway."""
        if self.memory.partitions.lanes > 1:
            for lane in sorted(lanes):
                await self._lanes[lane].between(self.memory.executors[lane].settle)

    async def _move(self, placed: PlacedModel, plans: Plans, programs: Programs) -> None:
        """Bring a model's residents to another place, or others to its own, while its requests wait."""
        self._lanes.hold(placed.name, True)
        old = placed.servable.programs
        resident_load = self.memory.resident_load(programs, placed.lane, lambda: placed.servable.switch(programs))
        try:
            await self._lanes[placed.lane].perform(resident_load)
        except CohabitError as error:
            self._lanes.remove(placed.name)
            await self._dismiss_later(placed.lane, programs, old)
            await self._leave(placed)
            self._listener.lost(placed, str(error))
            return
        self._switched(placed, plans)
        self._lanes.hold(placed.name, False)
        await self._dismiss_later(placed.lane, old)

    async def _dismiss_later(self, lane: int, *programs: Mapping[int, Program]) -> None:
        """Give back what programs hold that nobody runs any more, unless the device has nothing to give."""
        for some in programs:
            with suppress(RequestError):
                await self._lanes[lane].between(partial(self._dismiss, lane, some))

    def _switched(self, placed: PlacedModel, plans: Plans) -> None:
        placed.plans = plans
        self._lanes.replan(placed.servable)
        self._listener.changed(placed)

    def _improve_later(self, placed: PlacedModel) -> None:
        async def improve() -> None:
            try:
                await self._improve(placed)
            except CohabitError as error:
                fields = {"model": placed.name, "reason": str(error)}
                _log.warning("no better plan was found", extra={"fields": fields})

        task = asyncio.create_task(improve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _improve(self, placed: PlacedModel) -> None:
        """Search for better plans for the place that a model has, and switch to them between two inferences."""
        begun = placed.plans
        plan = begun[min(begun)]
        room = Room(plan.workspace_bytes, plan.partition_bytes)
        plans = await asyncio.to_thread(self.preparer.best_plans, placed.prepared, room)
        async with self._places:
            if (
                placed.plans is not begun
                or placed.owner not in self.memory.placed_models
                or not is_better(plans, begun)
            ):
                return
            extent = self.memory.partitions.held[placed.owner]
            programs = await asyncio.to_thread(
                self.memory.bind, placed.prepared, plans, extent, placed.lane, gently=True
            )
            if plans[min(plans)].residents == plan.residents:
                old = placed.servable.programs
                await self._lanes[placed.lane].between(lambda: placed.servable.switch(programs))
                await self._dismiss_later(placed.lane, old)
                self._switched(placed, plans)
            else:
                await self._move(placed, plans, programs)
        _log.info("better plans are in use", extra={"fields": {"model": placed.name}})
