"""The models of the engine and their states; every change is published to the front ends."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from server.engine.execution import Servable
from server.ipc.catalog import ModelEntry, ModelState
from server.ipc.model import ModelFootprint
from server.ipc.statistics import ModelStatistics, rejection_reason
from server.protocol.model_config import ModelConfig


@dataclass(slots=True)
class _Record:
    entry: ModelEntry
    statistics: ModelStatistics
    servable: Servable | None = None


class Registry:
    """Belongs to the event loop's thread."""

    def __init__(self, publish: Callable[[ModelEntry], None] = lambda entry: None) -> None:
        self._records: dict[str, _Record] = {}
        self._publish = publish

    def __iter__(self) -> Iterator[ModelEntry]:
        return iter([record.entry for record in self._records.values()])

    def get(self, name: str) -> ModelEntry | None:
        record = self._records.get(name)
        return None if record is None else record.entry

    def ready(self) -> Iterator[tuple[ModelEntry, Servable, ModelStatistics]]:
        """Iterate over the models that are served."""
        for record in self._records.values():
            if record.servable is not None and record.entry.state is ModelState.READY:
                yield record.entry, record.servable, record.statistics

    def absent(self, name: str) -> None:
        """Add a model of the repository that was not requested."""
        if name not in self._records:
            self._put(ModelEntry(name, None, ModelState.ABSENT, wanted=False))

    def loading(
        self, name: str, version: int, config: ModelConfig | None = None, override: bytes | None = None
    ) -> None:
        self._records.pop(name, None)
        self._put(
            ModelEntry(name, version, ModelState.LOADING, config=_serialized(config), config_override=override)
        )

    def loaded(
        self,
        servable: Servable,
        footprint: ModelFootprint | None = None,
        config: ModelConfig | None = None,
        override: bytes | None = None,
    ) -> ModelStatistics:
        """Serve a model, or replace its version; another version starts new statistics."""
        info = servable.info
        old = self.get(info.name)
        if old is not None and old.version != info.version:
            del self._records[info.name]
        kept = old.config if config is None and old is not None else _serialized(config)
        self._put(
            ModelEntry(
                info.name,
                info.version,
                ModelState.READY,
                info=info,
                footprint=footprint or ModelFootprint(),
                config=kept,
                config_override=override,
            )
        )
        record = self._records[info.name]
        record.servable = servable
        return record.statistics

    def moved(self, name: str, footprint: ModelFootprint) -> None:
        """Record that a model has another partition or other plans."""
        self._put(replace(self._records[name].entry, footprint=footprint))

    def failed(self, name: str, reason: str, version: int | None = None) -> None:
        old = self.get(name) or ModelEntry(name, version, ModelState.UNAVAILABLE)
        self._put(replace(old, state=ModelState.UNAVAILABLE, reason=reason, info=None, wanted=True))

    def unwanted(self, name: str) -> None:
        """Record that a model that is not served is no longer requested."""
        if (old := self.get(name)) is not None:
            self._put(replace(old, wanted=False))

    def unloading(self, name: str) -> None:
        """Stop serving a model; its present requests are still answered."""
        old = self._records[name].entry
        self._put(replace(old, state=ModelState.UNLOADING, reason="unloading", info=None, wanted=False))

    def unloaded(self, name: str) -> None:
        old = self._records[name].entry
        self._put(
            replace(old, state=ModelState.UNAVAILABLE, reason="unloaded", footprint=ModelFootprint(), wanted=False)
        )

    def rejected(self, name: str, error: Exception) -> None:
        """Count a refused request, if a retry could succeed."""
        if (reason := rejection_reason(error)) is not None:
            self.count_rejection(name, reason)

    def count_rejection(self, name: str, reason: str, count: int = 1) -> None:
        if name in self._records:
            self._records[name].statistics.rejected(reason, count)

    def _put(self, entry: ModelEntry) -> None:
        record = self._records.setdefault(entry.name, _Record(entry, ModelStatistics()))
        record.entry = entry
        if entry.info is None:
            record.servable = None
        self._publish(entry)


def _serialized(config: ModelConfig | None) -> bytes | None:
    return None if config is None else bytes(config.SerializeToString())
