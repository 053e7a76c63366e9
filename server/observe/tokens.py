"""Reloads token files when they change, so that tokens can be replaced without a restart."""

import asyncio
import logging

from server.config.config import ServeConfig
from server.errors import ConfigError
from server.file_state import FileState
from server.observe.access import Access, read_tokens

_log = logging.getLogger("cohabit.access")

_INTERVAL_S = 5.0


class TokenFiles:
    """Keeps an `Access` up to date. Event loop's thread only."""

    def __init__(self, config: ServeConfig, access: Access) -> None:
        """`access` must be made from the files' current contents."""
        self._config = config
        self._access = access
        self._paths = (*config.token_files, *config.control_token_files)
        self._seen = self._states()

    async def follow(self, interval_s: float = _INTERVAL_S) -> None:
        """Poll the files until cancelled; reload all when one has changed."""
        while self._paths:
            await asyncio.sleep(interval_s)
            states = await asyncio.to_thread(self._states)
            if states != self._seen:
                self._seen = states
                await self.reread()

    async def reread(self) -> None:
        """Reload all files. If one is unusable, keep every token as it was."""
        if not self._paths:
            return
        try:
            tokens, control_tokens = await asyncio.to_thread(read_tokens, self._config)
        except ConfigError as error:
            fields = {"reason": str(error)}
            _log.error("token files not reloaded, the tokens stay as they were", extra={"fields": fields})
            return
        self._access.tokens, self._access.control_tokens = tokens, control_tokens
        _log.info("token files reloaded", extra={"fields": {"tokens": len(tokens), "control": len(control_tokens)}})

    def _states(self) -> list[FileState | None]:
        return [FileState.of(path) for path in self._paths]
