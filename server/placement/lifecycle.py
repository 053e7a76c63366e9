"""Loads, replaces and unloads models while the others are served."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from cohabit.planner.errors import CohabitError
from cohabit.server.config.config import ServeConfig
from cohabit.server.engine.compute_lanes import ComputeLanes
from cohabit.server.errors import (
    ControlOff,
    LoadFailed,
    NotInRepository,
    RepositoryError,
    ShuttingDown,
    load_reason,
)
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.model import ModelKey
from cohabit.server.log import log_internal_error
from cohabit.server.models.registry import Registry
from cohabit.server.models.repository import (
    Found,
    ModelSource,
    Unloadable,
    is_in_repository,
    versions_of,
    warn_of_ignored_config,
)
from cohabit.server.models.worker_process import MOST_PREPARING, failed_stage
from cohabit.server.placement.warmup import warm_up
from cohabit.server.triton.model_config import parse_config

if TYPE_CHECKING:
    from cohabit.server.placement.device_memory import PlacedModel
    from cohabit.server.placement.placement import ModelPlacement

_log = logging.getLogger("cohabit.lifecycle")


class Lifecycle:
    """Loads and unloads models for clients and the poller. Belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, registry: Registry, lanes: ComputeLanes) -> None:
        self._config = config
        self._registry = registry
        self._lanes = lanes
        self._placement: ModelPlacement | None = None
        self._opened = asyncio.Event()
        self._serving: dict[ModelKey, PlacedModel] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By model name, while operations of that model are under way."""
        self._operations: set[asyncio.Task[None]] = set()
        self._preparing = ThreadPoolExecutor(MOST_PREPARING, thread_name_prefix="preparing")
        """Threads that wait for models to be prepared; loads that take long must not take those of others."""

    def open(self, placement: "ModelPlacement", placed_models: Mapping[ModelKey, "PlacedModel"]) -> None:
        """Begin, with the models that were loaded at the start."""
        placement.open(self._lanes, self)
        self._placement = placement
        self._serving = dict(placed_models)
        self._opened.set()

    def is_serving(self, model: str) -> bool:
        """Whether any version of a model is served."""
        return any(key.name == model for key in self._serving)

    async def close(self) -> None:
        """Cancel pending operations; models stay as they are."""
        if self._placement is not None:
            await self._placement.close()
        self._preparing.shutdown(wait=False, cancel_futures=True)
        for operation in self._operations:
            operation.cancel()
        await asyncio.gather(*self._operations, return_exceptions=True)

    async def load(self, model: str, config: str | None = None) -> None:
        """Serve the versions of a model that its version policy asks for; returns once they are served.

        Versions that are served and have not changed stay as they are; others are unloaded in the end. `config` is
        a ModelConfig in JSON that replaces the model's config.pbtxt. Raises ControlOff unless the mode is explicit,
        NotInRepository if the repository has nothing to load, or LoadFailed; both have the reason, and what was
        served before is still served.
        """
        self._require_explicit()
        try:
            override = None if config is None else await asyncio.to_thread(parse_config, config)
            found = await asyncio.to_thread(versions_of, self._config.repository, model, override)
        except RepositoryError as error:
            raise NotInRepository(model, load_reason(model, error)) from error
        if not found:
            raise NotInRepository(model)
        await self.serve(model, found)
        await self.forget_removed()

    async def unload(self, model: str) -> None:
        """Refuse new requests for a model, answer the present ones, and release its memory.

        Does nothing for a model that is not loaded. Raises ControlOff unless the mode is explicit.
        """
        self._require_explicit()
        await self.serve(model, ())
        await self.forget_removed()

    async def forget_removed(self) -> None:
        """Forget the models and versions that are not served, and whose folders were removed."""
        repository, idle = self._config.repository, self._registry.idle()

        def removed() -> list[ModelEntry]:
            return [entry for entry in idle if not is_in_repository(repository, entry.name, entry.version)]

        for entry in await asyncio.to_thread(removed):
            self._registry.forget(entry)

    async def serve(self, model: str, found: Sequence[Found]) -> None:
        """Serve exactly these versions of a model, each of which has a number.

        Raises LoadFailed, which names the versions that cannot be loaded; then no version is unloaded, unless its
        memory was needed.
        """
        task = asyncio.create_task(self._serve(model, found))
        # It ends even if the client disconnects: models would be left half moved.
        self._operations.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, operation: asyncio.Task[None]) -> None:
        self._operations.discard(operation)
        if not operation.cancelled():
            operation.exception()  # retrieved, because it was logged and the client may have disconnected

    async def _serve(self, model: str, found: Sequence[Found]) -> None:
        if self._lanes.draining:
            raise ShuttingDown
        await self._opened.wait()
        placement = self._placement
        assert placement is not None
        versions = {entry.version for entry in found if entry.version is not None}
        async with self._locks.setdefault(model, asyncio.Lock()):
            surplus = [t for key, t in self._serving.items() if key.name == model and key.version not in versions]
            sources = [entry for entry in found if isinstance(entry, ModelSource) and not self._keep(entry)]
            for source in sources:
                if source.key not in self._serving:
                    self._registry.loading(source)
            failures = [self._failed(entry, entry.reason) for entry in found if isinstance(entry, Unloadable)]
            for source in reversed(sources):
                reason = await self._try_load(placement, source, surplus)
                if reason is not None:
                    failures.append(self._failed(source, reason))
            if failures:
                raise LoadFailed(model, "; ".join(failures))
            for placed in surplus:
                if self._serving.get(placed.key) is placed:
                    await self._retire(placement, placed)
            self._registry.request_only(model, versions)

    def _keep(self, source: ModelSource) -> bool:
        """Leave a version as it is if its file and configuration have not changed; False if it must be loaded."""
        present = self._serving.get(source.key)
        if present is None or not present.prepared.source.loads_as(source):
            return False
        present.prepared = replace(present.prepared, source=source)
        self._registry.configured(source)
        return True

    async def _try_load(
        self, placement: "ModelPlacement", source: ModelSource, surplus: Sequence["PlacedModel"]
    ) -> str | None:
        """Load a version; returns why it cannot be loaded, or None. Its memory may be that of a surplus version."""
        present = self._serving.get(source.key)
        old = present or next((t for t in surplus if self._serving.get(t.key) is t), None)
        try:
            await self._load(placement, source, old)
        except (CohabitError, OSError) as error:
            return load_reason(source.name, error)
        except Exception as error:
            return f"{failed_stage(error)}: {log_internal_error(_log, model=source.name)}"
        except asyncio.CancelledError:
            self._failed(source, "loading was cancelled")
            raise
        return None

    async def _load(self, placement: "ModelPlacement", source: ModelSource, old: "PlacedModel | None") -> None:
        loop = asyncio.get_running_loop()
        prepared = await loop.run_in_executor(self._preparing, placement.preparer.prepare, source)
        placed: PlacedModel | None = None
        try:
            placed = await placement.place(prepared, old, partial(self._make_way, source))
        finally:
            if placed is None:
                prepared.store.close()
            if old is not None and old.key != source.key and self._serving.get(old.key) is not old:
                self._registry.unloaded(old.key)
        warn_of_ignored_config(source, self._config.device)
        try:
            await warm_up(self._lanes[placed.lane], placed.servable, source)
        except Exception:
            await placement.release(placed)
            raise
        statistics = self._registry.loaded(placed.servable, source, placed.footprint)
        self._lanes.add(placed.servable, statistics, source.policy, placed.lane)
        self._serving[source.key] = placed
        if old is not None and old.key == source.key and old.owner in placement.memory.placed_models:
            await self._lanes.of(source.key).finish(source.key, self._config.exit_timeout_s, older_only=True)
            await placement.release(old)
        _log.info("model loaded", extra={"fields": source.key.fields})

    async def _retire(self, placement: "ModelPlacement", placed: "PlacedModel") -> None:
        """Refuse new requests for a version, answer the present ones, and release its memory."""
        del self._serving[placed.key]
        self._registry.unloading(placed.key)
        await placement.retire(placed, self._config.exit_timeout_s)
        self._registry.unloaded(placed.key)
        _log.info("model unloaded", extra={"fields": placed.key.fields})

    def _failed(self, version: Found, reason: str) -> str:
        """Record a failed load, unless the version is still served as it was; returns the error for clients."""
        fields = {"model": version.name, "version": version.version, "reason": reason}
        _log.warning("model not loaded", extra={"fields": fields})
        if (version.name, version.version) not in self._serving:
            self._registry.failed(version.name, version.version, reason)
        return f"version {version.version} is at UNAVAILABLE state: {reason}"

    async def _make_way(self, source: ModelSource, old: "PlacedModel") -> None:
        """Stop serving what a version replaces before it is loaded, because memory has no room for both."""
        if old.key == source.key:
            self._registry.loading(source)
        else:
            self._registry.unloading(old.key)
        self._serving.pop(old.key, None)
        await self._lanes.of(old.key).finish(old.key, self._config.exit_timeout_s)

    def changed(self, placed: "PlacedModel") -> None:
        """Record that a model has another partition or other plans."""
        if self._serving.get(placed.key) is placed:
            self._registry.moved(placed.key, placed.footprint)

    def lost(self, placed: "PlacedModel", reason: str) -> None:
        """Record that a model could not be moved and was removed."""
        if self._serving.get(placed.key) is placed:
            del self._serving[placed.key]
            self._registry.failed(*placed.key, f"it could not be moved: {reason}")

    def _require_explicit(self) -> None:
        if self._config.model_control != "explicit":
            raise ControlOff(self._config.model_control)
