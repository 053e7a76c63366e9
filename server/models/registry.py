"""The models of this server: their states, and how they are found by name and version."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from server.engine.statistics import ModelStatistics
from server.errors import InvalidRequest, ModelNotFound, ModelNotListed, ModelNotReady, RequestError
from server.protocol.model import Footprint, ModelInfo, Servable

if TYPE_CHECKING:
    from server.protocol.model_config import ModelConfig

_LARGEST_VERSION = 2**63 - 1


class State(Enum):
    """Triton's names for what a model is doing."""

    ABSENT = ""
    """In the repository, but nobody has asked for it yet."""
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


@dataclass(slots=True)
class Entry:
    """One model. `servable` is there once it is READY, `reason` says why it is not."""

    name: str
    version: int | None
    """None if the repository has no version that could be loaded."""
    state: State
    reason: str = ""
    servable: Servable | None = None
    footprint: Footprint = field(default_factory=Footprint)
    config: "ModelConfig | None" = None
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    wanted: bool = True
    """Whether the server was asked to serve it."""

    @property
    def info(self) -> ModelInfo:
        """Describe the model; raises unless it is READY."""
        return self.require().info

    def require(self) -> Servable:
        if self.state is State.LOADING:
            raise ModelNotReady(self.name, self.reason or "it is still loading")
        if self.servable is None:
            raise ModelNotFound(self.name, reason=self.reason or "it is not loaded")
        return self.servable


class Registry:
    """Belongs to the event loop's thread."""

    def __init__(self, strict: bool = True) -> None:
        self._entries: dict[str, Entry] = {}
        self._strict = strict

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def ready(self) -> bool:
        """True once every model that was asked for can be served; if not strict, once every one has been tried."""
        return self.not_ready() is None

    def not_ready(self) -> str | None:
        """Say what keeps the server from being ready, or None."""
        loading = [entry.name for entry in self if entry.wanted and entry.state is State.LOADING]
        if loading:
            return f"still loading: {', '.join(loading)}"
        failed = [entry.name for entry in self if entry.wanted and entry.state is not State.READY]
        if failed and (self._strict or not any(entry.state is State.READY for entry in self)):
            return f"not loaded: {', '.join(failed)}"
        return None

    def absent(self, name: str) -> None:
        """Know of a model that is not to be served yet."""
        self._entries.setdefault(name, Entry(name, None, State.ABSENT, wanted=False))

    def loading(self, name: str, version: int, config: "ModelConfig | None" = None) -> None:
        self._entries[name] = Entry(name, version, State.LOADING, config=config)

    def loaded(
        self, servable: Servable, footprint: Footprint | None = None, config: "ModelConfig | None" = None
    ) -> Entry:
        """Serve a model, or another version in place of the one so far, with statistics of its own."""
        info = servable.info
        entry = self._entries.setdefault(info.name, Entry(info.name, info.version, State.LOADING))
        if entry.version != info.version:
            entry.statistics = ModelStatistics()
        entry.state, entry.reason, entry.version, entry.wanted = State.READY, "", info.version, True
        entry.servable, entry.footprint, entry.config = servable, footprint or Footprint(), config or entry.config
        return entry

    def failed(self, name: str, reason: str, version: int | None = None) -> None:
        entry = self._entries.setdefault(name, Entry(name, version, State.UNAVAILABLE))
        entry.state, entry.reason, entry.servable, entry.wanted = State.UNAVAILABLE, reason, None, True

    def unwanted(self, name: str) -> None:
        """Hear that nobody wants a model any more that could not be served."""
        if name in self._entries:
            self._entries[name].wanted = False

    def unloading(self, name: str) -> None:
        """Serve a model no more; what it has been asked already is answered."""
        entry = self._entries[name]
        entry.state, entry.reason, entry.servable, entry.wanted = State.UNLOADING, "unloading", None, False

    def unloaded(self, name: str) -> None:
        entry = self._entries[name]
        entry.state, entry.reason, entry.footprint = State.UNAVAILABLE, "unloaded", Footprint()

    def rejected(self, name: str, error: RequestError) -> None:
        """Count a request that was refused."""
        if name in self._entries:
            self._entries[name].statistics.rejected(error)

    def find(self, name: str, version: str | None = None) -> Entry:
        """Look up a model, whatever its state. `version` is None for whichever is served.

        Raises ModelNotFound, or InvalidRequest for a version that no number holds.
        """
        number = None if version is None else _version(name, version)
        entry = self._entries.get(name)
        if entry is None or (number is not None and number != entry.version):
            raise ModelNotFound(name, number)
        return entry

    def listed(self, name: str | None = None, version: str | None = None) -> Iterable[Entry]:
        """Return the READY entries, or the one asked for; raises ModelNotListed if it is not READY."""
        if name is None:
            return [entry for entry in self if entry.state is State.READY]
        try:
            entry = self.find(name, version)
        except ModelNotFound as error:
            raise ModelNotListed(name) from error
        if entry.state is not State.READY:
            raise ModelNotListed(name)
        return [entry]


def _version(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InvalidRequest(f"version '{text[:40]}' of model '{name}' is not a number")
    if len(text) > 19 or int(text) > _LARGEST_VERSION:
        raise InvalidRequest(
            f"version {text[:40]} of model '{name}' is over the largest version, {_LARGEST_VERSION}"
        )
    return int(text)
