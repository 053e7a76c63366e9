"""An HTTP port: connections are counted and bounded, idle and slow ones closed."""

import asyncio
from http import HTTPStatus
from typing import cast

import msgspec
from aiohttp import web

from server.errors import ConfigError
from server.http.errors import error_response

_IDLE_S = 75.0
"""How long a connection may be without a whole request, the time its headers take included."""
_READ_AHEAD_BYTES = 256 << 10
"""Of a body, before its client has to wait for us to read it."""
_ANSWERS_WRITTEN_S = 2.0
_BACKLOG = 512
_MOST_ERROR_CHARACTERS = 300


class HttpServer:
    """Owns one listening port. All methods belong to the event loop's thread."""

    def __init__(self, app: web.Application, max_connections: int) -> None:
        self._max_connections = max_connections
        self._runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            handle_signals=False,
            handler_cancellation=True,
            keepalive_timeout=_IDLE_S,
            read_bufsize=_READ_AHEAD_BYTES,
            shutdown_timeout=_ANSWERS_WRITTEN_S,
        )

    async def start(self, host: str, port: int, flag: str) -> str:
        """Listen; returns the URL, where port 0 has become a free one. Raises ConfigError, which names the flag."""
        await self._runner.setup()
        try:
            await _BoundedSite(self._runner, host, port, self._max_connections).start()
        except OSError as error:
            raise ConfigError(f"{flag}: cannot listen on {host} port {port}: {error}") from error
        actual_host, actual_port = self._runner.addresses[0][:2]
        return (
            f"http://[{actual_host}]:{actual_port}" if ":" in actual_host else f"http://{actual_host}:{actual_port}"
        )

    async def stop(self) -> None:
        """Close the port; answers get some time to be written."""
        await self._runner.cleanup()


class _BoundedSite(web.BaseSite):
    """aiohttp's TCPSite with a bound on connections: those above it are told so and closed."""

    def __init__(self, runner: web.AppRunner, host: str, port: int, max_connections: int) -> None:
        super().__init__(runner, backlog=_BACKLOG)
        self._host, self._port = host, port
        self._max_connections = max_connections

    @property
    def name(self) -> str:
        return f"http://{self._host}:{self._port}"

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._accept, self._host, self._port, backlog=self._backlog)

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert isinstance(server, web.Server)
        if len(server.connections) >= self._max_connections:
            return _Refusal(self._max_connections)
        return _Handler(server, loop=asyncio.get_running_loop(), **server._kwargs)


class _Handler(web.RequestHandler):
    """Answers what never becomes a request, such as headers that are too large, in the form of all other errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        super().handle_error(request, status, exc, message)
        text = " ".join((message or HTTPStatus(status).phrase).split())[:_MOST_ERROR_CHARACTERS]
        answer = error_response(status, text if status < HTTPStatus.INTERNAL_SERVER_ERROR else "internal error")
        answer.force_close()
        return answer


class _Refusal(asyncio.Protocol):
    """Says that there are too many connections, whatever the client was about to ask."""

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
