"""Token files that are read again when they change, so that tokens can be exchanged without a restart."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from server.config.config import ServeConfig
from server.errors import ConfigError
from server.observe.access import Access, read_tokens

_log = logging.getLogger("cohabit.access")

_INTERVAL_S = 5.0

_State = tuple[int, int, int]


class TokenFiles:
    """Keeps an `Access` up to date. Belongs to the event loop's thread."""

    def __init__(self, config: ServeConfig, access: Access) -> None:
        """Begin with what `access` was made of just now."""
        self._config = config
        self._access = access
        self._seen = _states(self._paths)

    @property
    def _paths(self) -> Sequence[Path]:
        return (*self._config.token_files, *self._config.control_token_files)

    async def follow(self, interval_s: float = _INTERVAL_S) -> None:
        """Look again and again, until cancelled; a file that nobody writes is not read."""
        while self._paths:
            await asyncio.sleep(interval_s)
            states = await asyncio.to_thread(_states, self._paths)
            if states != self._seen:
                self._seen = states
                await self.reread()

    async def reread(self) -> None:
        """Take the tokens that the files have now. Where one cannot be used, all stay as they were."""
        if not self._paths:
            return
        try:
            tokens, control_tokens = await asyncio.to_thread(read_tokens, self._config)
        except ConfigError as error:
            fields = {"reason": str(error)}
            _log.error("tokens not read again, those so far stay valid", extra={"fields": fields})
            return
        self._access.exchange(tokens, control_tokens)
        _log.info("tokens read again", extra={"fields": {"tokens": len(tokens), "control": len(control_tokens)}})


def _states(paths: Sequence[Path]) -> tuple[_State | None, ...]:
    """What changes when a file is written, replaced, or taken away."""
    return tuple(map(_state, paths))


def _state(path: Path) -> _State | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
