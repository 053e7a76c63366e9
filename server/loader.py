"""Loads a repository: every model lowered, profiled and planned, and their programs placed in one arena."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from planner.errors import CohabitError
from planner.library import Library
from planner.profile import Profile
from planner.sizing import Deployment, Entry, ModelDemand, deploy
from runtime.arena import Arena
from runtime.errors import UnsupportedModel
from runtime.executor import Executor
from runtime.lower import Lowered, lower
from runtime.profile import device_name, profile
from runtime.program import Bases, Program, build
from runtime.store import LimitedStore, Store, open_store
from server.config import ServeConfig
from server.memory_map import draw
from server.model import Footprint
from server.model_config import config_mismatch
from server.repository import ModelSource
from server.servable import ProgramServable, SharedRegion, describe

_log = logging.getLogger("cohabit.loader")

OnProgress = Callable[[str, str], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model that is lowered and measured, and waits for its partition."""

    source: ModelSource
    lowered: Lowered
    store: Store
    profiles: dict[int, Profile]

    @property
    def weight_bytes(self) -> int:
        return self.lowered.manifest.segment_bytes + self.lowered.manifest.table_bytes


@dataclass(slots=True)
class Loaded:
    """What serving needs; `close` gives the memory back."""

    servables: dict[str, ProgramServable]
    failures: dict[str, str]
    footprints: dict[str, Footprint]
    device: SharedRegion | None
    memory_map: str
    _close: Callable[[], None]

    def close(self) -> None:
        self._close()


def load(sources: Sequence[ModelSource], config: ServeConfig, on_progress: OnProgress) -> Loaded:
    """Load every model that can be loaded; the others are in `failures`, with the reason.

    Raises InfeasibleBudget, which names the least memory that would do, if the memory is too small.
    """
    torch.set_num_threads(config.threads or default_threads())
    cache = config.cache or default_cache()
    failures: dict[str, str] = {}
    prepared: list[Prepared] = []
    for source in sources:
        try:
            prepared.append(prepare(source, config, cache, on_progress))
        except CohabitError as error:
            failures[source.name] = str(error)
        except Exception as error:
            _log.exception("model failed to load", extra={"fields": {"model": source.name}})
            failures[source.name] = f"unexpected {type(error).__name__}: {error}"
    memory_bytes = config.memory.of(sum(p.weight_bytes for p in prepared))
    demands = [
        ModelDemand(p.lowered.name, p.lowered.graphs, p.profiles, _rate(p.lowered.name, config)) for p in prepared
    ]
    deployment = deploy(
        demands,
        memory_bytes,
        config.layout,
        Library(cache),
        on_progress=lambda done, total, text: on_progress("planning", f"{done} of {total}, {text}"),
    )
    return _place(deployment, prepared, failures, on_progress)


def default_threads() -> int:
    """One core is left to the swap-in lane and the front end, where there is more than one."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cohabit"


def _rate(name: str, config: ServeConfig) -> float:
    """Expected requests per second; models without a rate of their own share the mean of those that have one."""
    given = config.model_rates
    return given.get(name, sum(given.values()) / len(given) if given else 1.0)


def prepare(source: ModelSource, config: ServeConfig, cache: Path, on_progress: OnProgress) -> Prepared:
    """Lower and measure one model. Its store is the caller's to close. Raises CohabitError."""

    def progress(text: str) -> None:
        on_progress(source.name, text.removeprefix(f"{source.name}: "))

    batches = _wanted_batches(source, config)
    lowered = lower(source.path, source.name, batches, cache / "weights", progress)
    info = describe(lowered, source.version, max(lowered.batches))
    if source.config is not None and (reason := config_mismatch(source.config, info)) is not None:
        raise UnsupportedModel(reason)
    store = open_store(config.store, lowered.weights_path, lowered.manifest)
    limit = ""
    if config.link_bandwidth_bytes_per_s is not None:
        store = LimitedStore(store, config.link_bandwidth_bytes_per_s)
        limit = f" at {config.link_bandwidth_bytes_per_s:.0f} B/s"
    device = device_name(torch.get_num_threads(), store, limit)
    return Prepared(source, lowered, store, profile(lowered, store, device, cache / "profiles", progress))


def _wanted_batches(source: ModelSource, config: ServeConfig) -> list[int]:
    """The configured sizes; a config.pbtxt caps them and adds its own maximum."""
    most = source.config.max_batch_size if source.config is not None else 0
    if most <= 0:
        return list(config.batch_sizes)
    return sorted({b for b in config.batch_sizes if b < most} | {most})


def _place(
    deployment: Deployment, prepared: Sequence[Prepared], failures: dict[str, str], on_progress: OnProgress
) -> Loaded:
    """Take the arena, bind every plan, and bring the residents in."""
    arena = Arena(deployment.workspace_offset + deployment.workspace_bytes)
    executor = Executor()
    executor.start()
    programs: dict[str, dict[int, Program]] = {}
    for entry, model in zip(deployment.entries, prepared, strict=True):
        on_progress(entry.name, "bringing residents in")
        bases = Bases(entry.partition_offset, deployment.workspace_offset)
        programs[entry.name] = {
            batch: build(model.lowered, plan, model.profiles[batch], arena, bases, model.store)
            for batch, plan in entry.plans.items()
        }
        if deployment.layout != "time_shared":
            executor.load(programs[entry.name][min(entry.plans)])

    def close() -> None:
        executor.close()
        arena.close()
        for model in prepared:
            model.store.close()

    any_program = {name: by_batch[min(by_batch)] for name, by_batch in programs.items()}
    return Loaded(
        servables={p.lowered.name: _servable(p, programs[p.lowered.name], executor) for p in prepared},
        failures=failures,
        footprints={e.name: _footprint(e) for e in deployment.entries},
        device=SharedRegion(executor, any_program) if deployment.layout == "time_shared" else None,
        memory_map=draw(deployment, {p.lowered.name: p.weight_bytes for p in prepared}),
        _close=close,
    )


def _servable(model: Prepared, programs: dict[int, Program], executor: Executor) -> ProgramServable:
    most = max(programs)
    if model.source.config is not None and model.source.config.max_batch_size:
        most = min(most, model.source.config.max_batch_size)
    info = describe(model.lowered, model.source.version, most)
    return ProgramServable(info, programs, model.lowered.inputs, model.lowered.outputs, executor)


def _footprint(entry: Entry) -> Footprint:
    return Footprint(
        partition_bytes=entry.partition_bytes,
        parameter_bytes=entry.parameter_bytes,
        resident_bytes=entry.resident_bytes,
        predicted_s={b: p.provenance.latency_s for b, p in entry.plans.items() if p.provenance is not None},
    )
