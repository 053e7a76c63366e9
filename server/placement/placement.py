"""Finds models a place in memory while others are served, moving those one at a time where there is no room."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Protocol

from planner.errors import CohabitError, InfeasibleBudget, format_bytes
from planner.sizing.fitting import Room, workspaces_for
from runtime.binding.program import Program
from runtime.errors import MemoryExceeded
from server.engine.lanes import Lanes
from server.errors import RequestError
from server.models.cache import Plans
from server.models.prepared import Prepared
from server.models.preparing import Workshop, is_better
from server.placement.device_memory import House, Programs, Tenant
from server.placement.moves import Leave, all_anew, moves, packed
from server.placement.partitions import Extent

_log = logging.getLogger("cohabit.housing")

StandAside = Callable[[Tenant], Awaitable[None]]
"""Told that a model's version so far must go before the new one can come."""


class Watcher(Protocol):
    """Hears what happens to models that nobody has asked anything of."""

    def changed(self, tenant: Tenant) -> None:
        """It has another partition, or other plans."""
        ...

    def lost(self, tenant: Tenant, reason: str) -> None:
        """It could not be moved and is not there any more."""
        ...


class Housing:
    """All methods belong to the event loop's thread. What changes places in memory happens one after the other."""

    def __init__(self, house: House, workshop: Workshop, keeps_all: bool) -> None:
        self.house = house
        self.workshop = workshop
        self._keeps_all = keeps_all
        """Whether every parameter must be resident."""
        self._places = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, lanes: Lanes, watcher: Watcher) -> None:
        self._lanes = lanes
        self._watcher = watcher

    async def close(self) -> None:
        """End what is under way; models stay as they are."""
        self.workshop.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def place(self, prepared: Prepared, old: Tenant | None, stand_aside: StandAside) -> Tenant:
        """Bring a model in. Raises CohabitError, with the least memory that would do if there is too little."""
        async with self._places:
            room = await self._room(prepared, None)
            if room is None and old is not None:
                room = await self._room(prepared, old)
                if room is not None:
                    await self._let_go(old, stand_aside)
            if room is None:
                room = await self._make_room(prepared, old, stand_aside)
            plans = await asyncio.to_thread(self.workshop.quick_plans, prepared, room)
            lane = self.house.lightest_lane() if old is None else old.lane
            tenant = await self._settle(prepared, room, plans, lane)
        self._improve_later(tenant)
        return tenant

    async def retire(self, tenant: Tenant, timeout_s: float) -> None:
        """Answer what a model has been asked, then give its memory back. Nobody may ask it anything new."""
        await self._lanes.finish(tenant.name, timeout_s)
        async with self._places:
            await self._vacate(tenant, forget=True)

    async def release(self, tenant: Tenant) -> None:
        """Give back the memory of a version that has been replaced and has nothing left to do."""
        async with self._places:
            await self._vacate(tenant, forget=False)

    async def _room(self, prepared: Prepared, without: Tenant | None) -> Room | None:
        holder = None if without is None else without.holder
        room = await asyncio.to_thread(self._fitting, prepared, holder)
        if room is None or (self._keeps_all and room.partition_bytes < prepared.parameter_bytes):
            return None
        return room

    def _fitting(self, prepared: Prepared, without: str | None) -> Room | None:
        """What the model should have of what is free, by heart if it was asked for before. Nobody else moves now."""
        partitions, rooms = self.house.partitions, prepared.known.rooms
        held = tuple(sorted(extent for holder, extent in partitions.held.items() if holder != without))
        free = (partitions.workspace_bytes if held else 0, held)
        if free not in rooms:
            rooms[free] = self.house.room_for(prepared, without)
        return rooms[free]

    async def _settle(self, prepared: Prepared, room: Room, plans: Plans, lane: int) -> Tenant:
        """Bring a model into a room that is free."""
        house = self.house
        holder = house.new_holder(prepared.source.name)
        grown = house.partitions.grow_workspace(room.workspace_bytes)
        extent = house.partitions.take(holder, room.partition_bytes)
        assert grown
        assert extent is not None
        programs: Programs = {}
        try:
            programs = await asyncio.to_thread(house.bind, prepared, plans, extent, lane, gently=True)
            await self._lanes[lane].perform(house.arrival(programs, lane))
            return house.tenant(holder, prepared, plans, programs, lane)
        except BaseException:
            await self._give_up(lane, programs)
            house.partitions.give_back(holder)
            raise

    async def _let_go(self, old: Tenant, stand_aside: StandAside) -> None:
        await stand_aside(old)
        await self._vacate(old, forget=True)

    async def _vacate(self, tenant: Tenant, forget: bool) -> None:
        """Free a tenant's bytes once no copy to them is on its way."""
        if tenant.holder not in self.house.tenants:
            return
        if forget:
            self._lanes.remove(tenant.name)
        await self._lanes[tenant.lane].between(lambda: self._dismiss(tenant.lane, tenant.servable.programs))
        await self._leave(tenant)

    def _dismiss(self, lane: int, programs: Mapping[int, Program]) -> None:
        """Let the lane finish, and give back what the programs hold. On the lane's thread."""
        executor = self.house.executors[lane]
        executor.settle()
        for program in programs.values():
            executor.dismiss(program)

    async def _leave(self, tenant: Tenant) -> None:
        """Give back its bytes, and those of its store, which takes long enough to be no work for the event loop."""
        self.house.leave(tenant.holder)
        await asyncio.to_thread(tenant.prepared.store.close)

    async def _make_room(self, prepared: Prepared, old: Tenant | None, stand_aside: StandAside) -> Room:
        """Share the memory out anew, and move whoever gets less. Raises CohabitError if the memory is too small."""
        house = self.house
        others = [tenant for tenant in house.tenants.values() if tenant is not old]
        if self._keeps_all:
            raise await asyncio.to_thread(self._no_room_to_keep_all, prepared, others)
        workspace, sizes = await asyncio.to_thread(
            self.workshop.shares,
            [*(tenant.prepared for tenant in others), prepared],
            house.partitions.arena_bytes,
            house.partitions.workspace_bytes if others else 0,
            house.partitions.lanes,
        )
        held = {tenant.holder: house.partitions.held[tenant.holder] for tenant in others}
        kept = {t.holder: min(size, held[t.holder].nbytes) for t, size in zip(others, sizes[:-1], strict=True)}
        wanted = packed(kept, held, house.partitions.arena_bytes)
        plans = await self._plans_for(others, wanted, workspace)
        programs = await self._bound(others, wanted, plans, workspace)
        if old is not None:
            await self._let_go(old, stand_aside)
        await self._migrate({t.holder: t for t in others}, held, wanted, workspace, plans, programs)
        for tenant in others:
            if tenant.holder in plans:
                self._improve_later(tenant)
        return Room(workspace, sizes[-1])

    def _no_room_to_keep_all(self, prepared: Prepared, others: list[Tenant]) -> CohabitError:
        """Say what lacks where every parameter must be resident and nobody is moved."""
        partitions, name = self.house.partitions, prepared.source.name
        workspace = min(workspaces_for(prepared.demand, partitions.arena_bytes), default=0)
        if partitions.lanes > 1 and workspace > partitions.workspace_bytes > 0:
            return MemoryExceeded(
                f"{name}: its activations need a workspace of {format_bytes(workspace)}, each of the"
                f" {partitions.lanes} lanes has {format_bytes(partitions.workspace_bytes)}; load it at the start, or"
                " before the others"
            )
        taken = sum(partitions.held[t.holder].nbytes for t in others) + partitions.workspaces.nbytes
        return InfeasibleBudget(name, None, partitions.arena_bytes, taken + prepared.parameter_bytes)

    async def _plans_for(
        self, tenants: list[Tenant], wanted: Mapping[str, Extent], workspace: int
    ) -> dict[str, Plans]:
        """Plans to begin with, for those whose partition is to be smaller."""
        return {
            t.holder: await asyncio.to_thread(
                self.workshop.quick_plans, t.prepared, Room(workspace, wanted[t.holder].nbytes)
            )
            for t in tenants
            if wanted[t.holder].nbytes < self.house.partitions.held[t.holder].nbytes
        }

    async def _bound(
        self, tenants: list[Tenant], wanted: Mapping[str, Extent], plans: Mapping[str, Plans], workspace: int
    ) -> dict[str, Programs]:
        """Programs at the places where models are wanted; what could be refused is refused before anybody moves."""
        return {
            t.holder: await asyncio.to_thread(
                self.house.bind,
                t.prepared,
                plans.get(t.holder, t.plans),
                wanted[t.holder],
                t.lane,
                workspace_bytes=workspace,
                gently=True,
            )
            for t in tenants
        }

    async def _migrate(
        self,
        tenants: Mapping[str, Tenant],
        held: Mapping[str, Extent],
        wanted: Mapping[str, Extent],
        workspace: int,
        plans: Mapping[str, Plans],
        programs: Mapping[str, Programs],
    ) -> None:
        partitions = self.house.partitions
        elsewhere = partitions.lanes > 1 and workspace > partitions.workspace_bytes  # all workspaces but the first
        steps = all_anew(wanted) if elsewhere else moves(held, wanted, workspace)
        for step in steps:
            if isinstance(step, Leave):
                self._lanes.hold(tenants[step.holder].name, True)
                partitions.give_back(step.holder)
        await self._at_rest({tenants[step.holder].lane for step in steps if isinstance(step, Leave)})
        partitions.grow_workspace(workspace)
        for step in steps:
            if not isinstance(step, Leave):
                tenant = tenants[step.holder]
                partitions.put(step.holder, step.extent)
                await self._move(tenant, plans.get(step.holder, tenant.plans), programs[step.holder])

    async def _at_rest(self, lanes: set[int]) -> None:
        """Let lanes end what they do for models that are held. A single lane does things in their order anyway."""
        if self.house.partitions.lanes > 1:
            for lane in sorted(lanes):
                await self._lanes[lane].between(self.house.executors[lane].settle)

    async def _move(self, tenant: Tenant, plans: Plans, programs: Programs) -> None:
        """Bring a model's residents to another place, or others to its own, while its requests wait."""
        self._lanes.hold(tenant.name, True)
        old = tenant.servable.programs
        arrival = self.house.arrival(programs, tenant.lane, lambda: tenant.servable.switch(programs))
        try:
            await self._lanes[tenant.lane].perform(arrival)
        except CohabitError as error:
            self._lanes.remove(tenant.name)
            await self._give_up(tenant.lane, programs, old)
            await self._leave(tenant)
            self._watcher.lost(tenant, str(error))
            return
        self._switched(tenant, plans)
        self._lanes.hold(tenant.name, False)
        await self._give_up(tenant.lane, old)

    async def _give_up(self, lane: int, *programs: Mapping[int, Program]) -> None:
        """Give back what programs hold that nobody runs any more, unless the device has nothing to give."""
        for some in programs:
            with suppress(RequestError):
                await self._lanes[lane].between(partial(self._dismiss, lane, some))

    def _switched(self, tenant: Tenant, plans: Plans) -> None:
        tenant.plans = plans
        self._lanes.replan(tenant.servable)
        self._watcher.changed(tenant)

    def _improve_later(self, tenant: Tenant) -> None:
        async def improve() -> None:
            try:
                await self._improve(tenant)
            except CohabitError as error:
                fields = {"model": tenant.name, "reason": str(error)}
                _log.warning("no better plan was found", extra={"fields": fields})

        task = asyncio.create_task(improve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _improve(self, tenant: Tenant) -> None:
        """Search for better plans for the place that a model has, and switch to them between two inferences."""
        begun = tenant.plans
        plan = begun[min(begun)]
        room = Room(plan.workspace_bytes, plan.partition_bytes)
        plans = await asyncio.to_thread(self.workshop.best_plans, tenant.prepared, room)
        async with self._places:
            if tenant.plans is not begun or tenant.holder not in self.house.tenants or not is_better(plans, begun):
                return
            extent = self.house.partitions.held[tenant.holder]
            programs = await asyncio.to_thread(
                self.house.bind, tenant.prepared, plans, extent, tenant.lane, gently=True
            )
            if plans[min(plans)].residents == plan.residents:
                old = tenant.servable.programs
                await self._lanes[tenant.lane].between(lambda: tenant.servable.switch(programs))
                await self._give_up(tenant.lane, old)
                self._switched(tenant, plans)
            else:
                await self._move(tenant, plans, programs)
        _log.info("better plans are in use", extra={"fields": {"model": tenant.name}})
