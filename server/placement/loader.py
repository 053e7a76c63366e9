"""Loads a repository at start: lowers, profiles and plans every model, and places the programs in one arena."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cohabit.planner.errors import CohabitError
from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.planner.sizing.deployment import Deployment, Division, laid_out
from cohabit.runtime.backend import Backend
from cohabit.runtime.heap import KEPT_BYTES, keep_freed_memory
from cohabit.runtime.shared_region.sharing import SHARINGS
from cohabit.server.config.bundle import Bundle
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.config.sizes import FixedSize
from cohabit.server.errors import load_reason
from cohabit.server.ipc.model import DeviceUse, ModelKey
from cohabit.server.log import log_internal_error
from cohabit.server.models import planning
from cohabit.server.models.bundling import fitting_bundle, room_in
from cohabit.server.models.prepared import OnProgress, Prepared, open_backend, prepare, warn_without_packing
from cohabit.server.models.preparer import ModelPreparer
from cohabit.server.models.repository import ModelSource, warn_of_ignored_config
from cohabit.server.models.worker_process import MOST_AT_START, PLANNING, WorkerProcesses, call_here, failed_stage
from cohabit.server.placement.device_memory import PartitionedMemory, PlacedModel, expected_load
from cohabit.server.placement.lane_assignment import assign_lanes
from cohabit.server.placement.memory_map import draw
from cohabit.server.placement.partitions import Extent
from cohabit.server.placement.placement import ModelPlacement
from cohabit.server.placement.process_memory import measure_process_memory

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
    def memory_map(self) -> str:
        placed_models = list(self.placed_models.values())
        return draw(self.deployment, placed_models) if placed_models else ""

    def use(self) -> DeviceUse:
        return self.memory.use()

    def close(self) -> None:
        self.memory.close()


def load(
    sources: Sequence[ModelSource],
    config: ServeConfig,
    on_progress: OnProgress,
    workers: WorkerProcesses | None = None,
) -> Loaded:
    """Load every model; those that fail are in `failures`, with the reason.

    `workers` have been started if models will have to be prepared. Raises InfeasibleBudget, which names the least
    sufficient memory, if the memory is too small.
    """
    if config.process_memory_bytes is not None:
        keep_freed_memory(0)
    backend = open_backend(config)
    warn_without_packing(config)
    bundle = None if config.bundle is None else fitting_bundle(config.bundle, config)
    preparer = ModelPreparer(config, backend, workers)
    if workers is not None:
        preparer.quick_planners.start(PLANNING)
    try:
        prepared, failures = _prepared(sources, config, backend, preparer, bundle, on_progress)
        preparer.workers.release()
        memory_bytes = _memory_bytes(prepared, config, preparer, bundle)
        deployment = _deployment(prepared, memory_bytes, config, preparer, bundle, on_progress)
        if config.process_memory_bytes is not None:
            keep_freed_memory(KEPT_BYTES)  # the next inference's activations find their pages
        # If no model can be loaded later, free memory is not allocated.
        arena_bytes = deployment.memory_bytes if config.model_control != "none" else deployment.taken_bytes
        memory = PartitionedMemory(backend, arena_bytes, config.compute_lanes)
        placement = None
        if config.has_partitions and bundle is None:
            placement = ModelPlacement(memory, preparer, all_resident=config.layout == "resident")
        loaded = Loaded(memory, deployment, placement, failures)
        (preparer.quick_planners if config.plans_later else preparer).release()
        _place(loaded, prepared, on_progress)
        if backend.outside_bytes is not None:
            fields = {"arena_bytes": arena_bytes, "outside_bytes": backend.outside_bytes}
            _log.info("device memory in the arena and outside of it", extra={"fields": fields})
    except BaseException:
        preparer.close()
        raise
    if loaded.placement is None:
        preparer.close()
    return loaded


def _prepared(
    sources: Sequence[ModelSource],
    config: ServeConfig,
    backend: Backend,
    preparer: ModelPreparer,
    bundle: Bundle | None,
    on_progress: OnProgress,
) -> tuple[list[Prepared], dict[ModelKey, str]]:
    """Return the models that could be prepared, in order, and why the others could not."""
    progress = _TimeLeft(sources)

    def one(source: ModelSource) -> Prepared | str:
        try:
            if bundle is not None:
                on_progress(source.name, f"opening{progress.left}")
                prepared = preparer.bundled(source, bundle)
            elif config.prepares_in_workers:
                on_progress(source.name, f"lowering{progress.left}")
                prepared = preparer.prepare(source, quick=True)
            else:
                prepared = prepare(source, config, backend, on_progress)
            warn_of_ignored_config(source, config.device)
        except CohabitError as error:
            return load_reason(source.name, error)
        except Exception as error:
            return f"{failed_stage(error)}: {log_internal_error(_log, model=source.name)}"
        finally:
            progress.done(source)
        return prepared

    if config.prepares_in_workers:
        with ThreadPoolExecutor(MOST_AT_START, thread_name_prefix="preparing") as pool:
            results = list(pool.map(one, sources))
        if not config.plans_later:
            results = [_measured(result, preparer, on_progress) for result in results]
    else:
        results = [one(source) for source in sources]
    prepared = [result for result in results if isinstance(result, Prepared)]
    failures = {s.key: result for s, result in zip(sources, results, strict=True) if isinstance(result, str)}
    return prepared, failures


def _measured(prepared: Prepared | str, preparer: ModelPreparer, on_progress: OnProgress) -> Prepared | str:
    """Measure a model while no other is prepared; returns why it cannot be measured."""
    if isinstance(prepared, str) or not prepared.known.is_provisional:
        return prepared
    on_progress(prepared.source.name, "measuring")
    try:
        return preparer.measured(prepared)
    except CohabitError as error:
        prepared.store.close()
        return load_reason(prepared.source.name, error)


_LEAST_DONE = 0.25
"""Share of the archives' bytes from which on the time for the others is estimated: small models come first as often as
not, and would stand for large ones."""


class _TimeLeft:
    """Estimates when the models of the start are prepared, from the sizes of their archives. Any thread."""

    def __init__(self, sources: Sequence[ModelSource], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start_s = clock()
        self._all_bytes = {source.key: source.state.nbytes if source.state else 0 for source in sources}
        self._left_bytes = dict(self._all_bytes)

    def done(self, source: ModelSource) -> None:
        del self._left_bytes[source.key]

    @property
    def left(self) -> str:
        """How many models are done, and the time that the others will take, as text; empty while none is.

        The time is left out until enough is done to tell.
        """
        done = len(self._all_bytes) - len(self._left_bytes)
        if not done:
            return ""
        left_bytes, all_bytes = sum(self._left_bytes.values()), sum(self._all_bytes.values())
        done_bytes = all_bytes - left_bytes
        if done_bytes < _LEAST_DONE * all_bytes or not done_bytes:
            return f", {done} of {len(self._all_bytes)} done"
        left_s = (self._clock() - self._start_s) * left_bytes / done_bytes
        return f", {done} of {len(self._all_bytes)} done, about {left_s:.0f} s left"


def _memory_bytes(
    models: Sequence[Prepared], config: ServeConfig, preparer: ModelPreparer, bundle: Bundle | None
) -> int:
    """Return the memory for all models. Raises ConfigError if --process-memory leaves too little."""
    if config.process_memory_bytes is None:
        return config.memory.of(sum(model.weight_bytes for model in models))
    measured = measure_process_memory(config.process_memory_bytes, models, config)
    if bundle is not None:
        measured.require(bundle.memory_bytes)
        return bundle.memory_bytes
    nbytes, layout, lanes = measured.models_bytes, config.layout, config.compute_lanes
    demands = [model.demand for model in models]
    if Library(cache_of(config)).division(demands, nbytes, layout, lanes) is None:
        call = call_here if config.engine == "in-process" else preparer.quick_planners.call
        measured.require(call(planning.least_memory, demands, layout, lanes))
    preparer.memory = FixedSize(nbytes)
    return nbytes


def _deployment(
    models: Sequence[Prepared],
    memory_bytes: int,
    config: ServeConfig,
    preparer: ModelPreparer,
    bundle: Bundle | None,
    on_progress: OnProgress,
) -> Deployment:
    """Read how memory is divided, and the plans, or have both made. Raises CohabitError if memory is too small.

    Plans that are made may be quick ones, if the configuration allows that; all others are noted as known.
    """
    call_quickly, call = preparer.quick_planners.call, preparer.planners.call
    if config.engine == "in-process":
        call_quickly, call = call_here, call_here
    library, layout, lanes = Library(cache_of(config)), config.layout, config.compute_lanes
    demands = [model.demand for model in models]
    division = None
    if bundle is not None:
        rooms = [room_in(bundle, model.source) for model in models]
        division = Division(memory_bytes, bundle.workspace_bytes, tuple(room.partition_bytes for room in rooms))
    division = division or library.division(demands, memory_bytes, layout, lanes)
    if division is None:
        on_progress("planning", "dividing the memory")
        division = call_quickly(planning.divide, demands, memory_bytes, layout, lanes)
        library.store_division(demands, memory_bytes, layout, lanes, division)
    plans = []
    for done, (model, partition_bytes) in enumerate(zip(models, division.partition_bytes, strict=True)):
        room = Memory(division.workspace_bytes, partition_bytes)
        found = preparer.known_plans(model, room)
        if found is None:
            on_progress("planning", f"{done} of {len(models)}, {model.source.name}")
        if found is None and config.plans_later:
            found = call_quickly(planning.plan_model, model.demand, room, None, config.search, quick=True)
        else:
            found = found or call(planning.plan_model, model.demand, room, library, config.search)
            model.known.plans[room] = found  # the same objects that programs are made of
        plans.append(found)
    return laid_out(layout, demands, division, plans, lanes)


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
        while not residents():
            pass
