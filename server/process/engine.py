"""The engine: loads a repository onto one device and executes requests, in its own process or the server's."""

import asyncio
import gc
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cohabit.server.background import Background
from cohabit.server.config.config import ServeConfig
from cohabit.server.deploy.lifecycle import Lifecycle, OpenPlacement, open_placement
from cohabit.server.engine.compute_lane import ComputeLane, make_lanes
from cohabit.server.engine.sequences import StateMemory
from cohabit.server.errors import ConfigError, RepositoryError, RequestError, StartFailed, did_you_mean
from cohabit.server.ipc.catalog import ModelEntry, ModelState
from cohabit.server.ipc.model import ModelKey, lane_name
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import EngineReport, ModelCounters
from cohabit.server.log import report_suppressed
from cohabit.server.process.polling import Poller
from cohabit.server.repository.registry import Registry
from cohabit.server.repository.scan import scan, versions_of
from cohabit.server.repository.sources import EnsembleSource, ModelSource, ScannedVersion, Unloadable, by_name
from cohabit.server.triton.ensembles import has_no_program
from cohabit.server.triton.model_config import ModelConfig

if TYPE_CHECKING:
    from cohabit.server.deploy.model import Model

_log = logging.getLogger("cohabit.engine")

_THREADS_END_S = 1.0
"""Maximum time to wait for a lane's thread at the end."""
_FORGET_EVERY_S = 0.5
"""Interval between two looks for sequences that have been idle for too long."""
_MOST_REASONS = 50
"""Maximum number of failure reasons in one log record."""

OnProgress = Callable[[str, str], None]
"""Receives a model's name and the stage of its loading. Called on any thread."""


class LoadCancelled(BaseException):
    """The engine was stopped while it loaded. A BaseException, so that `except Exception` does not catch it."""


class Engine:
    """One device. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        publish: Callable[[ModelEntry], None],
        on_lost: Callable[[str], None] = lambda reason: None,
        open_placement: OpenPlacement = open_placement,
    ) -> None:
        """`publish` receives a model's entry at every change; `on_lost` receives the reason when the device is lost."""
        self.registry = Registry(publish)
        self._states = StateMemory(config.queue_bytes)
        self.lanes = make_lanes(config.compute_lanes, config.queue_limit, on_lost, self._states)
        self.lifecycle = Lifecycle(config, self.registry, self.lanes, open_placement)
        self._config = config
        self._background = Background()
        self._deploying: asyncio.Task[dict[ModelKey, str]] | None = None
        self.started = False
        """Whether loading at the start has finished, perhaps with failures."""

    async def start(
        self, on_progress: OnProgress = lambda model, stage: None, before: Sequence[ModelEntry] | None = None
    ) -> str:
        """Load the repository, and return the memory map.

        After a restart, `before` is the catalog of the previous process. Only models that are READY in it are loaded.
        Other models would delay them, and clients know that they must load these again.

        Raises RepositoryError, ConfigError or InfeasibleBudget; StartFailed if no model could be loaded or, with
        `exit_on_error`, not every model.
        """
        for lane in self.lanes:
            lane.start()
        self._background.keep("forgetting idle sequences", self._forget_idle_sequences)
        config = self._config
        found = by_name(scan(config.repository, may_be_empty=config.model_control != "none"))
        self._refuse_unknown(found.keys())
        chosen = self._wanted(found) if before is None else self._served(before)
        sources = self._register(found.keys(), [entry for versions in chosen.values() for entry in versions])
        for entry in before or ():
            if entry.version is not None and not entry.is_ready:
                self.registry.restored(entry)

        # A task of its own: `stop` cancels it without cancelling the caller.
        self._deploying = asyncio.create_task(self.lifecycle.start(sources, on_progress))
        try:
            failures = await asyncio.shield(self._deploying)
        except asyncio.CancelledError:
            if self._deploying.cancelled():  # by `stop`
                raise LoadCancelled from None
            self._deploying.cancel()
            raise
        for key, reason in failures.items():
            self.registry.failed(*key, reason)
        memory_map = self.lifecycle.memory_map
        _log_start(list(self.registry))
        # Freeze torch's objects: collecting them would stop every thread for a third of a second.
        gc.collect()
        gc.freeze()
        if config.model_control == "poll":
            # Interrupted loads count as unseen, so that the poller loads these models again.
            interrupted = {entry.name for entry in before or () if entry.state is ModelState.LOADING}
            seen = {name: versions for name, versions in (found | chosen).items() if name not in interrupted}
            poller = Poller(config.repository, self.lifecycle, self.registry, seen)
            self._background.keep("polling the repository", partial(poller.run, config.poll_interval_s))
        failed = [entry for entry in self.registry if entry.state is ModelState.UNAVAILABLE]
        # Without model control, a server that starts without models stays without them.
        serves_nothing = (
            bool(sources) and not any(entry.is_ready for entry in self.registry) and config.model_control == "none"
        )
        if serves_nothing or (failed and config.exit_on_error and before is None):
            reasons = "; ".join(f"{_shown(entry)}: {entry.reason}" for entry in failed)
            which = "no model" if serves_nothing else "not every model"
            raise StartFailed(f"{which} of {config.repository} could be loaded: {reasons}")
        self.started = True
        return memory_map

    @property
    def lost(self) -> str | None:
        """Why the device is lost; None while it works."""
        return self.lanes[0].lost

    def lane_of(self, model: ModelKey) -> ComputeLane:
        """Return a model's lane; for an unknown model the first lane, which raises ModelNotFound."""
        return next((lane for lane in self.lanes if lane.serves(model)), self.lanes[0])

    async def infer(self, request: Request, on_spans: OnSpans | None = None) -> Answer:
        """Execute a request. See `ComputeLane.infer`."""
        try:
            return await self.lane_of(request.model).infer(request, on_spans)
        except RequestError as error:
            self.registry.rejected(request.model, error)
            raise

    def settle(self, request: Request, *, kept: bool) -> None:
        """Say whether an answer was written. See `ComputeLane.settle`."""
        for lane in self.lanes:  # its model may have been unloaded
            lane.settle(request, kept=kept)

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        """See `ComputeLane.end_sequence`."""
        self.lane_of(model).end_sequence(model, sequence, spare=spare)

    async def ended(self, request: Request) -> None:
        """Wait until a cancelled request no longer uses its memory."""
        for lane in self.lanes:  # its model may have been unloaded
            await lane.ended(request)

    def report(self, only: ModelKey | None = None) -> EngineReport:
        """Return the counters of all models and of the device, or of one model."""
        serving = self.lifecycle.serving
        if only is not None:
            return EngineReport({only: self._counters(only, serving[only])} if only in serving else {})
        models = {key: self._counters(key, model) for key, model in serving.items()}
        use = self.lifecycle.use
        computed_s = {
            lane_name("compute", number, len(self.lanes)): lane.device.computed_s
            for number, lane in enumerate(self.lanes)
        }
        busy_s = {**computed_s, **use.lane_busy_s}
        return EngineReport(models, msgspec.structs.replace(use, lane_busy_s=busy_s))

    def _counters(self, key: ModelKey, model: "Model") -> ModelCounters:
        lane = self.lanes[model.lane]
        sequences = lane.sequences(key)
        return ModelCounters(
            self.registry.statistics(key),
            lane.pending(key),
            lane.correction(key),
            dict(model.servable.captures),
            *((0, 0) if sequences is None else (sequences.count, sequences.nbytes)),
        )

    async def stop(self) -> bool:
        """Refuse unanswered requests and release the device. Returns False if a thread is still busy."""
        started = self._deploying is None or self._deploying.done()
        if self._deploying is not None:
            self._deploying.cancel()
        await self._background.close()
        ended = all(await asyncio.gather(*(lane.stop(_THREADS_END_S) for lane in self.lanes)))
        await self.lifecycle.close()
        if ended and started:  # otherwise a thread may still use the device
            self.lifecycle.release()
        return ended

    async def _forget_idle_sequences(self) -> None:
        while True:
            await asyncio.sleep(_FORGET_EVERY_S)
            self._states.forget_idle()

    def _wanted(self, found: Mapping[str, list[ScannedVersion]]) -> dict[str, list[ScannedVersion]]:
        """Return the models to load at the first start, with the steps of ensembles among them."""
        if self._config.model_control != "explicit" or "*" in self._config.load_models:
            return dict(found)
        names: set[str] = set()
        added = set(self._config.load_models)
        while added:
            names |= added
            ensembles = (e for name in added for e in found.get(name, ()) if isinstance(e, EnsembleSource))
            added = {step.model for ensemble in ensembles for step in ensemble.steps} - names
        return {name: versions for name, versions in found.items() if name in names}

    def _served(self, before: Sequence[ModelEntry]) -> dict[str, list[ScannedVersion]]:
        """Find the versions that were READY before, with the configurations that clients had sent.

        An ensemble whose steps were not ready is served, too: it waits for them.
        """
        groups: dict[tuple[str, bytes | None], list[int]] = {}
        for old in before:
            waits = old.wanted and old.config is not None and has_no_program(ModelConfig.FromString(old.config))
            if old.version is not None and (old.is_ready or waits):
                groups.setdefault((old.name, old.config_override), []).append(old.key.version)
        found: list[ScannedVersion] = []
        for (name, config), numbers in groups.items():
            override = None if config is None else ModelConfig.FromString(config)
            try:
                versions = versions_of(self._config.repository, name, override, numbers)
                reason = "it is no longer in the repository"
            except RepositoryError as error:
                versions, reason = [], str(error)
            found += versions or [Unloadable(name, reason, number) for number in numbers]
        return by_name(found)

    def _register(self, names: Collection[str], chosen: Sequence[ScannedVersion]) -> list[ModelSource]:
        """Publish the repository's models, and return those to load."""
        for name in names:
            self.registry.absent(name)
        sources = [entry for entry in chosen if isinstance(entry, ModelSource)]
        for source in sources:
            self.registry.loading(source)
        for entry in chosen:
            if isinstance(entry, Unloadable):
                self.registry.failed(entry.name, entry.version, entry.reason)
        for entry in chosen:  # after the models of their steps
            if isinstance(entry, EnsembleSource):
                self.registry.serve_ensemble(entry)
        return sources

    def _refuse_unknown(self, known: Collection[str]) -> None:
        for flag, names in (("--rates", self._config.model_rates), ("--load-model", self._config.load_models)):
            for name in names:
                if name not in known and name != "*":
                    hint = did_you_mean(name, known)
                    raise ConfigError(f"{flag}: there is no model '{name}' in {self._config.repository}{hint}")


def _log_start(entries: Sequence[ModelEntry]) -> None:
    """Log each failed model, then the counts of served and failed ones, with the models per reason."""
    failed = [entry for entry in entries if entry.state is ModelState.UNAVAILABLE]
    for entry in failed:
        _log.warning("model not served", extra={"fields": {"model": _shown(entry), "reason": entry.reason}})
    report_suppressed()
    models: dict[str, list[str]] = {}
    for entry in failed:
        models.setdefault(entry.reason, []).append(_shown(entry))
    reasons = [f"{', '.join(names)}: {reason}" for reason, names in models.items()]
    more = [f"and {len(reasons) - _MOST_REASONS} more reasons"] if len(reasons) > _MOST_REASONS else []
    fields: dict[str, object] = {"served": sum(entry.is_ready for entry in entries), "not_served": len(failed)}
    if failed:
        fields["reasons"] = "; ".join(reasons[:_MOST_REASONS] + more)
    _log.log(logging.WARNING if failed else logging.INFO, "models loaded", extra={"fields": fields})


def _shown(entry: ModelEntry) -> str:
    return entry.name if entry.version is None else f"{entry.name} version {entry.version}"
