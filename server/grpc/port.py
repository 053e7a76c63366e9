"""The gRPC port: both services as handlers, message sizes, compression and keep-alive as options."""

import re
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2 import ModelInferRequest

from server.dataplane import DataPlane
from server.errors import ConfigError
from server.grpc.api import Api
from server.grpc.errors import answering
from server.grpc.guard import GrpcGuard
from server.grpc.health import Health
from server.operate.access import OPEN, Access

_MOST_CALLS = 4096
"""Under way together; more are answered RESOURCE_EXHAUSTED."""
_HEADER_ALLOWANCE_BYTES = 1 << 20
"""What a message may have besides the tensors that HTTP's limit is about."""
_PING_INTERVAL_MS = 5_000
_IDLE_PING_MS = 7_200_000
_PING_TIMEOUT_MS = 20_000


class GrpcServer:
    """Owns one listening port. All methods belong to the event loop's thread."""

    def __init__(self, plane: DataPlane, max_body_bytes: int, access: Access = OPEN) -> None:
        self._server = grpc.aio.server(
            interceptors=[] if access == OPEN else [GrpcGuard(access)],
            options=_options(max_body_bytes + _HEADER_ALLOWANCE_BYTES),
            maximum_concurrent_rpcs=_MOST_CALLS,
        )
        api, health = Api(plane), Health(plane)
        self._server.add_generic_rpc_handlers(
            (
                _handlers(service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"], api),
                _handlers(health_pb2.DESCRIPTOR.services_by_name["Health"], health),
            )
        )

    async def start(self, host: str, port: int) -> str:
        """Listen; returns host and port, where 0 has become a free one. Raises ConfigError."""
        shown = f"[{host}]" if ":" in host else host
        try:
            actual = self._server.add_insecure_port(f"{shown}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"--grpc-port: cannot listen on {host} port {port}: {error}") from error
        if actual == 0:
            raise ConfigError(f"--grpc-port: cannot listen on {host} port {port}")
        await self._server.start()
        return f"{shown}:{actual}"

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give those under way this long, end the rest."""
        await self._server.stop(grace_s)


def _options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", _IDLE_PING_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
    )


def _handlers(service: Any, calls: object) -> Any:
    """A handler per method of the service, named in `calls` as it is there, in snake case."""
    return grpc.method_handlers_generic_handler(
        service.full_name, {method.name: _handler(method, calls) for method in service.methods}
    )


def _handler(method: Any, calls: object) -> Any:
    function = getattr(calls, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
    streams: dict[tuple[bool, bool], Callable[..., Any]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    make = streams[method.client_streaming, method.server_streaming]
    request_type, response_type = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    read = _as_it_is if request_type is ModelInferRequest else request_type.FromString
    if method.server_streaming:
        return make(function, request_deserializer=read, response_serializer=response_type.SerializeToString)
    return make(answering(method.name, read, function), response_serializer=response_type.SerializeToString)


def _as_it_is(request: bytes) -> bytes:
    return request
