"""Polls the repository: loads new and changed versions of models, and unloads removed ones."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from cohabit.server.deploy.lifecycle import Lifecycle
from cohabit.server.errors import LoadFailed, RepositoryError
from cohabit.server.repository.registry import Registry
from cohabit.server.repository.scan import scan
from cohabit.server.repository.sources import EnsembleSource, ScannedVersion, Unloadable, by_name

_log = logging.getLogger("cohabit.poll")


class Poller:
    """Belongs to the event loop's thread. `models` are the versions found at the start, by model name."""

    def __init__(
        self,
        repository: Path,
        lifecycle: Lifecycle,
        registry: Registry,
        models: Mapping[str, Sequence[ScannedVersion]],
    ) -> None:
        self._repository = repository
        self._lifecycle = lifecycle
        self._registry = registry
        self._seen = dict(models)

    async def run(self, interval_s: float) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.poll()
            except (RepositoryError, OSError) as error:
                _log.warning("repository not polled", extra={"fields": {"reason": str(error)}})

    async def poll(self) -> None:
        """Apply the changes since the last poll. A failed version is retried when its model changes.

        Raises RepositoryError if the repository cannot be read; then all models stay as they are.
        """
        found = by_name(await asyncio.to_thread(scan, self._repository, may_be_empty=True))
        seen = dict(self._seen)
        for name in seen.keys() - found.keys():
            await self._lifecycle.serve(name, ())
            del self._seen[name]
        for name, versions in sorted(found.items(), key=lambda item: isinstance(item[1][0], EnsembleSource)):
            if seen.get(name) != versions:  # ensembles last, because they need their steps
                await self._serve(name, versions)
                self._seen[name] = versions
        if seen != found:
            await self._lifecycle.forget_removed()

    async def _serve(self, name: str, found: Sequence[ScannedVersion]) -> None:
        """Serve these versions. If the model as a whole is invalid, its served versions stay."""
        if isinstance(found[0], Unloadable) and found[0].version is None:
            _log.warning("model not loaded", extra={"fields": {"model": name, "reason": found[0].reason}})
            if not self._lifecycle.is_serving(name):
                self._registry.failed(name, None, found[0].reason)
            return
        try:
            await self._lifecycle.serve(name, found)
        except LoadFailed:
            return  # logged, and recorded in the registry
