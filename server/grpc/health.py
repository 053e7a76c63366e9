"""The standard grpc.health.v1 service, which probes of Kubernetes and load balancers ask."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc import StatusCode
from grpc_health.v1 import health_pb2 as pb

from server.frontend.dataplane import DataPlane
from server.grpc.call import Call
from server.grpc.errors import Refusal

_SERVICES = frozenset({"", "inference.GRPCInferenceService"})
_WATCH_INTERVAL_S = 0.5


class Health:
    """Serving means ready: every requested model has been tried, and the server does not drain."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def check(self, request: Any, call: Call) -> Any:
        if request.service not in _SERVICES:
            raise Refusal(StatusCode.NOT_FOUND, f"unknown service '{request.service[:80]}'")
        return pb.HealthCheckResponse(status=self._status(request.service))

    async def watch(self, request: Any, call: Call) -> AsyncIterator[Any]:
        """Send the status, and each change of it, until the client leaves."""
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
