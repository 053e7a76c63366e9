"""Loads, moves and removes models in device memory, one at a time, while others are served.

A change of the memory map is a transaction: replaced programs and displaced models are kept until it succeeds.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from cohabit.planner.shapes import Bucket
from cohabit.runtime.binding.program import Program
from cohabit.server.deploy.decide import Decision, Resizing
from cohabit.server.deploy.load import PartitionedMemory
from cohabit.server.deploy.model import Model, Plans, PlansFound, Programs
from cohabit.server.deploy.partitions import Extent, Move, ReleaseForMove, moves, packed, vacate_all
from cohabit.server.deploy.worker import in_thread
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.errors import RequestError

Accept = Callable[[Model], Awaitable[None]]
"""Warms up a loaded model and starts serving it. Raises the error that prevents this."""
Bound = list[tuple[Model, Programs]]
"""The models of a partition, with programs that they may switch to."""


@dataclass(frozen=True, slots=True)
class _MemoryMap:
    """Snapshot of the memory map, to restore after a failed change."""

    workspace_bytes: int
    held: Mapping[str, Extent]
    models: Mapping[str, Model]
    plans: Mapping[str, PlansFound]
    programs: Mapping[str, Programs]
    """The last three by load id (`Model.load_id`), `held` by partition id."""


class Migrator:
    """Belongs to the event loop's thread. Its caller makes one change at a time."""

    def __init__(
        self, memory: PartitionedMemory, lanes: Sequence[ComputeLane], on_change: Callable[[Model], None]
    ) -> None:
        """`on_change` receives each model that gets another partition or other plans."""
        self._on_change = on_change
        self._memory = memory
        self._lanes = lanes

    @asynccontextmanager
    async def restoring_on_failure(self) -> AsyncIterator[None]:
        """Roll back the memory map if this block raises: models return to their extents and programs.

        Replaced programs and displaced models are kept until the block ends, then released.
        """
        before = self._memory_map()
        try:
            yield
        except Exception:
            await self._restore(before)
            raise
        for load_id, model in before.models.items():
            programs = before.programs[load_id]
            if model.partition_id not in self._memory.partitions.held:
                await self._release_programs(model, programs)
                await self._remove(model)
            elif model.servable.programs is not programs:
                await self._release_programs(model, programs)

    async def load(self, model: Model, accept: Accept, *, throttle: bool) -> None:
        """Load and accept a planned model. After a failure its memory is released; its store stays open."""
        await self._load(model, throttle=throttle)
        try:
            await accept(model)
        except Exception:
            await self._release_programs(model, model.servable.programs)
            self._memory.remove(model)
            raise

    async def free_memory(self, decision: Decision) -> None:
        """Free the memory chosen for new models, by moving or displacing loaded ones."""
        if decision.resizing is not None:
            await self.resize(decision.resizing, decision.displaced)
        elif decision.displaced is not None:
            await self._displace(decision.displaced)

    async def resize(self, resizing: Resizing, displaced: Model | None = None) -> None:
        """Give partitions new sizes, without gaps. Some models get new plans; `displaced` loses its partition."""
        partitions, models, workspace = self._memory.partitions, resizing.models, resizing.workspace_bytes
        held = {key: partitions.held[key] for key in models}
        wanted = packed(resizing.sizes, held, partitions.arena_bytes)
        # Growing workspaces moves all but the first lane's. Shrinking them needs all lanes idle.
        elsewhere = workspace < partitions.workspace_bytes or (
            partitions.lanes > 1 and workspace > partitions.workspace_bytes
        )
        steps = vacate_all(wanted) if elsewhere else moves(held, wanted, workspace)
        moving = {step.owner for step in steps}
        bound: dict[str, Bound] = {}
        try:
            # Bind all before any move: an unsupported plan then changes nothing.
            for key in (key for key in models if key in moving):
                bound[key] = []
                plans = resizing.plans.get(key, models[key][0].found).plans
                await self._bind(models[key], plans, wanted[key], bound[key], workspace)
            if displaced is not None:
                await self._displace(displaced)
            await self._move_all(steps, resizing, bound)
        except Exception:
            for own in bound.values():
                await self._release_unused(own)
            raise

    async def switch(self, family: Sequence[Model], plans: Plans) -> None:
        """Switch the models of a partition to a full search's plans for it.

        Raises CohabitError; the models then keep their current plans.
        """
        extent, before = self._memory.partitions.held[family[0].partition_id], family[0].plans
        found = PlansFound(plans, searched=True)
        bound: Bound = []
        try:
            await self._bind(family, plans, extent, bound)
        except BaseException:
            await self._release_unused(bound)
            raise
        async with self.restoring_on_failure():
            if plans[min(plans)].residents == before[min(before)].residents:
                await self._lanes[family[0].lane].call_on_lane(partial(_switch, bound))
                for model in family:
                    self._switched(model, found)
            else:
                await self._move(found, bound)

    async def _bind(
        self, family: Sequence[Model], plans: Plans, extent: Extent, bound: Bound, workspace: int | None = None
    ) -> None:
        """Bind plans to an extent for each model of a family, and append the programs to `bound`, also if it raises."""
        for model in family:
            programs: dict[Bucket, Program] = {}
            bound.append((model, programs))
            await in_thread(
                self._memory.bind, model, plans, extent, programs, workspace_bytes=workspace, throttle=True
            )

    async def _release_unused(self, bound: Bound) -> None:
        for model, programs in bound:
            if model.servable.programs is not programs:
                await self._release_programs(model, programs)

    async def vacate(self, model: Model) -> None:
        """Release an idle model's programs, memory and store."""
        await self._release_programs(model, model.servable.programs)
        await self._remove(model)

    def _memory_map(self) -> _MemoryMap:
        memory = self._memory
        models = dict(memory.models)
        return _MemoryMap(
            memory.partitions.workspace_bytes,
            dict(memory.partitions.held),
            models,
            {load_id: model.found for load_id, model in models.items()},
            {load_id: model.servable.programs for load_id, model in models.items()},
        )

    async def _restore(self, before: _MemoryMap) -> None:
        """Restore the memory map. Each moved model loads its residents at its next run."""
        memory, held = self._memory, self._memory.partitions.held
        moved = {
            load_id: model
            for load_id, model in before.models.items()
            if held.get(model.partition_id) != before.held.get(model.partition_id)
            or model.servable.programs is not before.programs[load_id]
        }
        for model in moved.values():
            self._lanes[model.lane].pause(model.key)
        for lane, executor in zip(self._lanes, memory.executors, strict=True):
            await lane.call_on_lane(executor.settle)
        memory.partitions.workspace_bytes = before.workspace_bytes
        memory.partitions.held = dict(before.held)
        for load_id, model in moved.items():
            programs, replaced = before.programs[load_id], model.servable.programs
            await self._lanes[model.lane].call_on_lane(partial(self._revert, model, programs))
            if replaced is not programs:
                await self._release_programs(model, replaced)
            self._switched(model, before.plans[load_id])
            self._lanes[model.lane].resume(model.key)

    def _revert(self, model: Model, programs: Programs) -> None:
        """Switch a model back to earlier programs. Called on the compute lane's thread."""
        model.servable.switch(programs)
        for program in programs.values():
            self._memory.executors[model.lane].invalidate(program)

    async def _load(self, model: Model, *, throttle: bool) -> None:
        """Allocate the memory of a model's plans, bind them, and load residents. The memory must be free.

        The partition of a family, with its residents, may be there already.
        """
        memory, lane = self._memory, self._lanes[model.lane]
        if memory.shared is not None:
            memory.add(model, await in_thread(memory.bind_shared, model))
            return
        wanted, in_place = model.found.memory, model.partition_id in memory.partitions.held
        if in_place:
            assert all(other.plans is model.plans for other in memory.family_of(model))
            extent = memory.partitions.held[model.partition_id]
        else:
            grown = memory.partitions.grow_workspace(wanted.workspace_bytes)
            taken = memory.partitions.take(model.partition_id, wanted.partition_bytes)
            assert grown
            assert taken is not None
            extent = taken
        programs: dict[Bucket, Program] = {}
        try:
            await in_thread(memory.bind, model, model.plans, extent, programs, throttle=throttle)
            await lane.perform(memory.resident_load(programs, model.lane, in_place=in_place))
            memory.add(model, programs)
        except BaseException:
            await self._release_programs(model, programs)
            memory.remove(model)
            raise

    async def _move_all(
        self, steps: Sequence[ReleaseForMove | Move], resizing: Resizing, bound: Mapping[str, Bound]
    ) -> None:
        """Move partitions one at a time, to programs bound to their new extents."""
        partitions, models = self._memory.partitions, resizing.models
        for step in steps:
            if isinstance(step, ReleaseForMove):
                for model in models[step.owner]:
                    self._lanes[model.lane].pause(model.key)
                partitions.release(step.owner)
        # Their restores end before other models get the bytes, or a workspace grows over them.
        for lane in sorted({models[s.owner][0].lane for s in steps if isinstance(s, ReleaseForMove)}):
            await self._lanes[lane].call_on_lane(self._memory.executors[lane].settle)
        partitions.grow_workspace(resizing.workspace_bytes)
        for step in steps:
            if not isinstance(step, ReleaseForMove):
                partitions.put(step.owner, step.extent)
                found = resizing.plans.get(step.owner, models[step.owner][0].found)
                await self._move(found, bound[step.owner])

    async def _move(self, found: PlansFound, bound: Bound) -> None:
        """Pause the models of a partition, switch them to new programs, load the residents, then resume them.

        Restores by the old programs end first: another model may get their bytes next, on another lane.
        """
        number = bound[0][0].lane
        lane, executor = self._lanes[number], self._memory.executors[number]

        def switch() -> None:
            executor.settle()
            _switch(bound)

        for model, _ in bound:
            lane.pause(model.key)
        await lane.call_on_lane(switch)
        for n, (_, programs) in enumerate(bound):
            await lane.perform(self._memory.resident_load(programs, number, in_place=n > 0))
        for model, _ in bound:
            self._switched(model, found)
            lane.resume(model.key)

    def _switched(self, model: Model, found: PlansFound) -> None:
        model.found = found
        model.plan_batches_to(max(found.plans).batch)
        self._lanes[model.lane].replan(model.servable)
        self._on_change(model)

    async def _displace(self, model: Model) -> None:
        """Release a model's partition for its successor. Requests wait; store and programs are kept."""
        lane = self._lanes[model.lane]
        lane.pause(model.key)
        await lane.call_on_lane(self._memory.executors[model.lane].settle)
        self._memory.partitions.release(model.partition_id)

    async def _release_programs(self, model: Model, programs: Programs) -> None:
        """Release unused programs, unless the lane has stopped."""
        with suppress(RequestError):
            await self._lanes[model.lane].call_on_lane(lambda: self._memory.release_programs(programs, model.lane))

    async def _remove(self, model: Model) -> None:
        """Release a model's memory, and close its store on another thread, because that is slow."""
        self._memory.remove(model)
        await in_thread(model.store.close)


def _switch(bound: Bound) -> None:
    """Switch models to programs. Called on their compute lane's thread."""
    for model, programs in bound:
        model.servable.switch(programs)
