"""gRPC method handlers: access tokens, decoding, timeouts and statuses around the calls of a service."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from tritonclient.grpc.service_pb2 import ModelInferRequest

from cohabit.server.errors import ONLY_INFERENCE, too_large
from cohabit.server.frontend.access import Access, Permission
from cohabit.server.grpc.errors import CallRefused, status_of
from cohabit.server.grpc.wire import require_few_fields

MESSAGE_S = 120.0
"""Seconds to receive the message of a unary call; grpc.aio does not report how much has arrived."""

MOST_CALLS, MOST_HEALTH_CALLS = 4096, 1024
"""Maximum number of concurrent calls; more are answered RESOURCE_EXHAUSTED."""

_MOST_CONTROL_BYTES = 1 << 20
"""Maximum size of messages other than inference requests."""

_CONTROL_CALLS = (
    *("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
    *(f"{kind}SharedMemory{order}" for kind in ("System", "Cuda") for order in ("Register", "Unregister")),
)
_PERMISSIONS = {
    **dict.fromkeys(("ServerLive", "ServerReady", "Check", "Watch"), Permission.HEALTH),
    **dict.fromkeys(_CONTROL_CALLS, Permission.CONTROL),
}
"""Permission for each call; all others need the one for inference."""


class CallSlots:
    """Counts a port's calls under way. Health calls have their own slots, so that other calls cannot take them."""

    def __init__(self) -> None:
        self._taken = {True: 0, False: 0}

    @contextmanager
    def take(self, is_health: bool) -> Iterator[None]:
        """Raises CallRefused if there is no free slot."""
        most = MOST_HEALTH_CALLS if is_health else MOST_CALLS
        if self._taken[is_health] >= most:
            raise CallRefused(StatusCode.RESOURCE_EXHAUSTED, f"{most} calls are under way already")
        self._taken[is_health] += 1
        try:
            yield
        finally:
            self._taken[is_health] -= 1


def service_handler(service: Any, calls: object, access: Access, slots: CallSlots) -> grpc.GenericRpcHandler:
    """Serve a service, given by its descriptor, with the functions of `calls`, named as its methods in snake case.

    A function takes the message and the call's context; ModelInferRequest stays encoded. It returns the answer, or is
    an asynchronous generator of answers. A client-streaming function takes an iterator of messages.
    """
    return grpc.method_handlers_generic_handler(
        service.full_name,
        {method.name: _method_handler(method, calls, access, slots) for method in service.methods},
    )


def metadata_of(context: Any, name: str) -> str | None:
    return next((value for key, value in context.invocation_metadata() or () if key == name), None)


def _method_handler(method: Any, calls: object, access: Access, slots: CallSlots) -> grpc.RpcMethodHandler:
    """Make a handler that is called when a call's headers have arrived, before any message.

    On the wire, a unary request is a stream of one message, so every handler is a streaming one.
    """
    function: Callable[..., Any] = getattr(calls, re.sub(r"(?<!^)(?=[A-Z])", "_", method.name).lower())
    request_type, write = GetMessageClass(method.input_type), GetMessageClass(method.output_type).SerializeToString
    permission = _PERMISSIONS.get(method.name, Permission.INFERENCE)
    # The token is checked before a message is received.

    async def request_of(requests: Any, context: Any) -> Any:
        if permission not in access.open:
            await access.admit(metadata_of(context, "authorization"), permission, context.peer())
        if method.client_streaming:
            return requests if request_type is ModelInferRequest else parsed(requests)
        message = await _message(context)
        return message if request_type is ModelInferRequest else parse(message)

    def parse(message: bytes) -> Any:
        if len(message) > _MOST_CONTROL_BYTES:
            what = f"the {method.name} message of {len(message)} bytes"
            raise too_large(what, _MOST_CONTROL_BYTES, ONLY_INFERENCE)
        require_few_fields(message)
        return request_type.FromString(message)

    async def parsed(messages: Any) -> AsyncIterator[Any]:
        async for message in messages:
            yield parse(message)

    # The slot is taken before the message is received, and kept until the call ends.

    async def unary(requests: Any, context: Any) -> Any:
        try:
            with slots.take(permission is Permission.HEALTH):
                return await function(await request_of(requests, context), context)
        except Exception as error:
            await _abort(context, error, method.name)

    async def stream(requests: Any, context: Any) -> None:
        try:
            with slots.take(permission is Permission.HEALTH):
                async with aclosing(function(await request_of(requests, context), context)) as answers:
                    async for answer in answers:
                        await context.write(answer)
        except Exception as error:
            await _abort(context, error, method.name)

    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, None, write)
    return grpc.stream_unary_rpc_method_handler(unary, None, write)


async def _message(context: Any) -> Any:
    """Receive the one message of a unary call."""
    try:
        async with asyncio.timeout(MESSAGE_S):
            message = await context.read()
    except TimeoutError as error:
        text = f"the request did not arrive within {MESSAGE_S:g} s"
        raise CallRefused(StatusCode.DEADLINE_EXCEEDED, text) from error
    if message is grpc.aio.EOF:
        raise CallRefused(StatusCode.INTERNAL, "the call ended without a message")
    return message


async def _abort(context: Any, error: Exception, call: str) -> None:
    status = status_of(error, call)
    await context.abort(status.code, status.message, status.metadata)
