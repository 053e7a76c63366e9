"""Loads a repository at start: every model lowered, profiled and planned, and their programs placed in one arena."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.errors import CohabitError
from planner.library import Library
from planner.sizing.deployment import Deployment, deploy
from runtime.shared_region.sharing import SHARINGS
from server.config.config import ServeConfig
from server.engine.servable import ProgramServable
from server.models.prepared import (
    OnProgress,
    Prepared,
    cache_of,
    open_backend,
    prepare,
    say_why_ops_run_one_by_one,
)
from server.models.preparing import Workshop
from server.models.repository import ModelSource
from server.placement.device_memory import House, Tenant, load_of
from server.placement.lane_choice import divided
from server.placement.loading import Arrival
from server.placement.memory_map import draw
from server.placement.partitions import Extent
from server.placement.placement import Housing
from server.protocol.model import DeviceUse, Footprint

_log = logging.getLogger("cohabit.loader")


@dataclass(slots=True)
class Loaded:
    """What serving needs; `close` gives the memory back."""

    house: House
    deployment: Deployment
    housing: Housing | None = None
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def tenants(self) -> dict[str, Tenant]:
        return {tenant.name: tenant for tenant in self.house.tenants.values()}

    @property
    def servables(self) -> dict[str, ProgramServable]:
        return {name: tenant.servable for name, tenant in self.tenants.items()}

    @property
    def footprints(self) -> Mapping[str, Footprint]:
        return {name: tenant.footprint for name, tenant in self.tenants.items()}

    @property
    def memory_map(self) -> str:
        weights = {name: tenant.prepared.weight_bytes for name, tenant in self.tenants.items()}
        lanes = {name: tenant.lane for name, tenant in self.tenants.items()}
        return draw(self.deployment, weights, lanes) if weights else ""

    def use(self) -> DeviceUse:
        return self.house.use()

    def close(self) -> None:
        self.house.close()


def load(sources: Sequence[ModelSource], config: ServeConfig, on_progress: OnProgress) -> Loaded:
    """Load every model that can be loaded; the others are in `failures`, with the reason.

    Raises InfeasibleBudget, which names the least memory that would do, if the memory is too small.
    """
    backend = open_backend(config)
    say_why_ops_run_one_by_one(config)
    failures: dict[str, str] = {}
    prepared: list[Prepared] = []
    for source in sources:
        try:
            prepared.append(prepare(source, config, backend, on_progress))
        except CohabitError as error:
            failures[source.name] = str(error)
        except Exception as error:
            _log.exception("model failed to load", extra={"fields": {"model": source.name}})
            failures[source.name] = f"unexpected {type(error).__name__}: {error}"
    deployment = deploy(
        [p.demand for p in prepared],
        config.memory.of(sum(p.weight_bytes for p in prepared)),
        config.layout,
        Library(cache_of(config)),
        lanes=config.compute_lanes,
        on_progress=lambda done, total, text: on_progress("planning", f"{done} of {total}, {text}"),
    )
    # Where nothing is loaded later, what nobody has is not taken from the device either.
    arena_bytes = deployment.memory_bytes if config.model_control != "none" else deployment.taken_bytes
    house = House(backend, deployment.memory_bytes, arena_bytes, config.compute_lanes)
    housing = None
    if config.model_control != "none":
        housing = Housing(house, Workshop(config, backend), keeps_all=config.layout == "resident")
    loaded = Loaded(house, deployment, housing, failures)
    _place(loaded, prepared, on_progress)
    return loaded


def _place(loaded: Loaded, prepared: Sequence[Prepared], on_progress: OnProgress) -> None:
    """Bind every plan, and bring the residents in."""
    house, deployment = loaded.house, loaded.deployment
    house.partitions.grow_workspace(deployment.workspace_bytes)
    unused = deployment.memory_bytes - house.partitions.arena_bytes
    if deployment.layout in SHARINGS and prepared:
        house.share(SHARINGS[deployment.layout])
    loads = [load_of(model, entry.plans) for entry, model in zip(deployment.entries, prepared, strict=True)]
    lanes = divided(loads, deployment.lanes)
    for entry, model, lane in zip(deployment.entries, prepared, lanes, strict=True):
        on_progress(entry.name, "bringing residents in")
        extent = Extent(entry.partition_offset - unused, entry.partition_bytes)
        holder = house.new_holder(entry.name)
        if house.shared is not None:
            house.tenant(holder, model, entry.plans, house.bind_shared(model, entry.plans))
            continue
        house.partitions.put(holder, extent)
        programs = house.bind(model, entry.plans, extent, lane)
        house.tenant(holder, model, entry.plans, programs, lane)
        _arrive(house.arrival(programs, lane))


def _arrive(arrival: Arrival) -> None:
    while not arrival.advance():
        pass
