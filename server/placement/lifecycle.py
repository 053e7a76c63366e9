"""Loads, replaces and unloads models while the others are served."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from planner.errors import CohabitError
from server.config.config import ServeConfig
from server.engine.compute_lanes import ComputeLanes
from server.errors import ControlOff, LoadFailed, NotInRepository, RepositoryError, ShuttingDown, load_reason
from server.models.registry import Registry
from server.models.repository import ModelSource, source_of, warn_of_ignored_config
from server.models.worker_process import MOST_PREPARING
from server.protocol.model_config import parse_config

if TYPE_CHECKING:
    from server.placement.device_memory import PlacedModel
    from server.placement.placement import ModelPlacement

_log = logging.getLogger("cohabit.lifecycle")


class Lifecycle:
    """Loads and unloads models for clients and the poller. Belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, registry: Registry, lanes: ComputeLanes) -> None:
        self._config = config
        self._registry = registry
        self._lanes = lanes
        self._placement: ModelPlacement | None = None
        self._opened = asyncio.Event()
        self._serving: dict[str, PlacedModel] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._operations: set[asyncio.Task[None]] = set()
        self._preparing = ThreadPoolExecutor(MOST_PREPARING, thread_name_prefix="preparing")
        """Threads that wait for models to be prepared; loads that take long must not take those of others."""

    def open(self, placement: "ModelPlacement", placed_models: Mapping[str, "PlacedModel"]) -> None:
        """Begin, with the models that were loaded at the start."""
        placement.open(self._lanes, self)
        self._placement = placement
        self._serving = dict(placed_models)
        self._opened.set()

    def is_serving(self, model: str) -> bool:
        return model in self._serving

    async def close(self) -> None:
        """Cancel pending operations; models stay as they are."""
        if self._placement is not None:
            await self._placement.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        for operation in self._operations:
            operation.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)

    async def load(self, model: str, config: str | None = None) -> None:
        """Load a model's newest version; returns once it is served. The present version is served until then.

        `config` is a ModelConfig in JSON that replaces the model's config.pbtxt. Raises ControlOff unless the mode
        is explicit, NotInRepository if the repository has nothing to load, or LoadFailed; both have the reason, and
        the present version is still served.
        """
        self._require_explicit()
        try:
            override = None if config is None else await asyncio.to_thread(parse_config, config)
            source = await asyncio.to_thread(source_of, self._config.repository, model, override)
        except RepositoryError as error:
            kind = NotInRepository if config is None else LoadFailed
            raise kind(model, load_reason(model, error)) from error
        if source is None:
            raise NotInRepository(model)
        await self.load_source(source)

    async def unload(self, model: str) -> None:
        """Refuse new requests for a model, answer the present ones, and release its memory.

        Does nothing for a model that is not loaded. Raises ControlOff unless the mode is explicit.
        """
        self._require_explicit()
        await self.unload_model(model)

    async def load_source(self, source: ModelSource) -> None:
        """Load a version of a model, which replaces the present one. Raises LoadFailed."""
        await self._run_shielded(self._load_source(source))

    async def unload_model(self, model: str) -> None:
        """Answer a model's requests, and release its memory."""
        await self._run_shielded(self._unload_model(model))

    async def _run_shielded(self, operation: Coroutine[None, None, None]) -> None:
        """Run an operation to its end even if the client disconnects: models would be left half moved."""
        task = asyncio.create_task(operation)
        self._operations.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, operation: asyncio.Task[None]) -> None:
        self._operations.discard(operation)
        if not operation.cancelled():
            operation.exception()  # retrieved, because it was logged and the client may have disconnected

    async def _load_source(self, source: ModelSource) -> None:
        placement = await self._opened_placement()
        async with self._lock(source.name):
            if source.name not in self._serving:
                self._registry.loading(source.name, source.version, source.config, source.override)
            try:
                await self._load(placement, source)
            except (CohabitError, OSError) as error:
                _log.warning("model not loaded", extra={"fields": {"model": source.name, "reason": str(error)}})
                raise self._failed(source, load_reason(source.name, error)) from error
            except Exception as error:
                _log.exception("model not loaded", extra={"fields": {"model": source.name}})
                raise self._failed(source, f"unexpected {type(error).__name__}: {error}") from error
            except asyncio.CancelledError:
                self._failed(source, "loading was cancelled")
                raise

    async def _unload_model(self, model: str) -> None:
        placement = await self._opened_placement()
        async with self._lock(model):
            placed = self._serving.pop(model, None)
            if placed is None:
                self._registry.unwanted(model)
                return
            self._registry.unloading(model)
            await placement.retire(placed, self._config.exit_timeout_s)
            self._registry.unloaded(model)
            _log.info("model unloaded", extra={"fields": {"model": model}})

    async def _load(self, placement: "ModelPlacement", source: ModelSource) -> None:
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._preparing, placement.preparer.prepare, source)
        old = self._serving.get(source.name)
        placed: PlacedModel | None = None
        try:
            placed = await placement.place(prepared, old, self._stop_old)
        finally:
            if placed is None:
                prepared.store.close()
        warn_of_ignored_config(source, self._config.device)
        statistics = self._registry.loaded(placed.servable, placed.footprint, source.config, source.override)
        self._lanes.add(placed.servable, statistics, source.policy, placed.lane)
        self._serving[source.name] = placed
        if old is not None and old.owner in placement.memory.placed_models:
            await self._lanes.finish(source.name, self._config.exit_timeout_s, older_only=True)
            await placement.release(old)
        _log.info("model loaded", extra={"fields": {"model": source.name, "version": source.version}})

    def _failed(self, source: ModelSource, reason: str) -> LoadFailed:
        """Record a failed load, unless another version is still served; returns the error."""
        if source.name not in self._serving:
            self._registry.failed(source.name, reason, source.version)
        return LoadFailed(source.name, f"version {source.version} is at UNAVAILABLE state: {reason}")

    async def _stop_old(self, old: "PlacedModel") -> None:
        """Stop serving a version before its replacement is loaded, because memory has no room for both."""
        source = old.prepared.source
        self._registry.loading(source.name, source.version, source.config, source.override)
        self._serving.pop(old.name, None)
        await self._lanes.finish(old.name, self._config.exit_timeout_s)

    def changed(self, placed: "PlacedModel") -> None:
        if self._serving.get(placed.name) is placed:
            self._registry.moved(placed.name, placed.footprint)

    def lost(self, placed: "PlacedModel", reason: str) -> None:
        if self._serving.get(placed.name) is placed:
            del self._serving[placed.name]
            self._registry.failed(placed.name, f"it could not be moved: {reason}")

    async def _opened_placement(self) -> "ModelPlacement":
        if self._lanes.draining:
            raise ShuttingDown
        await self._opened.wait()
        assert self._placement is not None
        return self._placement

    def _require_explicit(self) -> None:
        if self._config.model_control != "explicit":
            raise ControlOff(self._config.model_control)

    def _lock(self, model: str) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())
