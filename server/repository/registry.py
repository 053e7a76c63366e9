"""The engine's models and their states. Every change is published to the front end."""

from collections.abc import Callable, Collection, Iterator

from msgspec.structs import replace

from cohabit.server.errors import ModelNotFound, RequestError
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.model import ModelFootprint, ModelInfo, ModelKey
from cohabit.server.ipc.statistics import REJECTIONS, ModelStatistics
from cohabit.server.repository.sources import EnsembleSource, ModelSource
from cohabit.server.triton.ensembles import mismatch


class Registry:
    """Belongs to the event loop's thread."""

    def __init__(self, publish: Callable[[ModelEntry], None] = lambda entry: None) -> None:
        self._catalog = Catalog()
        self._statistics: dict[ModelKey, ModelStatistics] = {}
        self._ensembles: dict[ModelKey, EnsembleSource] = {}
        """Served ensembles: each is READY whenever its steps are."""
        self._publish = publish

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._catalog)

    def statistics(self, model: ModelKey) -> ModelStatistics:
        """Return the counters of a version that is loading or served."""
        return self._statistics[model]

    def absent(self, name: str) -> None:
        """Add a model of the repository that was not requested."""
        self._put(ModelEntry(name, None, ModelState.ABSENT, wanted=False))

    def loading(self, source: ModelSource) -> None:
        """Record that a version is being loaded; its counters start at zero."""
        self._ensembles.pop(source.key, None)  # its folder has become a model's
        self._statistics[source.key] = ModelStatistics()
        self._put(_entry(source, ModelState.LOADING))

    def served(
        self, source: ModelSource, info: ModelInfo, footprint: ModelFootprint, archive: str = ""
    ) -> ModelStatistics:
        """Record that a version is served, possibly replacing an older load. Returns its counters."""
        self._put(replace(_entry(source, ModelState.READY), info=info, footprint=footprint, archive=archive))
        return self._statistics[source.key]

    def configured(self, source: ModelSource) -> None:
        """Record a new configuration that does not affect how a served version runs."""
        entry = _entry(source, ModelState.READY)
        old = self._entry(source.key)
        self._put(replace(old, config=entry.config, config_override=entry.config_override))

    def moved(self, model: ModelKey, footprint: ModelFootprint) -> None:
        """Record that a model's partition or plans have changed."""
        self._put(replace(self._entry(model), footprint=footprint))

    def failed(self, name: str, version: int | None, reason: str) -> None:
        """Record why a version is not served; a `version` of None is the model as a whole."""
        old = self._catalog.get(name, version) or ModelEntry(name, version, ModelState.UNAVAILABLE)
        self._put(replace(old, state=ModelState.UNAVAILABLE, reason=reason, info=None, wanted=True))

    def restored(self, before: ModelEntry) -> None:
        """Record a version that was not READY when the previous engine process ended."""
        if before.key in self._ensembles:
            return  # it waits for its steps
        interrupted = "the engine's process ended while it was being loaded; load it again"
        reasons = {ModelState.LOADING: interrupted, ModelState.UNLOADING: "unloaded"}
        reason, nothing = reasons.get(before.state, before.reason), ModelFootprint()
        self._put(replace(before, state=ModelState.UNAVAILABLE, reason=reason, info=None, footprint=nothing))

    def request_only(self, name: str, versions: Collection[int]) -> None:
        """Record that a model's other versions are no longer requested."""
        for entry in self._catalog.versions(name):
            if entry.wanted and entry.version not in versions:
                self._put(replace(entry, wanted=False))

    def unloading(self, model: ModelKey) -> None:
        """Stop serving a version. Its pending requests are still answered."""
        old = self._entry(model)
        self._put(replace(old, state=ModelState.UNLOADING, reason="unloading", info=None, wanted=False))

    def unloaded(self, model: ModelKey) -> None:
        old, nothing = self._entry(model), ModelFootprint()
        self._statistics.pop(model, None)
        self._put(replace(old, state=ModelState.UNAVAILABLE, reason="unloaded", footprint=nothing, wanted=False))

    def serve_ensemble(self, source: EnsembleSource) -> str | None:
        """Serve an ensemble whenever its steps are ready. Returns why it is not ready now, or None.

        A READY ensemble is replaced only by one that is ready, too.
        """
        entry, old = self._ensemble_entry(source), self._catalog.get(*source.key)
        if entry.is_ready or old is None or not old.is_ready:
            self._ensembles[source.key] = source
            self._put(entry)
        return None if entry.is_ready else entry.reason

    def unload_ensembles(self, name: str, but: Collection[int]) -> None:
        """Stop serving the versions of an ensemble, except for these."""
        for key in [key for key in self._ensembles if key.name == name and key.version not in but]:
            del self._ensembles[key]
            old = self._entry(key)
            self._put(replace(old, state=ModelState.UNAVAILABLE, reason="unloaded", info=None, wanted=False))

    def is_ready(self, name: str, version: int | None = None) -> bool:
        """Whether a version of a model or an ensemble is READY; without `version`, any of them."""
        return any(e.is_ready and version in (None, e.version) for e in self._catalog.versions(name))

    def idle(self) -> list[ModelEntry]:
        """Return the entries of versions that are neither served nor requested."""
        unused = ModelState.ABSENT, ModelState.UNAVAILABLE
        return [entry for entry in self._catalog if entry.state in unused and not entry.wanted]

    def forget(self, entry: ModelEntry) -> None:
        """Drop an entry that was removed from the repository, unless it has changed meanwhile."""
        if self._catalog.get(entry.name, entry.version) is entry:
            if entry.version is not None:
                self._statistics.pop(entry.key, None)
                self._ensembles.pop(entry.key, None)
            self._put(replace(entry, state=ModelState.REMOVED))

    def rejected(self, model: ModelKey, error: RequestError) -> None:
        """Count a refused request, if a retry could succeed."""
        if (reason := REJECTIONS.get(error.kind)) is not None:
            self.count_rejection(model, reason)

    def count_rejection(self, model: ModelKey, reason: str, count: int = 1) -> None:
        if model in self._statistics:
            self._statistics[model].rejected(reason, count)

    def _entry(self, model: ModelKey) -> ModelEntry:
        entry = self._catalog.get(*model)
        assert entry is not None
        return entry

    def _put(self, entry: ModelEntry) -> None:
        self._catalog.update(entry)
        self._publish(entry)
        for source in list(self._ensembles.values()):
            if any(step.model == entry.name for step in source.steps):
                changed = self._ensemble_entry(source)
                if changed != self._catalog.get(*source.key):
                    self._put(changed)

    def _ensemble_entry(self, source: EnsembleSource) -> ModelEntry:
        """Return an ensemble's entry, whose state follows from the entries of its steps."""
        if self._contains_itself(source):
            return _ensemble(source, ModelState.UNAVAILABLE, "it is a step of an ensemble that is a step of it")
        infos: list[ModelInfo] = []
        loading = ""
        for step in source.steps:
            try:
                entry = self._catalog.find(step.model, step.version)
            except ModelNotFound:
                what = "such model" if step.version is None else f"version {step.version} of it"
                return _ensemble(source, ModelState.UNAVAILABLE, f"{step}: there is no {what}")
            if entry.info is not None:
                infos.append(entry.info)
            elif entry.state is ModelState.LOADING:
                loading = loading or f"{step} is still loading"
            else:
                reason = f"{step} is not ready: {entry.reason or 'it is not loaded'}"
                return _ensemble(source, ModelState.UNAVAILABLE, reason)
        if loading:
            return _ensemble(source, ModelState.LOADING, loading)
        if (contradiction := mismatch(source.info, source.steps, infos)) is not None:
            return _ensemble(source, ModelState.UNAVAILABLE, f"config.pbtxt: {contradiction}")
        return replace(_ensemble(source, ModelState.READY), info=source.info)

    def _contains_itself(self, source: EnsembleSource) -> bool:
        reached: set[str] = set()
        found = {step.model for step in source.steps}
        while found:
            reached |= found
            inner = [ensemble for ensemble in self._ensembles.values() if ensemble.name in found]
            found = {step.model for ensemble in inner for step in ensemble.steps} - reached
        return source.name in reached


def _ensemble(source: EnsembleSource, state: ModelState, reason: str = "") -> ModelEntry:
    return replace(_entry(source, state), reason=reason)


def _entry(source: ModelSource | EnsembleSource, state: ModelState) -> ModelEntry:
    config = None if source.config is None else bytes(source.config.SerializeToString())
    return ModelEntry(source.name, source.version, state, config=config, config_override=source.config_override)
