"""The device's memory: a partition for each model, and a workspace for each compute lane."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from cohabit.planner.shapes import Bucket
from cohabit.runtime.backend import Backend, OpenLayout, SharedLayout
from cohabit.runtime.binding.program import Bases, Program
from cohabit.runtime.lowering.weights import BLOCK_BYTES
from cohabit.runtime.memory import DeviceArena
from cohabit.server.config.machine import resident_bytes
from cohabit.server.deploy.model import Model, Plans, Programs, partitions_of
from cohabit.server.deploy.notices import (
    log_stored,
    warn_of_changed_inputs,
    warn_of_interaction,
    warn_of_random_ops,
    warn_of_validation,
)
from cohabit.server.deploy.partitions import Extent, Partitions
from cohabit.server.engine.device_thread import BackgroundWork
from cohabit.server.engine.servable import ProgramServable, describe
from cohabit.server.ipc.model import ArenaExtent, DeviceUse, ModelKey, lane_name
from cohabit.server.triton.model_config import with_defaults
from cohabit.server.triton.sequences import with_sequences

_SHARED = "(shared)"
"""Owner of the region that all models share."""


class PartitionedMemory:
    """Any thread may call `bind`. Background work belongs to the lanes' threads, all else to the event loop's."""

    def __init__(self, backend: Backend, lanes: int) -> None:
        self.backend = backend
        self.executors = backend.executors(lanes)
        self.partitions = Partitions(0, lanes=lanes)
        self.arena: DeviceArena[object] | None = None
        """None until `open`."""
        self.models: dict[str, Model] = {}
        """Loaded models, by load id (`Model.load_id`)."""
        self.shared: SharedLayout | None = None
        """The region that all models share; None if each has a partition."""
        self._admitted = 0

    def open(self, arena_bytes: int) -> None:
        """Allocate the arena, in whole blocks: partitions end with it, and bits depend on the alignment of weights.

        Raises MemoryExceeded.
        """
        whole_bytes = arena_bytes // BLOCK_BYTES * BLOCK_BYTES
        self.arena = self.backend.arena(whole_bytes)
        self.partitions.arena_bytes = whole_bytes

    def share(self, open_layout: OpenLayout) -> None:
        """Make the arena, except for the workspace, one shared region."""
        assert len(self.executors) == 1
        assert self.arena is not None
        workspace_bytes = self.partitions.workspace_bytes
        region_bytes = self.partitions.arena_bytes - workspace_bytes
        self.partitions.put(_SHARED, Extent(workspace_bytes, region_bytes))
        self.shared = open_layout(self.backend, self.arena, workspace_bytes, region_bytes)

    def assign_lanes(self, models: Sequence[Model]) -> None:
        """Assign planned models to compute lanes, families as a whole, counting the load of loaded models."""
        busy = [0.0] * len(self.executors)
        lanes: dict[str, int] = {}
        for model in self.models.values():
            busy[model.lane] += model.expected_load
            lanes[model.partition_id] = model.lane
        new = partitions_of(model for model in models if model.partition_id not in lanes)
        loads = [sum(model.expected_load for model in family) for family in new.values()]
        lanes |= zip(new, assign_lanes(loads, busy), strict=True)
        for model in models:
            model.lane = lanes[model.partition_id]

    def new_load_id(self, model: ModelKey) -> str:
        """Return a unique load id for a version."""
        self._admitted += 1
        return f"{model.name}:{model.version}#{self._admitted}"

    def bind(
        self,
        model: Model,
        plans: Plans,
        extent: Extent,
        programs: dict[Bucket, Program],
        *,
        workspace_bytes: int | None = None,
        throttle: bool = False,
    ) -> None:
        """Add programs that bind a model's plans to an extent. Raises InvalidPlan, UnsupportedPlan or MemoryExceeded.

        The caller releases `programs` also after an error: those made until then have pinned memory.

        `workspace_bytes` is the size of each lane's workspace when the programs run; None for the current size.
        Binding holds the interpreter lock; with `throttle`, it sleeps half of the time so that serving threads can run.
        """
        assert self.arena is not None
        each = self.partitions.workspace_bytes if workspace_bytes is None else workspace_bytes
        bases = Bases(partition=extent.offset, workspace=model.lane * each)
        for bucket, plan in plans.items():
            start_s = time.perf_counter()
            profile = model.profiles[bucket]
            program = self.backend.build(model.lowered, plan, profile, self.arena, bases, model.store)
            programs[bucket] = replace(program, name=model.partition_id)
            if throttle:
                time.sleep(time.perf_counter() - start_s)

    def bind_shared(self, model: Model) -> Programs:
        """Bind plans in which every parameter is resident to the shared region. Raises as `bind` does."""
        assert self.shared is not None
        lowered, profiles, store = model.lowered, model.profiles, model.store
        if any(other.key.name == lowered.name for other in self.models.values()):
            version = f"{lowered.name} version {model.key.version}"
            lowered = replace(lowered, name=version)  # the region's key
        plans = model.plans.items()
        return {bucket: self.shared.add(lowered, plan, profiles[bucket], store) for bucket, plan in plans}

    def add(self, model: Model, programs: Programs) -> None:
        """Add a model whose residents are loaded, and create its servable."""
        lowered, config = model.lowered, model.source.config
        warn_of_interaction(lowered)
        warn_of_validation(lowered)
        log_stored(lowered)
        warn_of_changed_inputs(lowered)
        warn_of_random_ops(lowered)
        most = model.largest_batch
        if config is not None and config.max_batch_size:
            most = min(most, config.max_batch_size)
        whole = describe(lowered, model.key.version, most, model.source.labels)
        info = with_defaults(with_sequences(whole, model.sequences), config)
        runner = self.executors[model.lane] if self.shared is None else self.shared
        model.servable = ProgramServable(info, programs, lowered.inputs, lowered.outputs, lowered.dynamic, runner)
        model.shares = self.shared is not None
        self.models[model.load_id] = model

    def resident_load(self, programs: Programs, lane: int, *, in_place: bool = False) -> BackgroundWork:
        """Return background work that loads a model's residents, which all buckets share.

        With `in_place`, its family's are there already.
        """
        each = [programs[bucket] for bucket in sorted(programs)]
        pieces = self.executors[lane].load_in_pieces(each, in_place=in_place)
        return lambda: next(pieces, True) is True

    def release_programs(self, programs: Programs, lane: int) -> None:
        """Wait for a lane's copies, then release programs. Called on the lane's thread."""
        executor = self.executors[lane]
        executor.settle()
        for program in programs.values():
            executor.release(program)

    def extent_of(self, model: Model) -> Extent:
        """Return a model's partition, or the shared region."""
        return self.partitions.held[_SHARED if model.shares else model.partition_id]

    def family_of(self, model: Model) -> list[Model]:
        """Return the loaded models in a model's partition."""
        return partitions_of(self.models.values()).get(model.partition_id, [])

    @property
    def taken_bytes(self) -> int:
        """Bytes of workspaces and partitions."""
        return self.partitions.arena_bytes - self.partitions.free_bytes

    def remove(self, model: Model) -> None:
        """Release a model's bytes, unless its family has others. The lanes must no longer use it.

        The caller closes its store.
        """
        self.models.pop(model.load_id, None)
        if not self.family_of(model):
            self.partitions.release(model.partition_id)

    def use(self) -> DeviceUse:
        """Return memory use, and the swap-in lanes' busy time if the device measures it."""
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
            process_bytes=resident_bytes(),
        )

    def _extents(self) -> Iterator[ArenaExtent]:
        """Yield the arena's address map: each lane's workspace, then partitions, then free ranges."""
        partitions, models = self.partitions, partitions_of(self.models.values())
        for lane in range(partitions.lanes):
            yield ArenaExtent("workspace", lane * partitions.workspace_bytes, partitions.workspace_bytes)
        for key, extent in partitions.held.items():
            family = models.get(key, ())
            use: Literal["partition", "shared"] = "partition" if self.shared is None else "shared"
            first = family[0].key if family else None
            yield ArenaExtent(use, extent.offset, extent.nbytes, first, max(len(family) - 1, 0))
        for gap in partitions.gaps():
            yield ArenaExtent("free", gap.offset, gap.nbytes)

    def close(self) -> None:
        """Release everything. The engine must have stopped."""
        self.backend.close()
        if self.arena is not None:
            self.arena.close()
        for model in self.models.values():
            model.store.close()


def assign_lanes(loads: Sequence[float], busy: Sequence[float]) -> list[int]:
    """Return a lane for each model: longest processing time first, each to the least busy lane so far.

    `busy` is each lane's initial load.
    """
    chosen, sums = [0] * len(loads), list(busy)
    for model in sorted(range(len(loads)), key=lambda i: (-loads[i], i)):
        lane = sums.index(min(sums))
        chosen[model] = lane
        sums[lane] += loads[model]
    return chosen
