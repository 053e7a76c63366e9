"""The gRPC port: it listens, has a connection per client, and lets calls end before it closes."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2

from server.errors import ConfigError
from server.frontend.dataplane import DataPlane
from server.grpc.api import Api
from server.grpc.call import Call
from server.grpc.connection import Connection
from server.grpc.headers import Header
from server.grpc.health import Health
from server.grpc.methods import Reception, methods_of
from server.observe.access import OPEN, Access

_MOST_CALLS = 4096
"""Under way together; more are answered RESOURCE_EXHAUSTED."""
_HEADER_ALLOWANCE_BYTES = 1 << 20
"""What a message may have besides the tensors that HTTP's limit is about."""
_BACKLOG = 512
_LAST_BYTES_S = 1.0
"""How long connections that are closed may take to write what they have."""
_GLANCE_S = 0.01
_LOOK_EVERY_S = 1.0


class GrpcServer:
    """Owns one listening port. All methods belong to the event loop's thread."""

    def __init__(
        self, plane: DataPlane, max_body_bytes: int, access: Access = OPEN, max_connections: int = 1024
    ) -> None:
        services = (
            (service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"], Api(plane)),
            (health_pb2.DESCRIPTOR.services_by_name["Health"], Health(plane)),
        )
        methods = {
            path: method for service, calls in services for path, method in methods_of(service, calls).items()
        }
        self._reception = Reception(
            methods, access, plane.bodies, _MOST_CALLS, max_body_bytes + _HEADER_ALLOWANCE_BYTES
        )
        self._max_connections = max_connections
        self._connections: set[Connection] = set()
        self._listening: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen; returns host and port, where 0 has become a free one. Raises ConfigError."""
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(self._connect, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"--grpc-port: cannot listen on {host} port {port}: {error}") from error
        self._watch = asyncio.create_task(self._end_overdue())
        actual = self._listening.sockets[0].getsockname()[1]
        return f"[{host}]:{actual}" if ":" in host else f"{host}:{actual}"

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, give calls under way this long, end the rest."""
        if self._listening is None:
            return
        self._listening.close()
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self._connections):
            connection.announce_end()
        await _until(lambda: all(connection.is_idle for connection in self._connections), grace_s)
        for connection in list(self._connections):
            connection.close()
        await _until(lambda: not self._connections, _LAST_BYTES_S)

    def _connect(self) -> asyncio.BaseProtocol:
        if len(self._connections) >= self._max_connections:
            return _Refusal()
        connection = Connection(self._open_stream, self._connections.discard)
        self._connections.add(connection)
        return connection

    async def _end_overdue(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            now_s = time.monotonic()
            for connection in list(self._connections):
                connection.end_overdue(now_s)

    def _open_stream(self, connection: Connection, stream_id: int, fields: Sequence[Header]) -> Call:
        return Call(self._reception, connection, stream_id, fields)


class _Refusal(asyncio.Protocol):
    """Closes at once: to a client of gRPC that is UNAVAILABLE, to be tried again."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _until(condition: Callable[[], bool], patience_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while not condition():  # noqa: ASYNC110 - once per server, and nothing to be told by
                await asyncio.sleep(_GLANCE_S)
