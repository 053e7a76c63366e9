"""Loads a repository at start: lowers, profiles and plans every model, and places the programs in one arena."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from planner.errors import CohabitError
from planner.library import Library
from planner.sizing.deployment import Deployment, ModelDemand, Room, laid_out
from runtime.shared_region.sharing import SHARINGS
from server.config.config import ServeConfig
from server.engine.servable import ProgramServable
from server.errors import load_reason
from server.ipc.model import DeviceUse, ModelFootprint, ModelKey
from server.models import planning
from server.models.known_models import Plans
from server.models.prepared import (
    OnProgress,
    Prepared,
    cache_of,
    open_backend,
    prepare,
    prepare_in_worker,
    warn_of_ignored_config,
    warn_without_packing,
)
from server.models.preparer import ModelPreparer, workers_of
from server.models.repository import ModelSource
from server.models.worker_process import WorkerProcesses, call_here
from server.placement.device_memory import PartitionedMemory, PlacedModel, expected_load
from server.placement.lane_choice import assign_lanes
from server.placement.memory_map import PlacedRow, draw
from server.placement.partitions import Extent
from server.placement.placement import ModelPlacement

_log = logging.getLogger("cohabit.loader")


@dataclass(slots=True)
class Loaded:
    """The loaded models and their memory; `close` releases it."""

    memory: PartitionedMemory
    deployment: Deployment
    placement: ModelPlacement | None = None
    failures: dict[ModelKey, str] = field(default_factory=dict)

    @property
    def placed_models(self) -> dict[ModelKey, PlacedModel]:
        """In the order of the deployment's entries."""
        return {placed.key: placed for placed in self.memory.placed_models.values()}

    @property
    def servables(self) -> dict[ModelKey, ProgramServable]:
        return {key: placed.servable for key, placed in self.placed_models.items()}

    @property
    def footprints(self) -> Mapping[ModelKey, ModelFootprint]:
        return {key: placed.footprint for key, placed in self.placed_models.items()}

    @property
    def memory_map(self) -> str:
        placed_models = self.placed_models.values()
        rows = [PlacedRow(placed.key, placed.prepared.weight_bytes, placed.lane) for placed in placed_models]
        return draw(self.deployment, rows) if rows else ""

    def use(self) -> DeviceUse:
        return self.memory.use()

    def close(self) -> None:
        self.memory.close()


def load(sources: Sequence[ModelSource], config: ServeConfig, on_progress: OnProgress) -> Loaded:
    """Load every model; those that fail are in `failures`, with the reason.

    Raises InfeasibleBudget, which names the least sufficient memory, if the memory is too small.
    """
    backend = open_backend(config)
    warn_without_packing(config)
    failures: dict[ModelKey, str] = {}
    prepared: list[Prepared] = []
    with closing(workers_of(config, 1)) as workers:
        for source in sources:
            try:
                if config.engine == "process":
                    on_progress(source.name, "lowering and measuring")
                    prepared.append(prepare_in_worker(source, config, backend, workers))
                else:
                    prepared.append(prepare(source, config, backend, on_progress))
                warn_of_ignored_config(source, config.device)
            except CohabitError as error:
                failures[source.key] = load_reason(source.name, error)
            except Exception as error:
                _log.exception("model failed to load", extra={"fields": source.key.fields})
                failures[source.key] = f"unexpected {type(error).__name__}: {error}"
        memory_bytes = config.memory.of(sum(p.weight_bytes for p in prepared))
        deployment = _deployment([p.demand for p in prepared], memory_bytes, config, workers, on_progress)
    # If no model can be loaded later, free memory is not allocated.
    arena_bytes = deployment.memory_bytes if config.model_control != "none" else deployment.taken_bytes
    memory = PartitionedMemory(backend, deployment.memory_bytes, arena_bytes, config.compute_lanes)
    placement = None
    if config.model_control != "none":
        placement = ModelPlacement(memory, ModelPreparer(config, backend), all_resident=config.layout == "resident")
    loaded = Loaded(memory, deployment, placement, failures)
    _place(loaded, prepared, on_progress)
    return loaded


def _deployment(
    models: Sequence[ModelDemand],
    memory_bytes: int,
    config: ServeConfig,
    workers: WorkerProcesses,
    on_progress: OnProgress,
) -> Deployment:
    """Read how memory is divided, and the plans, or have both made. Raises CohabitError if memory is too small."""
    call = workers.call if config.engine == "process" else call_here
    library, layout, lanes = Library(cache_of(config)), config.layout, config.compute_lanes
    division = library.division(models, memory_bytes, layout, lanes)
    if division is None:
        on_progress("planning", "dividing the memory")
        division = call(planning.divide, models, memory_bytes, layout, lanes)
        library.store_division(models, memory_bytes, layout, lanes, division)
    plans = []
    for done, (model, partition_bytes) in enumerate(zip(models, division.partition_bytes, strict=True)):
        room = Room(division.workspace_bytes, partition_bytes)
        known: Plans | None = library.plans(model, room, config.search)
        if known is None:
            on_progress("planning", f"{done} of {len(models)}, {model.name}")
            known = call(planning.plan_model, model, room, library, config.search)
        plans.append(known)
    return laid_out(layout, models, division, plans, lanes)


def _place(loaded: Loaded, prepared: Sequence[Prepared], on_progress: OnProgress) -> None:
    """Bind every plan, and load the residents."""
    memory, deployment = loaded.memory, loaded.deployment
    memory.partitions.grow_workspace(deployment.workspace_bytes)
    unused = deployment.memory_bytes - memory.partitions.arena_bytes
    if deployment.layout in SHARINGS and prepared:
        memory.share(SHARINGS[deployment.layout])
    loads = [expected_load(model, entry.plans) for entry, model in zip(deployment.entries, prepared, strict=True)]
    lanes = assign_lanes(loads, deployment.lanes)
    for entry, model, lane in zip(deployment.entries, prepared, lanes, strict=True):
        on_progress(entry.name, "bringing residents in")
        extent = Extent(entry.partition_offset - unused, entry.partition_bytes)
        owner = memory.new_owner(model.source.key)
        if memory.shared is not None:
            memory.add(owner, model, entry.plans, memory.bind_shared(model, entry.plans))
            continue
        memory.partitions.put(owner, extent)
        programs = memory.bind(owner, model, entry.plans, extent, lane)
        memory.add(owner, model, entry.plans, programs, lane)
        residents = memory.resident_load(programs, lane)
        while not residents.advance():
            pass
