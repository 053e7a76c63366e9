"""The calls of Triton's GRPCInferenceService, each a few lines around the data plane."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message
from msgspec.structs import replace
from tritonclient.grpc import service_pb2 as pb

from server.errors import InvalidRequest, RequestError, Unsupported
from server.frontend.dataplane import DataPlane
from server.grpc.answers import as_stream_response, encode_response, failed_stream_response
from server.grpc.call import Call
from server.grpc.codec import decode_request
from server.grpc.errors import message_of, unforeseen
from server.grpc.forms import Forms
from server.grpc.framing import Content
from server.grpc.wire import Parsed, parse, raw_fields_at_the_end
from server.protocol import descriptions
from server.protocol.model import ModelInfo
from server.protocol.request import InferRequest, InferResponse
from server.protocol.request_trace import HEADER
from server.protocol.shared_memory import CudaRequest, SystemRequest

_QUICK_BYTES = 64 << 10
"""Messages up to this, raw tensors aside, are decoded on the event loop."""
_QUICK_TENSOR_BYTES = 4 << 20
_TRACEPARENT = HEADER.encode()
_STREAM_AHEAD = 64
"""Requests of one stream that may be under way together."""


class Api:
    """Every method belongs to the event loop's thread, and is named as its call."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._forms = Forms()

    async def server_live(self, request: Any, call: Call) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, call: Call) -> Any:
        return pb.ServerReadyResponse(ready=self._plane.not_ready() is None)

    async def model_ready(self, request: Any, call: Call) -> Any:
        return pb.ModelReadyResponse(ready=self._plane.is_ready(*_which(request)))

    async def server_metadata(self, request: Any, call: Call) -> Any:
        return _message(descriptions.server_metadata(self._plane.extensions), pb.ServerMetadataResponse())

    async def model_metadata(self, request: Any, call: Call) -> Any:
        info = self._plane.registry.find(*_which(request)).info
        return _message(descriptions.model_metadata(info), pb.ModelMetadataResponse())

    async def model_config(self, request: Any, call: Call) -> Any:
        return pb.ModelConfigResponse(config=self._plane.config(*_which(request)))

    async def model_statistics(self, request: Any, call: Call) -> Any:
        entries = self._plane.registry.listed(request.name or None, request.version or None)
        return _message(descriptions.statistics(entries), pb.ModelStatisticsResponse())

    async def repository_index(self, request: Any, call: Call) -> Any:
        _refuse_repository(request)
        index = descriptions.repository_index(self._plane.index(request.ready))
        return _message({"models": index}, pb.RepositoryIndexResponse())

    async def repository_model_load(self, request: Any, call: Call) -> Any:
        _refuse_repository(request)
        await self._plane.load(request.model_name, _values(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any, call: Call) -> Any:
        _refuse_repository(request)
        await self._plane.unload(request.model_name, _values(request.parameters))
        return pb.RepositoryModelUnloadResponse()

    async def system_shared_memory_status(self, request: Any, call: Call) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._plane.regions.system(request.name or None):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.nbytes
        return response

    async def system_shared_memory_register(self, request: Any, call: Call) -> Any:
        region = SystemRequest(request.name, request.key, request.offset, request.byte_size)
        self._plane.regions.register_system(region)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, request: Any, call: Call) -> Any:
        self._plane.regions.unregister("system", request.name or None)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, request: Any, call: Call) -> Any:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._plane.regions.cuda(request.name or None):
            status = response.regions[region.name]
            status.name, status.device_id, status.byte_size = region.name, region.device, region.nbytes
        return response

    async def cuda_shared_memory_register(self, request: Any, call: Call) -> Any:
        region = CudaRequest(request.name, request.raw_handle, request.device_id, request.byte_size)
        self._plane.regions.register_cuda(region)
        return pb.CudaSharedMemoryRegisterResponse()

    async def cuda_shared_memory_unregister(self, request: Any, call: Call) -> Any:
        self._plane.regions.unregister("cuda", request.name or None)
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace_setting(self, request: Any, call: Call) -> Any:
        model = self._plane.traced_model(request.model_name) if request.model_name else None
        changes = {key: list(setting.value) for key, setting in request.settings.items()}
        self._plane.traces.update(changes, model)
        response = pb.TraceSettingResponse()
        for key, value in self._plane.traces.to_wire(model).items():
            response.settings[key].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any, call: Call) -> Any:
        self._plane.change_log(_values(request.settings))
        response = pb.LogSettingsResponse()
        fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        for key, value in self._plane.log_settings.to_wire().items():
            setattr(response.settings[key], fields[type(value)], value)
        return response

    async def model_infer(self, request: Content, call: Call) -> bytes:
        traceparent = call.header(_TRACEPARENT)
        if traceparent is None and not self._plane.tracer.follows_all:
            return await self._infer(request, call.left_s())
        with self._plane.tracer.request(traceparent) as trace:
            if traceparent is not None:
                call.add_header(HEADER, trace.context.header)
            return await self._infer(request, call.left_s())

    async def model_stream_infer(self, requests: AsyncIterator[Content], call: Call) -> AsyncIterator[bytes]:
        """Answer each request of a stream, in order; several are under way together.

        An error is an answer like any other: the stream stays open.
        """
        traceparent = call.header(_TRACEPARENT)
        answers: asyncio.Queue[asyncio.Task[bytes] | None] = asyncio.Queue()
        room = asyncio.Semaphore(_STREAM_AHEAD)

        async def read() -> None:
            try:
                async for request in requests:
                    await room.acquire()
                    answers.put_nowait(asyncio.create_task(self._answer(request, traceparent)))
            finally:
                answers.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                yield await answer
                room.release()
            await reader
        finally:
            reader.cancel()
            while not answers.empty():
                if (unsent := answers.get_nowait()) is not None:
                    unsent.cancel()

    async def _answer(self, request: Content, traceparent: str | None) -> bytes:
        """Answer one request of a stream, whatever becomes of it."""
        if traceparent is None and not self._plane.tracer.follows_all:
            return await self._answer_unfollowed(request)
        with self._plane.tracer.request(traceparent):
            return await self._answer_unfollowed(request)

    async def _answer_unfollowed(self, request: Content) -> bytes:
        try:
            return as_stream_response(await self._infer(request, None, final=True))
        except RequestError as error:
            return failed_stream_response(message_of(error), _id_of(request))
        except Exception:
            return failed_stream_response(unforeseen("ModelStreamInfer"), _id_of(request))

    async def _infer(self, content: Content, left_s: float | None, final: bool = False) -> bytes:
        """Answer a request; `left_s` is the call's own deadline, beyond which nobody waits for it."""
        form = self._forms.find(content)
        if form is not None and (info := self._plane.servable(form.model, form.version)) is form.info:
            request = form.request(content)
        else:
            request, info = await self._decoded(parse(content), content)
        if left_s is not None and (request.timeout_s is None or left_s < request.timeout_s):
            request = replace(request, timeout_s=left_s)
        return await _encode(await self._plane.infer(request, info), final)

    async def _decoded(self, parsed: Parsed, content: Content) -> tuple[InferRequest, ModelInfo]:
        message, raw = parsed.message, parsed.raw
        info = self._plane.servable(message.model_name, message.model_version or None)
        with self._plane.bodies.share() as share:
            share.take(parsed.nbytes)
            if parsed.message_bytes > _QUICK_BYTES or self._plane.regions.slow:
                request = await asyncio.to_thread(decode_request, message, raw, info, self._plane.regions)
            else:
                request = decode_request(message, raw, info, self._plane.regions)
                if len(raw) == len(message.inputs):
                    self._forms.remember(content, message, raw_fields_at_the_end(content), request, info)
        return request, info


async def _encode(response: InferResponse, final: bool) -> bytes:
    try:
        if sum(output.array.nbytes for output in response.outputs) <= _QUICK_TENSOR_BYTES:
            return encode_response(response, final)
        return await asyncio.to_thread(encode_response, response, final)
    except RequestError as error:
        error.of_request(response.id)
        raise


def _id_of(content: Content) -> str:
    """What the client calls its request, as far as that can be read."""
    try:
        request_id: str = parse(content).message.id
    except InvalidRequest:
        return ""
    return request_id


def _which(request: Any) -> tuple[str, str | None]:
    return request.name, request.version or None


def _message(written: Mapping[str, Any], message: Message) -> Message:
    """The JSON forms have the messages' fields under the same names."""
    return json_format.ParseDict(written, message)


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise Unsupported("'repository_name' specification is not supported: this server has one repository")


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise InvalidRequest(f"parameter '{key[:80]}' has no value of a type that this server knows")
        values[key] = getattr(parameter, choice)
    return values
