"""An HTTP port: connections are counted and bounded, idle ones closed."""

import asyncio
from typing import cast

import msgspec

from server.errors import ConfigError
from server.http.connection import SCRATCH_BYTES, Answer, Connection
from server.http.heads import Heads

_ANSWERS_WRITTEN_S = 2.0
_BACKLOG = 512
_LOOK_EVERY_S = 1.0


class HttpServer:
    """Owns one listening port. All methods belong to the event loop's thread."""

    def __init__(self, answer: Answer, max_connections: int, most_body_bytes: int) -> None:
        self._answer = answer
        self._max_connections = max_connections
        self._most_body_bytes = most_body_bytes
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._heads = Heads()
        self._connections: set[Connection] = set()
        self._all_lost = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, flag: str) -> str:
        """Listen; returns the URL, where port 0 has become a free one. Raises ConfigError, which names the flag."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"{flag}: cannot listen on {host} port {port}: {error}") from error
        self._watch = asyncio.create_task(self._close_overdue())
        actual_host, actual_port = self._server.sockets[0].getsockname()[:2]
        return (
            f"http://[{actual_host}]:{actual_port}" if ":" in actual_host else f"http://{actual_host}:{actual_port}"
        )

    async def stop(self) -> None:
        """Close the port; answers get some time to be written."""
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.close()
        if self._connections:
            self._all_lost.clear()
            await asyncio.wait([asyncio.create_task(self._all_lost.wait())], timeout=_ANSWERS_WRITTEN_S)
        for connection in list(self._connections):
            connection.abort()
        if self._server is not None:
            await self._server.wait_closed()

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_lost.set()

    def _accept(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self._max_connections:
            return _Refusal(self._max_connections)
        connection = Connection(self, self._answer, self._most_body_bytes, self._scratch, self._heads)
        self._connections.add(connection)
        return connection

    async def _close_overdue(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = loop.time()
            for connection in list(self._connections):
                connection.close_if_overdue(now_s)


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
