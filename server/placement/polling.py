"""Looks at the repository now and then, and loads what is new or changed and unloads what is gone."""

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
"""Differs when a model must be loaded anew."""


Model = ModelSource | Unloadable


def look(models: Sequence[Model]) -> dict[str, tuple[Model, Signature]]:
    return {model.name: (model, _signature(model)) for model in models}


def _signature(model: Model) -> Signature:
    if isinstance(model, Unloadable):
        return (model.reason,)
    try:
        program = model.path.stat()
    except OSError:
        return ("gone",)
    config = model.config.SerializeToString(deterministic=True) if model.config is not None else None
    return (model.version, program.st_mtime_ns, program.st_size, config)


class Poller:
    """Begins with `models`, what was there at start. Belongs to the event loop's thread."""

    def __init__(self, repository: Path, lifecycle: Lifecycle, registry: Registry, models: Sequence[Model]) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._registry = registry
        self._seen = {name: signature for name, (_, signature) in look(models).items()}

    async def run(self, interval_s: float) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.follow()
            except (RepositoryError, OSError) as error:
                _log.warning("repository not polled", extra={"fields": {"reason": str(error)}})

    async def follow(self) -> None:
        """Do what has changed since the last look. A model that fails is tried again when it has changed again.

        Raises RepositoryError if nothing can be seen: then everything stays as it is.
        """
        found = await asyncio.to_thread(lambda: look(scan(self._repository, may_be_empty=True)))
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
            return  # it has been logged, and the registry says why
