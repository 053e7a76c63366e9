"""Deploys models at the start, and loads, replaces and unloads them while others are served."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from msgspec.structs import replace

from cohabit.server.background import Background
from cohabit.server.config.config import ServeConfig
from cohabit.server.deploy.worker import (
    MOST_AT_START,
    PLANNING,
    PREPARING,
    count_uncached,
    failure_reason,
    in_thread,
    worker_processes,
)
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.engine.execution import Servable
from cohabit.server.engine.sequences import first_inputs
from cohabit.server.errors import (
    LoadFailed,
    Refused,
    RepositoryError,
    RequestError,
    load_reason,
    shutting_down,
)
from cohabit.server.ipc.catalog import ModelEntry
from cohabit.server.ipc.model import DeviceUse, ModelKey
from cohabit.server.repository.registry import Registry
from cohabit.server.repository.scan import is_in_repository, versions_of
from cohabit.server.repository.sources import EnsembleSource, ModelSource, ScannedVersion, Unloadable
from cohabit.server.scheduling.sequences import SequenceRules
from cohabit.server.triton.model_config import parse_config
from cohabit.server.triton.warmup import warmup_request

if TYPE_CHECKING:
    from cohabit.server.deploy.elastic import Elastic
    from cohabit.server.deploy.model import Model
    from cohabit.server.deploy.place import ModelPlacement
    from cohabit.server.deploy.replan import Replanner

_log = logging.getLogger("cohabit.lifecycle")

_MOST_WARMUPS = 1000
"""Maximum number of warm-up executions per model: a mistyped count is refused."""

OpenPlacement = Callable[
    [Sequence[ModelSource], ServeConfig, Sequence[ComputeLane]], "tuple[ModelPlacement, Replanner]"
]
"""Opens the device for models. Returns its placement, and what finds better plans for it. Any thread."""


def open_placement(
    sources: Sequence[ModelSource], config: ServeConfig, lanes: Sequence[ComputeLane]
) -> "tuple[ModelPlacement, Replanner]":
    """Open the device. Imports torch here rather than at module level, where it would delay startup by seconds.

    Workers that will prepare uncached models import it at the same time.
    """
    workers = worker_processes(config)
    missing = 0 if workers.inline else count_uncached(sources, config)
    if missing:
        workers.start(PREPARING, min(missing, MOST_AT_START))
    from cohabit.server.deploy.place import ModelPlacement
    from cohabit.server.deploy.replan import Replanner

    if missing:
        workers.start(PLANNING)
    placement = ModelPlacement(config, lanes, workers)
    return placement, Replanner(config, placement, lanes)


class Lifecycle:
    """Deploys models at the start, for clients and for the poller. Belongs to the event loop's thread."""

    def __init__(
        self, config: ServeConfig, registry: Registry, lanes: Sequence[ComputeLane], open_placement: OpenPlacement
    ) -> None:
        self._config = config
        self._registry = registry
        self._lanes = lanes
        self._open_placement = open_placement
        self._placement: ModelPlacement | None = None
        self.replanner: Replanner | None = None
        """Finds better plans; None until the device is open."""
        self._elastic: Elastic | None = None
        self._background = Background()
        self._opened = asyncio.Event()
        self.serving: dict[ModelKey, Model] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By model name, while operations on that model are in progress."""
        self._operations: set[asyncio.Task[None]] = set()

    async def start(
        self, sources: Sequence[ModelSource], on_progress: Callable[[str, str], None]
    ) -> dict[ModelKey, str]:
        """Deploy the initial models into empty memory. Returns failure reasons.

        Raises ConfigError, DeviceError, or InfeasibleBudget, which names the least sufficient memory.
        """
        opened = await in_thread(self._open_placement, sources, self._config, self._lanes)
        self._placement, self.replanner = opened
        self._placement.on_change = self._changed
        failures = await self._deploy(sources, on_progress=on_progress)
        self._placement.workers.inline = False  # from now on, there are requests to answer in this process
        self._opened.set()
        if self.replanner.measures_again:
            self._background.keep("checking profiles", self.replanner.watch)
        if self._config.layout == "elastic":
            from cohabit.server.deploy.elastic import Elastic

            self._elastic = Elastic(self._placement, self.replanner, self._requests)
            self._background.keep("dividing memory by request rates", self._elastic.watch)
        return failures

    def _requests(self) -> dict[str, int]:
        """Return each model's number of requests, by load id (`Model.load_id`)."""
        counted = {model.load_id: self._registry.statistics(key) for key, model in self.serving.items()}
        return {
            load_id: statistics.answered.count + statistics.failed_count for load_id, statistics in counted.items()
        }

    async def _deploy(
        self,
        sources: Sequence[ModelSource],
        old: "Model | None" = None,
        on_progress: Callable[[str, str], None] = lambda name, stage: None,
    ) -> dict[ModelKey, str]:
        """Prepare, place, load, warm up and serve model versions, then improve their plans.

        `old` is a load that one of them replaces. If its memory is needed, its requests wait. Returns failure reasons.
        Raises CohabitError if memory is too small.
        """
        placement, replanner = self._placement, self.replanner
        assert placement is not None
        assert replanner is not None
        models, failures = await placement.prepare(sources, on_progress)
        failures |= await placement.place(models, old, self._accept, on_progress)
        served = [model for model in models if model.key not in failures]
        replanner.begin(served, plan_next_start=not self._opened.is_set())
        return failures

    async def _accept(self, model: "Model") -> None:
        """Warm up a loaded model and start serving it. Raises RepositoryError for a sample that fails."""
        lane = self._lanes[model.lane]
        await warm_up(lane, model.servable, model.source, model.sequences)
        statistics = self._registry.served(
            model.source, model.servable.info, model.footprint, model.lowered.archive
        )
        weights = model.lowered.manifest.archive
        lane.add(model.servable, statistics, model.source.policy, model.sequences, weights)
        self.serving[model.key] = model

    def is_serving(self, model: str) -> bool:
        """Whether any version of a model is served."""
        return self._registry.is_ready(model)

    async def close(self) -> None:
        """Cancel pending operations, and end the worker processes. Models stay as they are."""
        pending = list(self._operations)
        if self._placement is not None:
            self._placement.workers.close()
        if self.replanner is not None:
            await self.replanner.close()
        await self._background.close()
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def release(self) -> None:
        """Release the device. The lanes must have ended."""
        if self._placement is not None:
            self._placement.close()
            self._placement = None

    @property
    def use(self) -> DeviceUse:
        use = DeviceUse() if self._placement is None else self._placement.use()
        return use if self._elastic is None else replace(use, divisions=self._elastic.divisions)

    @property
    def memory_map(self) -> str:
        """The memory map as text; empty if no model is loaded."""
        return "" if self._placement is None else self._placement.memory_map

    async def load(self, model: str, config: str | None = None) -> None:
        """Serve the versions of a model that its version policy asks for; returns once they are served.

        Unchanged served versions stay as they are; those outside the policy are unloaded last. `config` is a
        ModelConfig in JSON that replaces the model's config.pbtxt. Steps of an ensemble that are not served are loaded
        first. Raises Refused if the mode is not explicit or the repository has nothing to load, and LoadFailed as
        `serve` does. Both have the reason.
        """
        self._require_explicit()
        await self._load_with_steps(model, config, frozenset((model,)))
        await self.forget_removed()

    async def _load_with_steps(self, model: str, config: str | None, ensembles: frozenset[str]) -> None:
        """Load a model, after its steps if it is an ensemble. `ensembles` are being loaded: they may have a cycle."""
        try:
            override = None if config is None else await asyncio.to_thread(parse_config, config)
            found = await asyncio.to_thread(versions_of, self._config.repository, model, override)
        except RepositoryError as error:
            raise _not_in_repository(model, load_reason(model, error)) from error
        if not found:
            raise _not_in_repository(model, "it has no such folder")
        for step in (step for entry in found if isinstance(entry, EnsembleSource) for step in entry.steps):
            if step.model in ensembles or self._registry.is_ready(step.model):
                continue
            try:
                await self._load_with_steps(step.model, None, ensembles | {step.model})
            except RequestError as error:
                raise LoadFailed(model, f"{step}: {error}") from error
        await self.serve(model, found)

    async def unload(self, model: str) -> None:
        """Refuse new requests for a model, answer pending ones, and release its memory.

        Does nothing if the model is not loaded. Raises Refused unless the mode is explicit.
        """
        self._require_explicit()
        await self.serve(model, ())
        await self.forget_removed()

    async def forget_removed(self) -> None:
        """Forget unserved models and versions whose folders were removed."""
        repository, idle = self._config.repository, self._registry.idle()

        def removed() -> list[ModelEntry]:
            return [entry for entry in idle if not is_in_repository(repository, entry.name, entry.version)]

        for entry in await asyncio.to_thread(removed):
            self._registry.forget(entry)

    async def serve(self, model: str, found: Sequence[ScannedVersion]) -> None:
        """Serve exactly these numbered versions of a model.

        Raises LoadFailed naming the versions that cannot be loaded. Then no version is unloaded, except those whose
        memory a new version has taken.
        """
        task = asyncio.create_task(self._serve(model, found))
        # Runs to its end even if the client disconnects: cancelling would leave models half moved.
        self._operations.add(task)
        task.add_done_callback(self._ended)
        await asyncio.shield(task)

    def _ended(self, operation: asyncio.Task[None]) -> None:
        self._operations.discard(operation)
        if not operation.cancelled():
            operation.exception()  # mark as retrieved: it was logged, and the client may have disconnected

    async def _serve(self, model: str, found: Sequence[ScannedVersion]) -> None:
        if self._lanes[0].draining:
            raise shutting_down()
        await self._opened.wait()
        versions = {entry.version for entry in found if entry.version is not None}
        async with self._locks.setdefault(model, asyncio.Lock()):
            surplus = [m for key, m in self.serving.items() if key.name == model and key.version not in versions]
            sources = [
                entry for entry in found if isinstance(entry, ModelSource) and not self._keep_if_unchanged(entry)
            ]
            for source in sources:
                if source.key not in self.serving:
                    self._registry.loading(source)
            failures = [self._failed(entry, entry.reason) for entry in found if isinstance(entry, Unloadable)]
            for source in reversed(sources):
                reason = await self._load(source, surplus)
                if reason is not None:
                    failures.append(self._failed(source, reason))
            for ensemble in (entry for entry in found if isinstance(entry, EnsembleSource)):
                if (replaced := self.serving.get(ensemble.key)) is not None:  # its folder was a model's
                    await self._retire(replaced)
                if (reason := self._registry.serve_ensemble(ensemble)) is not None:
                    failures.append(self._failed(ensemble, reason))
            if failures:
                raise LoadFailed(model, "; ".join(failures))
            for old in surplus:
                if self.serving.get(old.key) is old:
                    await self._retire(old)
            self._registry.unload_ensembles(model, versions)
            self._registry.request_only(model, versions)

    def _keep_if_unchanged(self, source: ModelSource) -> bool:
        """Keep a served version if its file and configuration are unchanged. Returns False if it must be loaded."""
        present = self.serving.get(source.key)
        if present is None or not present.source.loads_as(source):
            return False
        present.source = source
        self._registry.configured(source)
        return True

    async def _load(self, source: ModelSource, surplus: Sequence["Model"]) -> str | None:
        """Load a version, in a surplus version's memory if needed. Returns the failure reason, or None."""
        placement, present = self._placement, self.serving.get(source.key)
        assert placement is not None
        old = present or next((m for m in surplus if self.serving.get(m.key) is m), None)
        try:
            failures = await self._deploy([source], old)
        except Exception as error:
            return failure_reason(source.name, error)
        except asyncio.CancelledError:
            self._failed(source, "loading was cancelled")
            raise
        if failures:
            return failures[source.key]
        if present is not None:
            await placement.retire_replaced(present, self._config.exit_timeout_s)
        elif old is not None and placement.is_displaced(old):
            await self._retire(old)
        _log.info("model loaded", extra={"fields": source.key.fields})
        return None

    async def _retire(self, model: "Model") -> None:
        """Refuse new requests for a version, answer pending ones, and release its memory."""
        assert self._placement is not None
        del self.serving[model.key]
        self._registry.unloading(model.key)
        await self._placement.retire(model, self._config.exit_timeout_s)
        self._registry.unloaded(model.key)
        _log.info("model unloaded", extra={"fields": model.key.fields})

    def _failed(self, version: ScannedVersion, reason: str) -> str:
        """Log a failed load, and record it unless the version is still served. Returns the error for clients."""
        fields = {"model": version.name, "version": version.version, "reason": reason}
        _log.warning("model not loaded", extra={"fields": fields})
        if not isinstance(version, EnsembleSource) and not self._registry.is_ready(version.name, version.version):
            self._registry.failed(version.name, version.version, reason)
        return f"version {version.version} is at UNAVAILABLE state: {reason}"

    def _changed(self, model: "Model") -> None:
        """Record that a model's partition or plans have changed."""
        if self.serving.get(model.key) is model:
            self._registry.moved(model.key, model.footprint)

    def _require_explicit(self) -> None:
        if self._config.model_control != "explicit":
            raise Refused(
                "ControlOff",
                f"explicit model load / unload is not allowed: model control is '{self._config.model_control}';"
                " start the server with --model-control-mode explicit",
            )


def _not_in_repository(model: str, reason: str) -> Refused:
    text = f"failed to load '{model}', failed to poll from model repository: {reason}"
    return Refused("NotInRepository", text)


async def warm_up(
    lane: ComputeLane, servable: Servable, source: ModelSource, rules: SequenceRules | None = None
) -> None:
    """Execute a model's warm-up samples between executions of other models. Statistics do not count them.

    With sequence `rules`, each sample is a sequence of one request.

    Raises RepositoryError for too many executions, and for a sample that does not match the model or fails.
    """
    samples = [] if source.config is None else [s for s in source.config.model_warmup if s.batch_size]
    executions = sum(max(sample.count, 1) for sample in samples)
    if executions > _MOST_WARMUPS:
        raise RepositoryError(
            f"config.pbtxt: model_warmup asks for {executions} executions, the limit is {_MOST_WARMUPS}; lower count"
        )
    files = {name: path for name, (path, _) in source.warmup_files.items()}
    for sample in samples:
        try:
            request = await asyncio.to_thread(warmup_request, sample, servable.info, files)
            inputs = request.inputs if rules is None else first_inputs(rules, request.inputs)
            for _ in range(max(sample.count, 1)):
                await lane.call_on_lane(partial(servable.execute, [inputs], request.batch))
        except Exception as error:
            raise RepositoryError(f"config.pbtxt: model_warmup '{sample.name}': {error}") from error
