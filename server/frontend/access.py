"""Access control with bearer tokens. Calls that change the server need a permission of their own."""

import asyncio
import hashlib
import hmac
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import ConfigError, Refused, Unauthenticated
from cohabit.server.file_state import FileState

_log = logging.getLogger("cohabit.access")

_TOKEN = re.compile(r"[\x21-\x7e]{16,512}")
_LARGEST_FILE_BYTES = 1 << 20
_INTERVAL_S = 5.0
_UNKNOWN_TOKEN_S = 0.5
"""Delay in seconds before an unknown token is refused."""
_DELAYED_SHARE = 16
"""Divisor: fraction of a port's connections that delayed refusals may occupy."""

Digest = bytes
"""SHA-256 of a token. Comparing digests reveals neither the token nor its length."""


class Permission(Enum):
    HEALTH = "health"
    METRICS = "metrics"
    INFERENCE = "inference"
    """Infer, and read metadata, statistics and listings."""
    CONTROL = "control"
    """Load and unload models, register shared memory, read and change trace and log settings."""


@dataclass(slots=True)
class Access:
    """The accepted tokens and their permissions; control tokens permit everything. Event loop's thread only."""

    tokens: tuple[Digest, ...] = ()
    control_tokens: tuple[Digest, ...] = ()
    open: frozenset[Permission] = frozenset(Permission)
    """Permissions that need no token."""
    refused: dict[str, int] = field(
        default_factory=lambda: {"unauthenticated": 0, "not_permitted": 0}, compare=False, repr=False
    )
    """Number of refused calls by reason."""
    most_delayed: int = 64
    """Maximum number of concurrently delayed refusals of unknown tokens."""
    sleep: Callable[[float], Awaitable[None]] = field(default=asyncio.sleep, compare=False, repr=False)
    _delayed: int = field(default=0, init=False, compare=False, repr=False)

    async def admit(self, authorization: str | None, permission: Permission, peer: str) -> None:
        """Check a call's Authorization header. Raises Unauthenticated, or Refused without the permission.

        Logs a refusal with the peer's address. Unknown tokens are refused after a delay, so that a connection can try
        only a few. The number of delayed refusals is limited, because each keeps a connection. Beyond the limit, the
        refusal comes at once and ends the connection.
        """
        try:
            self.require(authorization, permission)
        except (Unauthenticated, Refused) as error:
            _log.warning("a call was refused for its token", extra={"fields": {"peer": peer, "reason": str(error)}})
            if isinstance(error, Unauthenticated) and error.wrong_token:
                error.ends_connection = self._delayed >= self.most_delayed
                await self._delay(error)
            raise

    async def _delay(self, error: Unauthenticated) -> None:
        if error.ends_connection:
            return
        self._delayed += 1
        try:
            await self.sleep(_UNKNOWN_TOKEN_S)
        finally:
            self._delayed -= 1

    def require(self, authorization: str | None, permission: Permission) -> None:
        """Like `admit`, without delay or log record."""
        if permission in self.open:
            return
        token = _bearer(authorization)
        if token is None:
            self.refused["unauthenticated"] += 1
            raise Unauthenticated("this call needs a token: send the header 'Authorization: Bearer TOKEN'")
        digest = _digest(token)
        in_control, known = _matches_any(digest, self.control_tokens), _matches_any(digest, self.tokens)
        if not (in_control or known):
            self.refused["unauthenticated"] += 1
            raise Unauthenticated("the token is none of this server's", wrong_token=True)
        if permission is Permission.CONTROL and not in_control:
            self.refused["not_permitted"] += 1
            raise Refused(
                "PermissionMissing",
                "the token does not permit calls that change the server; use one of its --control-token-file"
                if self.control_tokens
                else "calls that change the server are not permitted; start it with a --control-token-file",
            )


OPEN = Access()


class TokenFiles:
    """Reloads token files when they change, so that tokens can be replaced. Event loop's thread only."""

    def __init__(self, config: ServeConfig, access: Access) -> None:
        """`access` must be made from the files' current contents."""
        self._config = config
        self._access = access
        self._paths = (*config.token_files, *config.control_token_files)
        self._seen = self._states()

    async def watch(self, interval_s: float = _INTERVAL_S) -> None:
        """Poll the files until cancelled; reload all when one has changed."""
        while self._paths:
            await asyncio.sleep(interval_s)
            states = await asyncio.to_thread(self._states)
            if states != self._seen:
                self._seen = states
                await self.reread()

    async def reread(self) -> None:
        """Reload all files. If one is unusable, keep all tokens."""
        try:
            tokens, control_tokens = await asyncio.to_thread(_read_tokens, self._config)
        except ConfigError as error:
            fields = {"reason": str(error)}
            _log.error("token files not reloaded, the tokens stay as they were", extra={"fields": fields})
            return
        self._access.tokens, self._access.control_tokens = tokens, control_tokens
        _log.info("token files reloaded", extra={"fields": {"tokens": len(tokens), "control": len(control_tokens)}})

    def _states(self) -> list[FileState | None]:
        return [FileState.of(path) for path in self._paths]


def open_access(config: ServeConfig) -> Access:
    """Read the token files. Raises ConfigError, which names the file and never a token."""
    tokens, control_tokens = _read_tokens(config)
    guarded = set()
    if tokens:
        guarded |= {Permission.INFERENCE, Permission.METRICS, Permission.CONTROL}
    if control_tokens:
        guarded.add(Permission.CONTROL)
    most_delayed = max(1, config.max_connections // _DELAYED_SHARE)
    return Access(tokens, control_tokens, frozenset(Permission) - guarded, most_delayed=most_delayed)


def _read_tokens(config: ServeConfig) -> tuple[tuple[Digest, ...], tuple[Digest, ...]]:
    """Return digests of the tokens and of the control tokens. Raises ConfigError."""
    return _read_all(config.token_files), _read_all(config.control_token_files)


def _read_all(paths: Sequence[Path]) -> tuple[Digest, ...]:
    return tuple(dict.fromkeys(_digest(token) for path in paths for token in _read(path)))


def _read(path: Path) -> list[str]:
    """Return one token per line, skipping empty lines and lines that begin with #."""
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ConfigError(f"token file {path} is over {_LARGEST_FILE_BYTES} bytes")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"token file {path} cannot be read: {reason}") from None
    tokens = {number: line.strip() for number, line in enumerate(lines, 1)}
    tokens = {number: line for number, line in tokens.items() if line and not line.startswith("#")}
    for number, token in tokens.items():
        if not _TOKEN.fullmatch(token):
            raise ConfigError(
                f"token file {path}, line {number}: a token is 16 to 512 printable characters without spaces"
            )
    if not tokens:
        raise ConfigError(f"token file {path} has no token; put one on each line")
    return list(tokens.values())


def _bearer(authorization: str | None) -> str | None:
    scheme, _, token = (authorization or "").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(token: str) -> Digest:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _matches_any(digest: Digest, tokens: Sequence[Digest]) -> bool:
    """Compare with every token, so that the duration does not depend on which one matches."""
    return sum(hmac.compare_digest(digest, token) for token in tokens) > 0
