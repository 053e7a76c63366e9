"""The device's memory: a partition for each model, and a workspace for each compute lane."""

import copy
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from cohabit.planner.memory import Memory
from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.memory import DeviceArena
from cohabit.runtime.shared_region.sharing import SharedRegion, Sharing
from cohabit.server.engine.device_thread import BackgroundWork
from cohabit.server.engine.servable import ProgramServable, describe
from cohabit.server.ipc.model import ArenaExtent, DeviceUse, ModelFootprint, ModelKey, lane_name
from cohabit.server.models.known_models import Plans
from cohabit.server.models.prepared import Prepared, warn_of_interaction, warn_of_noise, warn_of_random_ops
from cohabit.server.placement.partitions import Extent, Partitions
from cohabit.server.protocol.model_config import with_defaults

Programs = dict[Bucket, Program]


@dataclass(slots=True)
class PlacedModel:
    """A model in its partition."""

    owner: str
    """Its key in `Partitions`. Unique per load, because a version may be loaded again while it is served."""
    prepared: Prepared
    plans: Plans
    servable: ProgramServable
    lane: int = 0
    """The compute lane whose executor and workspace it uses."""
    shares: bool = False
    """Whether all models share one region, and it has no partition."""

    @property
    def key(self) -> ModelKey:
        return self.prepared.source.key

    @property
    def footprint(self) -> ModelFootprint:
        plan = self.plans[min(self.plans)]
        tensors = self.prepared.lowered.graphs[min(self.plans)].tensors
        return ModelFootprint(
            partition_bytes=0 if self.shares else plan.memory.partition_bytes,
            parameter_bytes=self.prepared.parameter_bytes,
            resident_bytes=0 if self.shares else sum(tensors[p.tensor].nbytes for p in plan.residents),
            predicted_s={b: p.provenance.latency_s for b, p in self.plans.items() if p.provenance is not None},
            bound_s={b: p.provenance.bound_s for b, p in self.plans.items() if p.provenance is not None},
            lane=self.lane,
        )


def expected_load(prepared: Prepared, plans: Plans) -> float:
    """Return the expected share of a lane's time: requests per second times the seconds of one."""
    smallest = min(plans)
    provenance = plans[smallest].provenance
    seconds = prepared.profiles[smallest].compute_s if provenance is None else provenance.latency_s
    return prepared.rate_per_s * seconds


class PartitionedMemory:
    """Any thread may bind; background work belongs to the lanes' threads, all else to the event loop's."""

    def __init__(self, backend: Backend, arena_bytes: int, lanes: int) -> None:
        self.backend = backend
        self.executors = backend.executors(lanes)
        self.partitions = Partitions(arena_bytes, lanes=lanes)
        self.arena: DeviceArena[object] = backend.arena(arena_bytes)
        self.placed_models: dict[str, PlacedModel] = {}
        self.shared: SharedRegion | None = None
        """The region that all models share; None if each has a partition."""
        self._admitted = 0

    def share(self, sharing: Sharing) -> None:
        """Make one shared region of the arena without the workspace."""
        assert len(self.executors) == 1
        workspace_bytes = self.partitions.workspace_bytes
        region_bytes = self.partitions.arena_bytes - workspace_bytes
        self.partitions.put("(shared)", Extent(workspace_bytes, region_bytes))
        self.shared = SharedRegion(self.backend, sharing, self.arena, workspace_bytes, region_bytes)

    def least_busy_lane(self) -> int:
        """Return the lane with the least expected load."""
        sums = [0.0] * len(self.executors)
        for placed in self.placed_models.values():
            sums[placed.lane] += expected_load(placed.prepared, placed.plans)
        return sums.index(min(sums))

    def new_owner(self, model: ModelKey) -> str:
        """Return a unique owner name for one load of a version."""
        self._admitted += 1
        return f"{model.name}:{model.version}#{self._admitted}"

    def rooms(self, workspaces: Sequence[int], without: str | None = None) -> list[Memory]:
        """Return the largest free partition next to each of these workspaces that fits.

        The bytes of the owner `without` count as free.
        """
        partitions = copy.deepcopy(self.partitions)
        if without is not None:
            partitions.release(without)
        return partitions.rooms(workspaces)

    def bind(
        self,
        owner: str,
        prepared: Prepared,
        plans: Plans,
        extent: Extent,
        lane: int = 0,
        *,
        workspace_bytes: int | None = None,
        yields: bool = False,
    ) -> Programs:
        """Make programs of plans for an owner's partition. Raises InvalidPlan, UnsupportedPlan or MemoryExceeded.

        `workspace_bytes` is each lane's workspace when the programs run; None for the present one. Binding holds
        the interpreter lock; with `yields`, it sleeps for half of the time, so that serving threads can run.
        """
        each = self.partitions.workspace_bytes if workspace_bytes is None else workspace_bytes
        bases = Bases(partition=extent.offset, workspace=lane * each)
        programs: Programs = {}
        for bucket, plan in plans.items():
            start_s = time.perf_counter()
            profile = prepared.profiles[bucket]
            program = self.backend.build(prepared.lowered, plan, profile, self.arena, bases, prepared.store)
            programs[bucket] = replace(program, name=owner)  # two versions, or two loads of one, share no residents
            if yields:
                time.sleep(time.perf_counter() - start_s)
        return programs

    def bind_shared(self, prepared: Prepared, plans: Plans) -> Programs:
        """Make programs for the shared region, of plans with every parameter resident. Raises as `bind` does."""
        assert self.shared is not None
        lowered, profiles, store = prepared.lowered, prepared.profiles, prepared.store
        if any(placed.key.name == lowered.name for placed in self.placed_models.values()):
            version = f"{lowered.name} version {prepared.source.version}"
            lowered = replace(lowered, name=version)  # the region's key
        return {bucket: self.shared.add(lowered, plan, profiles[bucket], store) for bucket, plan in plans.items()}

    def add(self, owner: str, prepared: Prepared, plans: Plans, programs: Programs, lane: int = 0) -> PlacedModel:
        """Add a model whose residents are loaded, and return it."""
        lowered, config = prepared.lowered, prepared.source.config
        warn_of_interaction(lowered)
        warn_of_random_ops(lowered)
        warn_of_noise(prepared)
        most = max(programs).batch
        if config is not None and config.max_batch_size:
            most = min(most, config.max_batch_size)
        info = with_defaults(describe(lowered, prepared.source.version, most, prepared.source.labels), config)
        runner = self.executors[lane] if self.shared is None else self.shared
        servable = ProgramServable(info, programs, lowered.inputs, lowered.outputs, runner)
        self.placed_models[owner] = placed = PlacedModel(
            owner, prepared, plans, servable, lane, self.shared is not None
        )
        return placed

    def resident_load(self, programs: Programs, lane: int) -> BackgroundWork:
        """Return the work of a lane that loads a model's residents, which all buckets share."""
        pieces = self.executors[lane].load_in_pieces([programs[bucket] for bucket in sorted(programs)])
        return lambda: next(pieces, True) is True

    def remove(self, owner: str) -> None:
        """Release a model's bytes. The lanes must no longer use it; the caller closes its store."""
        self.partitions.release(owner)
        self.placed_models.pop(owner, None)

    def use(self) -> DeviceUse:
        """Return the use of the memory, and the busy time of the swap-in lanes if the device measures it."""
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
            extents=tuple(self._extents()),
            outside_bytes=self.backend.outside_bytes,
        )

    def _extents(self) -> Iterator[ArenaExtent]:
        """Yield the arena's address map: each lane's workspace, the partitions, and what is free."""
        partitions = self.partitions
        for lane in range(partitions.lanes):
            yield ArenaExtent("workspace", lane * partitions.workspace_bytes, partitions.workspace_bytes)
        for owner, extent in partitions.held.items():
            placed = self.placed_models.get(owner)
            use: Literal["partition", "shared"] = "partition" if self.shared is None else "shared"
            yield ArenaExtent(use, extent.offset, extent.nbytes, None if placed is None else placed.key)
        for gap in partitions.gaps():
            yield ArenaExtent("free", gap.offset, gap.nbytes)

    def close(self) -> None:
        """Release everything. The engine must have stopped."""
        self.backend.close()
        self.arena.close()
        for placed in self.placed_models.values():
            placed.prepared.store.close()
