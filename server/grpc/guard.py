"""Tokens asked for in front of gRPC's calls."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from server.errors import RequestError
from server.grpc.errors import code_of, message_of
from server.operate.access import Access, Permission

_HEALTH_CALLS = frozenset({"ServerLive", "ServerReady", "Check", "Watch"})
_CONTROL_CALLS = frozenset(
    {
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
        "TraceSetting",
        "LogSettings",
    }
)


class GrpcGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Asks for a token before a call's message is read."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        authorization = next((v for key, v in details.invocation_metadata if key == "authorization"), None)
        try:
            self._access.require(authorization, permission_of(details.method))
        except RequestError as error:
            return _refusing(handler, error)
        return handler


def permission_of(method: str) -> Permission:
    """What a call by its full name needs."""
    name = method.rpartition("/")[2]
    if name in _HEALTH_CALLS:
        return Permission.HEALTH
    return Permission.CONTROL if name in _CONTROL_CALLS else Permission.INFERENCE


def _refusing(handler: Any, error: RequestError) -> Any:
    """A handler of the same kind that answers with the error alone."""

    async def refuse(request: Any, context: Any) -> None:
        await context.abort(code_of(error), message_of(error))

    async def refuse_stream(requests: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(code_of(error), message_of(error))
        yield

    if handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
