"""The standard grpc.health.v1 service, which probes of Kubernetes and load balancers call."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import StatusCode
from grpc_health.v1 import health_pb2 as pb

from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.grpc.errors import CallRefused

_SERVICES = frozenset({"", "inference.GRPCInferenceService"})
_WATCH_INTERVAL_S = 0.5


class HealthCalls:
    """Serving means ready: every requested model was tried, and the server is not shutting down."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def check(self, request: Any, context: Any) -> Any:
        if request.service not in _SERVICES:
            raise CallRefused(StatusCode.NOT_FOUND, f"unknown service '{request.service[:80]}'")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Send the status, and each change of it, until the client ends the call."""
        sent = None
        while True:
            if (status := self._status(request.service)) != sent:
                yield pb.HealthCheckResponse(status=status)
                sent = status
            await asyncio.sleep(_WATCH_INTERVAL_S)

    def _status(self, service: str) -> Any:
        if service not in _SERVICES:
            return pb.HealthCheckResponse.SERVICE_UNKNOWN
        ready = self._plane.not_ready() is None
        return pb.HealthCheckResponse.SERVING if ready else pb.HealthCheckResponse.NOT_SERVING
