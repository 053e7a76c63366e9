"""The catalog of models and their states, which the engine publishes to the front ends."""

from collections.abc import Iterator
from enum import Enum

import msgspec

from server.errors import InvalidRequest, ModelNotFound, ModelNotListed, ModelNotReady
from server.ipc.model import ModelFootprint, ModelInfo

_LARGEST_VERSION = 2**63 - 1


class ModelState(Enum):
    """Triton's names of model states."""

    ABSENT = ""
    """In the repository, and never requested."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class ModelEntry(msgspec.Struct, frozen=True):
    """One model. `info` is set while it is READY, `reason` otherwise."""

    name: str
    version: int | None
    """None if the repository has no version that can be loaded."""
    state: ModelState
    reason: str = ""
    info: ModelInfo | None = None
    footprint: ModelFootprint = ModelFootprint()
    config: bytes | None = None
    """The model's configuration, a serialized `ModelConfig`; None if it has none."""
    config_override: bytes | None = None
    """A configuration that a client sent with its load request, to replace config.pbtxt."""
    wanted: bool = True
    """Whether serving it was requested."""

    def require(self) -> ModelInfo:
        """Return the model's description. Raises ModelNotReady or ModelNotFound unless it is READY."""
        if self.state is ModelState.LOADING:
            raise ModelNotReady(self.name, self.reason or "it is still loading")
        if self.info is None:
            raise ModelNotFound(self.name, reason=self.reason or "it is not loaded")
        return self.info


class Catalog:
    """Entries by name. Belongs to one thread."""

    def __init__(self, strict_readiness: bool = True) -> None:
        self._entries: dict[str, ModelEntry] = {}
        self._strict = strict_readiness

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter(self._entries.values())

    def update(self, entry: ModelEntry) -> None:
        self._entries[entry.name] = entry

    def get(self, name: str) -> ModelEntry | None:
        return self._entries.get(name)

    def find(self, name: str, version: str | None = None) -> ModelEntry:
        """Look up a model in any state. `version` None means the version that is served.

        Raises ModelNotFound, or InvalidRequest for a version that is no number.
        """
        number = None if version is None else _version(name, version)
        entry = self._entries.get(name)
        if entry is None or (number is not None and number != entry.version):
            raise ModelNotFound(name, number)
        return entry

    def listed(self, name: str | None = None, version: str | None = None) -> list[ModelEntry]:
        """Return all READY entries, or the named one. Raises ModelNotListed if it is not READY."""
        if name is None:
            return [entry for entry in self if entry.state is ModelState.READY]
        try:
            entry = self.find(name, version)
        except ModelNotFound as error:
            raise ModelNotListed(name) from error
        if entry.state is not ModelState.READY:
            raise ModelNotListed(name)
        return [entry]

    def not_ready(self) -> str | None:
        """Return why the server is not ready, or None.

        Every requested model must be READY; without strict readiness, one is enough once all have been tried.
        """
        loading = [entry.name for entry in self if entry.wanted and entry.state is ModelState.LOADING]
        if loading:
            return f"still loading: {', '.join(loading)}"
        failed = [entry.name for entry in self if entry.wanted and entry.state is not ModelState.READY]
        if failed and (self._strict or not any(entry.state is ModelState.READY for entry in self)):
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
