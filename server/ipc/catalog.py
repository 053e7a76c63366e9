"""Catalog of models and their states, which the engine publishes to the front ends."""

from collections.abc import Iterator
from enum import Enum

import msgspec

from cohabit.server.errors import InvalidRequest, ModelNotFound, Refused, model_not_ready
from cohabit.server.ipc.model import ModelFootprint, ModelInfo, ModelKey

_LARGEST_VERSION = 2**63 - 1


class ModelState(Enum):
    """Triton's names of model states."""

    ABSENT = ""
    """In the repository, and never requested."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"
    REMOVED = "REMOVED"
    """No longer in the repository, and not served: its entry is dropped."""


class ModelEntry(msgspec.Struct, frozen=True):
    """A version of a model. `info` is set while it is READY, `reason` otherwise."""

    name: str
    version: int | None
    """None for a model without requested or existing versions."""
    state: ModelState
    reason: str = ""
    info: ModelInfo | None = None
    footprint: ModelFootprint = ModelFootprint()
    config: bytes | None = None
    """The model's configuration, a serialized `ModelConfig`; None without one."""
    config_override: bytes | None = None
    """A client's configuration from its load request, which replaces config.pbtxt."""
    archive: str = ""
    """Fingerprint of the served archive: loads of the same archive have the same weights."""
    wanted: bool = True
    """Whether serving it was requested."""

    @property
    def key(self) -> ModelKey:
        """The version's key. The entry must have a version."""
        assert self.version is not None
        return ModelKey(self.name, self.version)

    @property
    def is_ready(self) -> bool:
        return self.state is ModelState.READY


class Catalog:
    """Entries by name and version. Belongs to one thread."""

    def __init__(self, strict_readiness: bool = True) -> None:
        self._models: dict[str, dict[int | None, ModelEntry]] = {}
        self._strict = strict_readiness

    def __iter__(self) -> Iterator[ModelEntry]:
        for name in self._models:
            yield from self.versions(name)

    def update(self, entry: ModelEntry) -> None:
        """Add, replace or drop an entry. An entry with a version replaces its model's entry without one."""
        versions = self._models.setdefault(entry.name, {})
        if entry.state is ModelState.REMOVED:
            versions.pop(entry.version, None)
            if not versions:
                del self._models[entry.name]
            return
        if entry.state is ModelState.ABSENT and versions:
            return
        if entry.version is not None:
            versions.pop(None, None)
        versions[entry.version] = entry

    def get(self, name: str, version: int | None) -> ModelEntry | None:
        return self._models.get(name, {}).get(version)

    def versions(self, name: str) -> list[ModelEntry]:
        """Return a model's entries in any state, in the order of their versions."""
        return sorted(self._models.get(name, {}).values(), key=lambda entry: entry.version or 0)

    def find(self, name: str, version: str | None = None) -> ModelEntry:
        """Look up a version of a model in any state; without `version`, the highest READY one.

        Raises ModelNotFound, or InvalidRequest for a version that is not a number.
        """
        number = None if version is None else _version(name, version)
        entries = [entry for entry in self.versions(name) if number is None or entry.version == number]
        if not entries:
            raise ModelNotFound(name, number)
        return max(
            entries, key=lambda entry: (entry.is_ready, entry.state is ModelState.LOADING, entry.version or 0)
        )

    def require(self, name: str, version: str | None = None) -> ModelInfo:
        """Return a model's description. Raises Refused while it loads, and as `find` does."""
        entry = self.find(name, version)
        if entry.state is ModelState.LOADING:
            raise model_not_ready(name, entry.reason or "it is still loading")
        if entry.info is None:
            raise ModelNotFound(
                name, None if version is None else entry.version, entry.reason or "it is not loaded"
            )
        return entry.info

    def ready(self, name: str | None = None, version: str | None = None) -> list[ModelEntry]:
        """Return the READY entries of all models, of one, or of one version. Raises Refused for none."""
        if name is None:
            return [entry for entry in self if entry.is_ready]
        try:
            entries = self.versions(name) if version is None else [self.find(name, version)]
        except ModelNotFound:
            entries = []
        if not (found := [entry for entry in entries if entry.is_ready]):
            raise Refused("ModelNotListed", f"requested model '{name}' is not available")
        return found

    def not_ready(self) -> str | None:
        """Return why the server is not ready, or None.

        Every requested model must have a READY version. Without strict readiness, one READY model is enough once all
        have been tried.
        """
        loading: list[str] = []
        failed: list[str] = []
        for name in self._models:
            states = {entry.state for entry in self.versions(name) if entry.wanted}
            if states and ModelState.READY not in states:
                (loading if ModelState.LOADING in states else failed).append(name)
        if loading:
            return f"still loading: {', '.join(loading)}"
        if failed and (self._strict or not any(entry.is_ready for entry in self)):
            return f"not loaded: {', '.join(failed)}"
        return None


def _version(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidRequest(
            f"failed to get model version from specified version string '{text[:40]}': versions of model '{name}' are"
            " numbers"
        )
    if len(text) > 19 or int(text) > _LARGEST_VERSION:
        raise InvalidRequest(
            f"version {text[:40]} of model '{name}' is over the largest version, {_LARGEST_VERSION}"
        )
    return int(text)
