"""Loads, replaces and unloads models while the others are served: each is away for a moment at most."""

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING

from planner.errors import CohabitError
from server.config.config import ServeConfig
from server.engine.lanes import Lanes
from server.errors import ControlOff, LoadFailed, NotInRepository, RepositoryError, ShuttingDown
from server.models.registry import Registry
from server.models.repository import ModelSource, source_of
from server.placement.control import ControlMode

if TYPE_CHECKING:
    from server.placement.device_memory import Tenant
    from server.placement.placement import Housing

_log = logging.getLogger("cohabit.lifecycle")


class Lifecycle:
    """What `Control` promises. All methods belong to the event loop's thread."""

    def __init__(self, config: ServeConfig, registry: Registry, lanes: Lanes) -> None:
        self.mode: ControlMode = config.model_control
        self._config = config
        self._registry = registry
        self._lanes = lanes
        self._housing: Housing | None = None
        self._opened = asyncio.Event()
        self._serving: dict[str, Tenant] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._orders: set[asyncio.Task[None]] = set()

    def open(self, housing: "Housing", tenants: Mapping[str, "Tenant"]) -> None:
        """Begin, with what was loaded at start."""
        housing.open(self._lanes, self)
        self._housing = housing
        self._serving = dict(tenants)
        self._opened.set()

    def is_serving(self, model: str) -> bool:
        return model in self._serving

    async def close(self) -> None:
        """End what is under way; models stay as they are."""
        if self._housing is not None:
            await self._housing.close()
        for order in self._orders:
            order.cancel()
        await asyncio.gather(*self._orders, return_exceptions=True)

    async def load(self, model: str, config: str | None = None) -> None:
        self._require_explicit()
        try:
            source = await asyncio.to_thread(source_of, self._config.repository, model, config)
        except RepositoryError as error:
            raise LoadFailed(model, str(error)) from error
        if source is None:
            raise NotInRepository(model)
        await self.load_source(source)

    async def unload(self, model: str, dependents: bool = False) -> None:
        self._require_explicit()
        await self.unload_model(model)

    async def load_source(self, source: ModelSource) -> None:
        """Load a version of a model, and serve it in place of the one so far. Raises LoadFailed."""
        await self._to_the_end(self._load_source(source))

    async def unload_model(self, model: str) -> None:
        """Answer what a model has been asked already, and give its memory back."""
        await self._to_the_end(self._unload_model(model))

    async def _to_the_end(self, order: Coroutine[None, None, None]) -> None:
        """A client that leaves does not stop what it has ordered: models would be left half moved."""
        task = asyncio.create_task(order)
        self._orders.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, order: asyncio.Task[None]) -> None:
        self._orders.discard(order)
        if not order.cancelled():
            order.exception()  # it was logged; perhaps nobody waits to hear of it

    async def _load_source(self, source: ModelSource) -> None:
        housing = await self._ready_housing()
        async with self._lock(source.name):
            if source.name not in self._serving:
                self._registry.loading(source.name, source.version, source.config)
            try:
                await self._load(housing, source)
            except (CohabitError, OSError) as error:
                _log.warning("model not loaded", extra={"fields": {"model": source.name, "reason": str(error)}})
                raise self._failed(source, str(error)) from error
            except Exception as error:
                _log.exception("model not loaded", extra={"fields": {"model": source.name}})
                raise self._failed(source, f"unexpected {type(error).__name__}: {error}") from error
            except asyncio.CancelledError:
                self._failed(source, "loading was cancelled")
                raise

    async def _unload_model(self, model: str) -> None:
        housing = await self._ready_housing()
        async with self._lock(model):
            tenant = self._serving.pop(model, None)
            if tenant is None:
                self._registry.unwanted(model)
                return
            self._registry.unloading(model)
            await housing.retire(tenant, self._config.exit_timeout_s)
            self._registry.unloaded(model)
            _log.info("model unloaded", extra={"fields": {"model": model}})

    async def _load(self, housing: "Housing", source: ModelSource) -> None:
        prepared = await asyncio.to_thread(housing.workshop.prepare, source)
        old = self._serving.get(source.name)
        tenant: Tenant | None = None
        try:
            tenant = await housing.place(prepared, old, self._stand_aside)
        finally:
            if tenant is None:
                prepared.store.close()
        entry = self._registry.loaded(tenant.servable, tenant.footprint, source.config)
        self._lanes.add(tenant.servable, entry.statistics, source.policy, tenant.lane)
        self._serving[source.name] = tenant
        if old is not None and old.holder in housing.house.tenants:
            await self._lanes.finish(source.name, self._config.exit_timeout_s, older_only=True)
            await housing.release(old)
        _log.info("model loaded", extra={"fields": {"model": source.name, "version": source.version}})

    def _failed(self, source: ModelSource, reason: str) -> LoadFailed:
        """The version so far, if there is one, serves on."""
        if source.name not in self._serving:
            self._registry.failed(source.name, reason, source.version)
        return LoadFailed(source.name, f"version {source.version} is at UNAVAILABLE state: {reason}")

    async def _stand_aside(self, old: "Tenant") -> None:
        """There is no room for two versions: the one so far goes before the new one comes."""
        self._registry.loading(old.name, old.prepared.source.version, old.prepared.source.config)
        self._serving.pop(old.name, None)
        await self._lanes.finish(old.name, self._config.exit_timeout_s)

    def changed(self, tenant: "Tenant") -> None:
        if self._serving.get(tenant.name) is tenant:
            self._registry.find(tenant.name).footprint = tenant.footprint

    def lost(self, tenant: "Tenant", reason: str) -> None:
        if self._serving.get(tenant.name) is tenant:
            del self._serving[tenant.name]
            self._registry.failed(tenant.name, f"it could not be moved: {reason}")

    async def _ready_housing(self) -> "Housing":
        if self._lanes.draining:
            raise ShuttingDown
        await self._opened.wait()
        assert self._housing is not None
        return self._housing

    def _require_explicit(self) -> None:
        if self.mode != "explicit":
            raise ControlOff(self.mode)

    def _lock(self, model: str) -> asyncio.Lock:
        return self._locks.setdefault(model, asyncio.Lock())
