"""The calls that there are, by path, each with what it needs to be permitted and how it is run."""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf.message_factory import GetMessageClass
from grpc import StatusCode
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse

from server.grpc.call import Call, Method
from server.grpc.errors import Refusal
from server.grpc.framing import Content
from server.grpc.guard import permission_of
from server.grpc.headers import text
from server.observe.access import Access, Permission
from server.protocol.body_memory import BodyMemory

_Read = Callable[[Content], Any]
_Write = Callable[[Any], bytes]

_READ, _WRITTEN = (ModelInferRequest,), (ModelInferResponse, ModelStreamInferResponse)
"""Messages with tensors, which calls take and give as bytes."""


@dataclass(frozen=True, slots=True)
class _Unary:
    """One message in, one out."""

    name: str
    function: Callable[[Any, Call], Awaitable[Any]]
    read: _Read
    write: _Write
    takes_stream = False

    async def run(self, call: Call) -> None:
        request = self.read(await call.message())
        call.answer(self.write(await self.function(request, call)))


@dataclass(frozen=True, slots=True)
class _Streaming:
    """Any number of messages out, for one in or for any number."""

    name: str
    function: Callable[[Any, Call], AsyncIterator[Any]]
    read: _Read
    write: _Write
    takes_stream: bool

    async def run(self, call: Call) -> None:
        requests = self._each(call) if self.takes_stream else self.read(await call.message())
        async with aclosing(self.function(requests, call)) as answers:  # type: ignore[type-var]
            async for answer in answers:
                await call.send(self.write(answer))
        call.end()

    async def _each(self, call: Call) -> AsyncIterator[Any]:
        async for content in call.messages():
            yield self.read(content)


class Reception:
    """Lets calls in that are permitted, as many as there may be at once. Event loop's thread."""

    def __init__(
        self,
        methods: Mapping[bytes, Method],
        access: Access,
        bodies: BodyMemory,
        most_calls: int,
        most_bytes: int,
    ) -> None:
        self.bodies = bodies
        self.most_bytes = most_bytes
        self._methods = {path: (method, permission_of(method.name)) for path, method in methods.items()}
        self._access = access
        self._most_calls = most_calls
        self._calls = 0

    def admit(self, headers: Mapping[bytes, bytes]) -> Method:
        found = self._methods.get(headers.get(b":path", b""))
        if found is None:
            raise Refusal(StatusCode.UNIMPLEMENTED, "Method not found!")
        if self._calls >= self._most_calls:
            raise Refusal(StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
        method, permission = found
        self._require(headers, permission)
        self._calls += 1
        return method

    def left(self) -> None:
        self._calls -= 1

    def _require(self, headers: Mapping[bytes, bytes], permission: Permission) -> None:
        authorization = headers.get(b"authorization")
        self._access.require(None if authorization is None else text(authorization), permission)


def methods_of(service: Any, calls: object) -> dict[bytes, Method]:
    """A method per call of the service, named in `calls` as it is there, in snake case."""
    return {f"/{service.full_name}/{each.name}".encode(): _method(each, calls) for each in service.methods}


def _method(described: Any, calls: object) -> Method:
    function = getattr(calls, re.sub(r"(?<!^)(?=[A-Z])", "_", described.name).lower())
    request_type, response_type = GetMessageClass(described.input_type), GetMessageClass(described.output_type)
    read = _as_it_is if request_type in _READ else request_type.FromString
    write = _as_it_is if response_type in _WRITTEN else response_type.SerializeToString
    if described.server_streaming:
        return _Streaming(described.name, function, read, write, described.client_streaming)
    return _Unary(described.name, function, read, write)


def _as_it_is(message: Any) -> Any:
    return message
