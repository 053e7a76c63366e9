"""The device's memory and the models in it: a partition for each, and a workspace for each compute lane."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.sizing.fitting import Room, fit, workspaces_for
from runtime.backend import Backend
from runtime.binding.program import Bases, Program
from runtime.memory import DeviceArena
from runtime.shared_region.sharing import SharedRegion, Sharing
from server.engine.servable import ProgramServable, describe
from server.ipc.model import DeviceUse, ModelFootprint, lane_name
from server.models.known_models import Plans
from server.models.prepared import Prepared, warn_of_ignored_config
from server.placement.lane_choice import least_busy
from server.placement.loading import ResidentLoad
from server.placement.partitions import Extent, Partitions

Programs = dict[int, Program]


@dataclass(slots=True)
class PlacedModel:
    """A model in its partition."""

    owner: str
    """Its name in `Partitions`: two versions of one model may be in memory for a while."""
    prepared: Prepared
    plans: Plans
    servable: ProgramServable
    lane: int = 0
    """The compute lane whose executor and workspace it uses."""
    shares: bool = False
    """Whether it shares one region with all other models instead of having a partition."""

    @property
    def name(self) -> str:
        return self.prepared.source.name

    @property
    def load(self) -> float:
        """Expected share of its lane's time; without known rates, the seconds of one inference."""
        return expected_load(self.prepared, self.plans)

    @property
    def footprint(self) -> ModelFootprint:
        plan = self.plans[min(self.plans)]
        tensors = self.prepared.lowered.graphs[min(self.plans)].tensors
        return ModelFootprint(
            partition_bytes=0 if self.shares else plan.partition_bytes,
            parameter_bytes=self.prepared.parameter_bytes,
            resident_bytes=0 if self.shares else sum(tensors[p.tensor].nbytes for p in plan.residents),
            predicted_s={b: p.provenance.latency_s for b, p in self.plans.items() if p.provenance is not None},
            bound_s={b: p.provenance.bound_s for b, p in self.plans.items() if p.provenance is not None},
            lane=self.lane,
        )


def expected_load(prepared: Prepared, plans: Plans) -> float:
    """Expected requests per second times the seconds of one."""
    batch = min(plans)
    provenance = plans[batch].provenance
    seconds = prepared.profiles[batch].compute_s if provenance is None else provenance.latency_s
    return prepared.rate_per_s * seconds


class PartitionedMemory:
    """Binding is for any thread; background work are for the engine's, and bookkeeping for the event loop's."""

    def __init__(self, backend: Backend, memory_bytes: int, arena_bytes: int, lanes: int = 1) -> None:
        self.backend = backend
        self.executors = backend.executors(lanes)
        self.memory_bytes = memory_bytes
        self.partitions = Partitions(arena_bytes, lanes=lanes)
        self.arena: DeviceArena[object] = backend.arena(arena_bytes)
        self.placed_models: dict[str, PlacedModel] = {}
        self.shared: SharedRegion | None = None
        """Where models share one region instead of having partitions."""
        self._admitted = 0

    def share(self, sharing: Sharing) -> None:
        """Make one region of all that is not the workspace."""
        assert len(self.executors) == 1
        workspace_bytes = self.partitions.workspace_bytes
        region_bytes = self.partitions.arena_bytes - workspace_bytes
        self.partitions.put("(shared)", Extent(workspace_bytes, region_bytes))
        self.shared = SharedRegion(self.backend, sharing, self.arena, workspace_bytes, region_bytes)

    def least_busy_lane(self) -> int:
        """Where one more model is to run."""
        sums = [0.0] * len(self.executors)
        for placed in self.placed_models.values():
            sums[placed.lane] += placed.load
        return least_busy(sums)

    def new_owner(self, name: str) -> str:
        """A name for the bytes of one version of a model."""
        self._admitted += 1
        return f"{name}#{self._admitted}"

    def room_for(self, prepared: Prepared, without: str | None = None) -> Room | None:
        """The workspace and partition that a model should take of what is free; None if it does not fit.

        With `without`, of what would be free if that owner had left.
        """
        partitions = copy.deepcopy(self.partitions)
        if without is not None:
            partitions.release(without)
        return fit(prepared.demand, partitions.rooms(workspaces_for(prepared.demand, partitions.arena_bytes)))

    def bind(
        self,
        prepared: Prepared,
        plans: Plans,
        extent: Extent,
        lane: int = 0,
        *,
        workspace_bytes: int | None = None,
        gently: bool = False,
    ) -> Programs:
        """Make programs of plans for a partition. Raises InvalidPlan, UnsupportedPlan or MemoryExceeded.

        `workspace_bytes` is what each lane will have when the programs run, if not what it has now. Binding holds
        the interpreter; `gently` leaves it to those who serve for half of the time.
        """
        each = self.partitions.workspace_bytes if workspace_bytes is None else workspace_bytes
        bases = Bases(partition=extent.offset, workspace=lane * each)
        programs: Programs = {}
        for batch, plan in plans.items():
            start_s = time.perf_counter()
            profile = prepared.profiles[batch]
            programs[batch] = self.backend.build(prepared.lowered, plan, profile, self.arena, bases, prepared.store)
            if gently:
                time.sleep(time.perf_counter() - start_s)
        return programs

    def bind_shared(self, prepared: Prepared, plans: Plans) -> Programs:
        """Make programs of plans that keep every parameter, for the region that all share. Raises as `bind` does."""
        assert self.shared is not None
        lowered, profiles, store = prepared.lowered, prepared.profiles, prepared.store
        return {batch: self.shared.add(lowered, plan, profiles[batch], store) for batch, plan in plans.items()}

    def add(self, owner: str, prepared: Prepared, plans: Plans, programs: Programs, lane: int = 0) -> PlacedModel:
        """Record a model whose residents are in place, and return it."""
        warn_of_ignored_config(prepared.source)
        lowered, config = prepared.lowered, prepared.source.config
        most = max(programs)
        if config is not None and config.max_batch_size:
            most = min(most, config.max_batch_size)
        info = describe(lowered, prepared.source.version, most)
        runner = self.executors[lane] if self.shared is None else self.shared
        servable = ProgramServable(info, programs, lowered.inputs, lowered.outputs, runner)
        self.placed_models[owner] = placed = PlacedModel(
            owner, prepared, plans, servable, lane, self.shared is not None
        )
        return placed

    def resident_load(self, programs: Programs, lane: int, then: Callable[[], None] = lambda: None) -> ResidentLoad:
        """Bring the residents in, a background of the lane's thread; all batch sizes have the same ones."""
        return ResidentLoad(self.executors[lane], [programs[batch] for batch in sorted(programs)], then)

    def leave(self, owner: str) -> None:
        """Release a model's bytes. The lanes must not use it any more; the caller closes its store."""
        self.partitions.release(owner)
        self.placed_models.pop(owner, None)

    def use(self) -> DeviceUse:
        """What the memory is used for now, and how long the swap-in lanes have worked, where the device tells."""
        pinned = self.backend.pinned_memory
        busy_s = [executor.swap_busy_s for executor in self.executors]
        return DeviceUse(
            workspace_bytes=self.partitions.workspaces.nbytes,
            partition_bytes=sum(extent.nbytes for extent in self.partitions.held.values()),
            free_bytes=self.partitions.free_bytes,
            lane_busy_s={
                lane_name("swap_in", lane, len(busy_s)): busy
                for lane, busy in enumerate(busy_s)
                if busy is not None
            },
            pinned_total_bytes=None if pinned is None else pinned.limit_bytes,
            pinned_used_bytes=0 if pinned is None else pinned.used_bytes,
        )

    def close(self) -> None:
        """Give everything back. The engine must have stopped."""
        self.backend.close()
        self.arena.close()
        for placed in self.placed_models.values():
            placed.prepared.store.close()
