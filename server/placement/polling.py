"""Polls the repository: loads new and changed models, and unloads removed ones."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from server.errors import LoadFailed, RepositoryError
from server.models.registry import Registry
from server.models.repository import ModelSource, Unloadable, scan
from server.placement.lifecycle import Lifecycle

_log = logging.getLogger("cohabit.poll")

Signature = tuple[object, ...]
"""Changes when a model must be loaded again."""

Model = ModelSource | Unloadable


def signatures(models: Sequence[Model]) -> dict[str, tuple[Model, Signature]]:
    return {model.name: (model, _signature(model)) for model in models}


def _signature(model: Model) -> Signature:
    if isinstance(model, Unloadable):
        return (model.reason,)
    try:
        program = model.path.stat()
    except OSError:
        return ("gone",)
    config = model.config.SerializeToString(deterministic=True) if model.config is not None else None
    return (model.version, program.st_mtime_ns, program.st_size, config, tuple(model.labels.items()))


class Poller:
    """Belongs to the event loop's thread. `models` are those found at the start."""

    def __init__(self, repository: Path, lifecycle: Lifecycle, registry: Registry, models: Sequence[Model]) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._registry = registry
        self._seen = {name: signature for name, (_, signature) in signatures(models).items()}

    async def run(self, interval_s: float) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.poll()
            except (RepositoryError, OSError) as error:
                _log.warning("repository not polled", extra={"fields": {"reason": str(error)}})

    async def poll(self) -> None:
        """Apply the changes since the last poll. A model that failed is tried again when it changes.

        Raises RepositoryError if the repository cannot be read; then all models stay as they are.
        """
        found = await asyncio.to_thread(lambda: signatures(scan(self._repository, may_be_empty=True)))
        seen, self._seen = self._seen, {name: signature for name, (_, signature) in found.items()}
        for name in seen.keys() - found.keys():
            await self._lifecycle.unload_model(name)
        for name, (model, signature) in found.items():
            if seen.get(name) != signature:
                await self._load(model)

    async def _load(self, model: Model) -> None:
        if isinstance(model, Unloadable):
            _log.warning("model not loaded", extra={"fields": {"model": model.name, "reason": model.reason}})
            if not self._lifecycle.is_serving(model.name):
                self._registry.failed(model.name, model.reason)
            return
        try:
            await self._lifecycle.load_source(model)
        except LoadFailed:
            return  # logged, and recorded in the registry
