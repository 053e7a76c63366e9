"""The gRPC port: grpc.aio's server with inference, health and reflection."""

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from tritonclient.grpc import service_pb2

from cohabit.server.background import Background
from cohabit.server.errors import ConfigError
from cohabit.server.frontend.access import OPEN, Access
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.listening import TlsFiles, address_of, without_covered
from cohabit.server.grpc.api import InferenceCalls
from cohabit.server.grpc.handlers import MOST_CALLS, MOST_HEALTH_CALLS, CallSlots, service_handler
from cohabit.server.grpc.health import HealthCalls

_log = logging.getLogger("cohabit.grpc")

_FLAG = "--grpc-port"
_LOOKED_AT_S, _REBIND_S = 0.25, 1.0
_MESSAGE_ALLOWANCE_BYTES = 1 << 20
"""Bytes of a message allowed in addition to the tensors, which `max_body_bytes` limits."""
_MOST_PENDING = MOST_CALLS + MOST_HEALTH_CALLS
"""Calls that the library may hold before Python accepts them. By default, from 1,000 on it cancels calls at random."""
_METADATA_BYTES = 16 << 10
"""Limit of a call's metadata. gRPC itself has two, 8 and 16 KiB, and refuses calls between them at random."""
_HANDSHAKE_MS = 20_000
_PING_INTERVAL_MS = 5_000
_PING_TIMEOUT_MS = 20_000


class GrpcServer:
    """The gRPC port. All methods belong to the event loop's thread."""

    def __init__(
        self,
        plane: DataPlane,
        access: Access = OPEN,
        *,
        max_body_bytes: int,
        max_connections: int,
        keep_alive_s: float = 75.0,
        tls: TlsFiles | None = None,
    ) -> None:
        """After `keep_alive_s`, a connection without traffic is pinged, and one without calls is closed."""
        self._plane = plane
        self._access = access
        self._tls = tls
        self._unix: Path | None = None
        self._background = Background()
        self._server: grpc.aio.Server | None = None
        self._options = [
            ("grpc.max_receive_message_length", max_body_bytes + _MESSAGE_ALLOWANCE_BYTES),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_metadata_size", _METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
            ("grpc.server.max_pending_requests", _MOST_PENDING),
            ("grpc.server.max_pending_requests_hard_limit", _MOST_PENDING),
            ("grpc.max_allowed_incoming_connections", max_connections),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.so_reuseport", 0),
            ("grpc.max_connection_idle_ms", round(keep_alive_s * 1e3)),
            ("grpc.keepalive_time_ms", round(keep_alive_s * 1e3)),
            ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
            ("grpc.http2.max_ping_strikes", 0),
        ]

    async def start(self, hosts: Sequence[str], port: int, unix: Path | None = None) -> str:
        """Listen, and return the first host with its port.

        Port 0 takes a free port, the same on every host. The Unix socket has no TLS. Raises ConfigError for an address
        that cannot be bound, and for unusable TLS files.
        """
        self._unix = unix
        port = await self._serve(hosts, port)
        self._background.keep("keeping the gRPC port open", partial(self._serve_again, hosts, port))
        return address_of(hosts[0], port)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way `grace_s` seconds, then cancel them."""
        await self._background.close()
        if self._server is not None:
            await self._server.stop(grace_s)
        if self._unix is not None:
            self._unix.unlink(missing_ok=True)

    async def _serve(self, hosts: Sequence[str], port: int) -> int:
        """Start a server, and return its port. Raises ConfigError."""
        credentials = None if self._tls is None else credentials_of(self._tls)
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=_MOST_PENDING)
        inference = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        described = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
        names = [service.full_name for service in (inference, health, described)]
        reflected = reflection.aio.ReflectionServicer(names)
        reflection_calls = SimpleNamespace(server_reflection_info=reflected.ServerReflectionInfo)
        slots = CallSlots()
        server.add_generic_rpc_handlers(
            (
                service_handler(inference, InferenceCalls(self._plane), self._access, slots),
                service_handler(health, HealthCalls(self._plane), self._access, slots),
                service_handler(described, reflection_calls, self._access, slots),
            )
        )
        for host in without_covered(hosts):
            port = _listen(server, address_of(host, port), credentials)
        if self._unix is not None:
            _listen(server, f"unix:{self._unix}", None)
        await server.start()
        self._server = server
        return port

    async def _serve_again(self, hosts: Sequence[str], port: int) -> None:
        """Start a new server whenever grpc.aio's ends by itself.

        Some grpcio releases (such as 1.85) end the server on a call whose path is not UTF-8.
        """
        while self._server is not None:
            try:
                # With a timeout: without one, grpc.aio reports the end of a server only after its last call.
                if await self._server.wait_for_termination(_LOOKED_AT_S):
                    continue
                return  # it was stopped
            except Exception as error:
                with suppress(Exception):
                    await self._server.stop(0)
                _log.error(
                    "the gRPC server has ended, and is started again", extra={"fields": {"reason": str(error)}}
                )
            try:
                await self._serve(hosts, port)
            except ConfigError as error:
                _log.error("the gRPC port is not available", extra={"fields": {"reason": str(error)}})
                await asyncio.sleep(_REBIND_S)


def credentials_of(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return the files as gRPC credentials. Raises ConfigError as `TlsFiles.context` does."""
    tls.context()
    client_ca = None if tls.client_ca is None else tls.client_ca.read_bytes()
    pair = (tls.key.read_bytes(), tls.cert.read_bytes())
    return grpc.ssl_server_credentials([pair], client_ca, require_client_auth=client_ca is not None)


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    """Return the port. Raises ConfigError."""
    try:
        if credentials is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"{_FLAG}: cannot listen on {address}: {error}") from error
    if port == 0:
        raise ConfigError(f"{_FLAG}: cannot listen on {address}")
    return port
