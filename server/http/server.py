"""An HTTP port: aiohttp's server with bounded connections, TLS and Unix sockets."""

import asyncio
import logging
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, cast

import msgspec
from aiohttp import web
from aiohttp.http import RawRequestMessage

from cohabit.server.errors import ConfigError
from cohabit.server.frontend.listening import TlsFiles, address_of, open_sockets
from cohabit.server.http.errors import error_response

KEEP_ALIVE_S = 75.0
_READ_AHEAD_BYTES = 256 << 10
"""How much of a body may wait to be read before its client is paused."""
_BACKLOG = 512
_HANDSHAKE_S = 20.0
_MOST_ERROR_CHARACTERS = 300

_log = logging.getLogger("cohabit.http")


class HttpServer:
    """Serves one application on any number of addresses. All methods belong to the event loop's thread."""

    def __init__(
        self,
        app: web.Application,
        *,
        max_connections: int,
        keep_alive_s: float = KEEP_ALIVE_S,
        tls: TlsFiles | None = None,
        reuse_port: bool = False,
    ) -> None:
        """`keep_alive_s` bounds how long a connection may be without a whole request head."""
        self._max_connections = max_connections
        self._tls = tls
        self._reuse_port = reuse_port
        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": keep_alive_s,
            "read_bufsize": _READ_AHEAD_BYTES,
        }
        self._runner = web.AppRunner(app, handler_cancellation=True, **self._options)
        self._listening: list[asyncio.Server] = []
        self._unix: Path | None = None

    async def start(self, hosts: Sequence[str], port: int, unix: Path | None, flag: str) -> str:
        """Listen, and return the URL of the first host.

        Port 0 takes a free port, the same one on every host. The Unix socket has no TLS. Raises ConfigError, which
        names the flag, for an address that cannot be bound, and for unusable TLS files.
        """
        loop = asyncio.get_running_loop()
        tls = None if self._tls is None else self._tls.context()
        await self._runner.setup()
        sockets = open_sockets(hosts, port, flag, self._reuse_port)
        for sock in sockets:
            listening = await loop.create_server(
                self._accept,
                sock=sock,
                ssl=tls,
                backlog=_BACKLOG,
                ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
            )
            self._listening.append(listening)
        if unix is not None:
            try:
                self._listening.append(await loop.create_unix_server(self._accept, unix, backlog=_BACKLOG))
            except OSError as error:
                raise ConfigError(f"{flag}: cannot listen on {unix}: {error}") from error
            self._unix = unix
        scheme = "http" if tls is None else "https"
        return f"{scheme}://{address_of(hosts[0], sockets[0].getsockname()[1])}"

    async def stop(self, grace_s: float) -> None:
        """Take no more connections, give requests under way this long, then cancel them."""
        for listening in self._listening:
            listening.close()
        if (server := self._runner.server) is not None:
            server.pre_shutdown()
            await server.shutdown(grace_s)
        await self._runner.cleanup()
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= self._max_connections:
            return _ConnectionRefused(self._max_connections)
        return _JsonErrorHandler(server, loop=asyncio.get_running_loop(), **self._options)


class _JsonErrorHandler(web.RequestHandler):
    """A connection. Input that is not HTTP, and heads over a limit, are answered as `{"error": ...}`."""

    __slots__ = ("_newest",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._newest: tuple[Any, Any] | None = None
        """The last request that was parsed, with its body."""

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection for its answers if the client closes its side after a request with `Connection: close`.

        Any other client that closes its side has gone, as far as TCP tells, and its requests are cancelled.
        """
        if self._newest is None or self.ssl_context is not None:
            return False
        message, body = self._newest
        return not isinstance(message, RawRequestMessage) or bool(message.should_close and body.is_eof())

    def data_received(self, data: bytes) -> None:
        """Parse input. A body that goes on with something that is not HTTP ends its request at once."""
        before = self._newest
        super().data_received(data)
        if not self._messages:
            return
        self._newest = self._messages[-1]
        if not isinstance(self._newest[0], RawRequestMessage):
            body = self._messages[-2][1] if len(self._messages) > 1 else before and before[1]
            if body is not None and not body.is_eof():
                body.set_exception(web.RequestPayloadError("it is not HTTP"))

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            _log.error("internal error", exc_info=exc)
            message = "internal error"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        text = " ".join((message or HTTPStatus(status).phrase).split())[:_MOST_ERROR_CHARACTERS]
        answer = error_response(status, text)
        answer.force_close()
        return answer


class _ConnectionRefused(asyncio.Protocol):
    """Answers a connection over the limit without reading from it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        writable = cast(asyncio.WriteTransport, transport)
        body = msgspec.json.encode({"error": f"{self._limit} connections are open already, see --max-connections"})
        writable.write(
            b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\n"
            b"Retry-After: 1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        writable.close()
