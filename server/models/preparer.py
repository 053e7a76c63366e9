"""Prepares and plans models while others are served: long work in worker processes, short work in a thread."""

import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import suppress

from cohabit.planner.library import Library
from cohabit.planner.memory import Memory
from cohabit.runtime.backend import Backend
from cohabit.runtime.errors import StoreChanged
from cohabit.runtime.lowering.archive_file import fingerprint
from cohabit.runtime.lowering.lower import NotCached
from cohabit.runtime.profiling.profile import forget
from cohabit.server.config.bundle import Bundle
from cohabit.server.config.config import ServeConfig, cache_of
from cohabit.server.models import planning
from cohabit.server.models.bundling import room_in
from cohabit.server.models.known_models import MOST_BYTES, MOST_MODELS, KnownModel, LeastRecentlyUsed, Plans
from cohabit.server.models.prepared import (
    Prepared,
    key_of,
    measure_in_worker,
    noted_archive,
    prepare,
    prepare_in_worker,
    prepare_known,
)
from cohabit.server.models.repository import ModelSource
from cohabit.server.models.worker_process import WorkerProcesses, planning_workers, preparing_workers

_PAUSE, _LONGEST_PAUSE_S = 2.0, 0.5
"""After opening a cached model, the load pauses for this multiple of the time taken: a client that loads small
models in a loop uses at most a third of the interpreter's time."""


class ModelPreparer:
    """All methods block. Any thread may call them except the event loop's and the compute lanes'."""

    def __init__(self, config: ServeConfig, backend: Backend, workers: WorkerProcesses | None = None) -> None:
        """`workers` are perhaps started already."""
        self._config = config
        self.memory = config.memory
        """For all models. With --process-memory, the loader replaces it by what it has measured."""
        self._backend = backend
        self._library = Library(cache_of(config))
        self.workers = workers or preparing_workers(config)
        self.planners = planning_workers(config)
        self.quick_planners = planning_workers(config, quick=True)
        self._measuring = threading.Lock()
        self._searching = threading.Lock()
        """One full search at a time, so that quick ones need not wait."""
        self._cache = LeastRecentlyUsed[Hashable, KnownModel](MOST_MODELS, MOST_BYTES, lambda known: known.nbytes)
        self._lock = threading.Lock()
        """Guards the cache and its entries."""

    def prepare(self, source: ModelSource, *, quick: bool | None = None) -> Prepared:
        """Open a model, after lowering and measuring it if it is not cached. Raises CohabitError.

        With `quick`, its profiles may be provisional; by default, as configured.
        """
        quick = self._config.plans_later if quick is None else quick
        archive = noted_archive(source, self._config)
        with self._lock:
            known = None if archive is None else self._cache.get(key_of(source, archive, self._config))
        if known is not None and known.is_unchanged and not known.is_provisional:
            start_s = time.perf_counter()
            with suppress(StoreChanged):  # it is prepared anew
                prepared = prepare_known(source, known, self._config, self._backend)
                time.sleep(min(_PAUSE * (time.perf_counter() - start_s), _LONGEST_PAUSE_S))
                return prepared
        prepared = prepare_in_worker(source, self._config, self._backend, self.workers, quick=quick)
        self._remember(prepared)
        return prepared

    def bundled(self, source: ModelSource, bundle: Bundle) -> Prepared:
        """Open a model of a bundle with its plans, and make nothing. Raises NotCached, which names damaged files."""
        room, config = room_in(bundle, source), self._config
        assert config.bundle is not None
        try:
            archive = fingerprint(source.path)
            prepared = prepare(source, config, self._backend, lambda *_: None, archive=archive)
            if self.known_plans(prepared, room) is None:
                prepared.store.close()
                raise NotCached(f"{source.name}: the bundle has no undamaged plans of it")
        except NotCached as error:
            files = "; ".join(bundle.damaged(config.bundle)) or "its files are as they were written"
            raise NotCached(f"{error} ({files}); copy or export the bundle again") from error
        return prepared

    def measured(self, prepared: Prepared, *, again: bool = False) -> Prepared:
        """Return the model with measured profiles instead of provisional ones, one model at a time.

        Two at once would measure each other. With `again`, it is measured even if it has been. Raises CohabitError.
        """
        if not (prepared.known.is_provisional or again):
            return prepared
        with self._measuring:
            if again:
                forget(prepared.profiles.values(), cache_of(self._config) / "profiles")
            measured = measure_in_worker(prepared, self._config, self.workers)
        self._remember(measured)
        return measured

    def _remember(self, prepared: Prepared) -> None:
        key = key_of(prepared.source, prepared.lowered.archive, self._config)
        with self._lock:
            self._cache[key] = prepared.known

    def known_plans(self, prepared: Prepared, room: Memory) -> Plans | None:
        """Return the best plans for a room, if they are cached."""
        cached = prepared.known.plans
        with self._lock:
            known = cached.get(room)
        if known is not None:
            return known
        plans = self._library.plans(prepared.demand, room, self._config.search)
        if plans is not None:
            with self._lock:
                cached[room] = plans
        return plans

    def is_best(self, prepared: Prepared, plans: Plans) -> bool:
        """Whether these plans are the result of a full search, for a measured model."""
        plan = plans[min(plans)]
        with self._lock:
            best = prepared.known.plans.get(plan.memory)
        return best is not None and best[min(plans)] is plan and not prepared.known.is_provisional

    def quick_plans(self, prepared: Prepared, room: Memory) -> Plans:
        """Return plans to start with: the library's, or else the first feasible ones."""
        return self.known_plans(prepared, room) or self.quick_planners.call(
            planning.plan_model, prepared.demand, room, None, self._config.search, quick=True
        )

    def best_plans(self, prepared: Prepared, room: Memory) -> Plans:
        """Return the library's plans, after a full search if necessary."""
        plans = self.known_plans(prepared, room)
        if plans is None:
            with self._searching:
                plans = self.planners.call(
                    planning.plan_model, prepared.demand, room, self._library, self._config.search
                )
            with self._lock:
                prepared.known.plans[room] = plans  # the same objects that programs are made of
        return plans

    def workspaces(self, prepared: Prepared, memory_bytes: int) -> list[int]:
        """Return the sizes of a workspace that are worth trying for a model."""
        return self.quick_planners.call(planning.workspaces_for, prepared.demand, memory_bytes)

    def plan_next_start(self, models: Sequence[Prepared]) -> None:
        """Store how memory is divided among these models at the next start, and their plans. Raises WorkerFailed."""
        layout, lanes = self._config.layout, self._config.compute_lanes
        memory_bytes = self.memory.of(sum(model.weight_bytes for model in models))
        demands = [model.demand for model in models]
        if self._library.division(demands, memory_bytes, layout, lanes) is None:
            division = self.planners.call(planning.divide, demands, memory_bytes, layout, lanes)
            self._library.store_division(demands, memory_bytes, layout, lanes, division)
            for model, partition_bytes in zip(models, division.partition_bytes, strict=True):
                self.best_plans(model, Memory(division.workspace_bytes, partition_bytes))

    def release(self) -> None:
        """End the worker processes that have nothing to do."""
        for processes in (self.workers, self.planners, self.quick_planners):
            processes.release()

    def close(self) -> None:
        """End the worker processes."""
        for processes in (self.workers, self.planners, self.quick_planners):
            processes.close()


def is_better(plans: Plans, than: Plans) -> bool:
    """Whether `plans` have a lower predicted latency than `than` in any bucket."""
    pairs = [(plans[bucket].provenance, than[bucket].provenance) for bucket in plans]
    return any(new is not None and old is not None and new.latency_s < old.latency_s for new, old in pairs)
