"""Calls of Triton's GRPCInferenceService."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from google.protobuf.message import Message
from msgspec.structs import replace
from tritonclient.grpc import service_pb2 as pb

from cohabit.server.errors import SEND_LESS_JSON, InvalidRequest, Refused, RequestError, too_large
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.memory import Lease
from cohabit.server.frontend.threads import call
from cohabit.server.grpc.codec import decode_request, encode_response, parameters_of, parse_request
from cohabit.server.grpc.errors import status_of
from cohabit.server.grpc.handlers import metadata_of
from cohabit.server.grpc.unsent_answers import CallAnswers, UnsentAnswers
from cohabit.server.grpc.wire import UNCHECKED_BYTES, described_bytes, names_of, sequence_of
from cohabit.server.observe.request_trace import HEADER, RequestTrace
from cohabit.server.protocol.matching import errors_of
from cohabit.server.protocol.shared_memory import SystemRequest, refuse_cuda, require_no_cuda

_QUICK_BYTES = 64 << 10
"""Largest typed contents and classified outputs that the event loop converts itself; threads handle the rest."""
_QUICK_TENSOR_BYTES = 4 << 20
_FINAL = "triton_final_response"
_STREAM_AHEAD = 64
"""Maximum number of requests under way in one stream."""


class InferenceCalls:
    """Each public method answers the call of its name, on the event loop's thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._unsent = UnsentAnswers(plane.memory.nbytes)

    async def server_live(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=self._plane.not_ready() is None)

    async def model_ready(self, request: Any, context: Any) -> Any:
        return pb.ModelReadyResponse(ready=self._plane.is_ready(*_which(request)))

    async def server_metadata(self, request: Any, context: Any) -> Any:
        return _message(self._plane.server_metadata(), pb.ServerMetadataResponse())

    async def model_metadata(self, request: Any, context: Any) -> Any:
        described = self._plane.metadata(*_which(request))
        for tensor in described["inputs"]:
            tensor.pop("parameters", None)  # Triton's message of a tensor has none
        return _message(described, pb.ModelMetadataResponse())

    async def model_config(self, request: Any, context: Any) -> Any:
        return pb.ModelConfigResponse(config=await self._plane.config(*_which(request)))

    async def model_statistics(self, request: Any, context: Any) -> Any:
        statistics = await self._plane.statistics(request.name or None, request.version or None)
        return _message(statistics, pb.ModelStatisticsResponse())

    async def repository_index(self, request: Any, context: Any) -> Any:
        _refuse_repository(request)
        index = await self._plane.index(request.ready)
        return _message({"models": index}, pb.RepositoryIndexResponse())

    async def repository_model_load(self, request: Any, context: Any) -> Any:
        _refuse_repository(request)
        await self._plane.load(request.model_name, parameters_of(request.parameters))
        return pb.RepositoryModelLoadResponse()

    async def repository_model_unload(self, request: Any, context: Any) -> Any:
        _refuse_repository(request)
        await self._plane.unload(request.model_name, parameters_of(request.parameters))
        return pb.RepositoryModelUnloadResponse()

    async def system_shared_memory_status(self, request: Any, context: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._plane.regions.listed(request.name or None):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.nbytes
        return response

    async def system_shared_memory_register(self, request: Any, context: Any) -> Any:
        region = SystemRequest(request.name, request.key, request.offset, request.byte_size)
        self._plane.regions.register(region)
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_shared_memory_unregister(self, request: Any, context: Any) -> Any:
        self._plane.regions.unregister(request.name or None)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_shared_memory_status(self, request: Any, context: Any) -> Any:
        require_no_cuda(request.name or None)
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_shared_memory_register(self, request: Any, context: Any) -> Any:
        refuse_cuda(request.name)

    async def cuda_shared_memory_unregister(self, request: Any, context: Any) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace_setting(self, request: Any, context: Any) -> Any:
        response = pb.TraceSettingResponse()
        for key, value in self._plane.trace_settings(request.model_name, request.settings).items():
            response.settings[key].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any, context: Any) -> Any:
        self._plane.change_log(parameters_of(request.settings))
        response = pb.LogSettingsResponse()
        fields = {bool: "bool_param", int: "uint32_param", str: "string_param"}
        for key, value in self._plane.log_settings.to_wire().items():
            setattr(response.settings[key], fields[type(value)], value)
        return response

    async def model_infer(self, request: bytes, context: Any) -> Any:
        traceparent = metadata_of(context, HEADER)
        answers = self._unsent.of_call(context)
        with self._tracing(traceparent) as trace:
            if traceparent is not None and trace is not None:
                await context.send_initial_metadata(((HEADER, trace.context.header),))
            response, _ = await self._infer(request, context.time_remaining(), answers)
        answers.sending()
        return response

    async def model_stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Answer the requests of a stream in order, several concurrently, but those of one sequence in turn.

        Errors are answers too: the stream stays open.
        """
        traceparent = metadata_of(context, HEADER)
        unsent = self._unsent.of_call(context)
        answers: asyncio.Queue[asyncio.Task[tuple[Any, Lease | None]] | None] = asyncio.Queue()
        slots = asyncio.Semaphore(_STREAM_AHEAD)
        last: dict[bytes, asyncio.Task[tuple[Any, Lease | None]]] = {}
        """By sequence: the pending answer to its last request."""

        def answer_next(request: bytes) -> None:
            sequence = _sequence_of(request)
            answer = asyncio.create_task(self._answer(request, traceparent, unsent, last.get(sequence)))
            answers.put_nowait(answer)
            if sequence:
                last[sequence] = answer
                answer.add_done_callback(lambda _: last.pop(sequence) if last.get(sequence) is answer else None)

        async def read() -> None:
            try:
                async for request in requests:
                    await slots.acquire()
                    answer_next(request)
            finally:
                answers.put_nowait(None)

        # Requests are read while answers are sent, up to `_STREAM_AHEAD` of them.
        reader = asyncio.create_task(read())
        try:
            while (answer := await answers.get()) is not None:
                response, lease = await answer
                unsent.sending()
                yield response
                unsent.sent(lease)
                slots.release()
            await reader
        finally:
            # The call has ended: cancel requests whose answers nobody will read.
            reader.cancel()
            while not answers.empty():
                if (late := answers.get_nowait()) is not None:
                    late.cancel()

    async def _answer(
        self,
        request: bytes,
        traceparent: str | None,
        unsent: CallAnswers,
        before: asyncio.Task[tuple[Any, Lease | None]] | None,
    ) -> tuple[Any, Lease | None]:
        """Answer one request of a stream, with an error message if it fails. Starts once `before` is done."""
        if before is not None:
            await asyncio.wait([before])
        with self._tracing(traceparent):
            try:
                response, lease = await self._infer(request, None, unsent)
            except Exception as error:
                return self._failed(status_of(error, "ModelStreamInfer").message, request), None
        response.parameters[_FINAL].bool_param = True
        return pb.ModelStreamInferResponse(infer_response=response), lease

    def _failed(self, text: str, request: bytes) -> Any:
        """Make the stream's answer to a failed request, with its id, model and version if known."""
        response = pb.ModelStreamInferResponse(error_message=text)
        answer = response.infer_response
        answer.parameters[_FINAL].bool_param = True
        with suppress(RequestError):
            answer.model_name, answer.model_version, answer.id = names_of(request)
            if not answer.model_version:
                answer.model_version = str(self._plane.describe(answer.model_name).version)
        return response

    def _tracing(self, traceparent: str | None) -> AbstractContextManager[RequestTrace | None]:
        tracer = self._plane.tracer
        return tracer.request(traceparent) if traceparent is not None or tracer.samples else nullcontext()

    async def _infer(self, data: bytes, left_s: float | None, unsent: CallAnswers) -> tuple[Any, Lease]:
        """Answer a request, and hold its memory; `left_s` is the time to the call's own deadline."""
        unsent.require_below_limit()
        is_large = len(data) > UNCHECKED_BYTES
        if is_large:
            named, of_version, request_id = names_of(data)
            if named:
                self._plane.require_ready(named, of_version or None, request_id)
        described = await self._plane.decode(is_large, described_bytes, data)
        if described > self._plane.max_json_bytes:
            what = f"the message of {described} bytes without its raw_input_contents"
            raise too_large(what, self._plane.max_json_bytes, SEND_LESS_JSON)
        typed = described > _QUICK_BYTES
        message = await self._plane.decode(typed or len(data) > _QUICK_TENSOR_BYTES, parse_request, data)
        version = message.model_version or None
        info = self._plane.require_ready(message.model_name, version, message.id)
        with (
            self._plane.answering(info.key),
            self._plane.memory.lease() as lease,
            self._plane.regions.use() as regions,
        ):
            slow = typed or self._plane.regions.slow
            with self._plane.fitting(info.key):
                request = await self._plane.decode(slow, decode_request, message, info, regions)
            if left_s is not None and (request.timeout_s is None or left_s < request.timeout_s):
                request = replace(request, timeout_s=left_s)
            answer = await self._plane.infer(request, info, lease, version)
            classified = sum(answer.outputs[o.name].nbytes for o in request.outputs if o.classes)
            nbytes = sum(array.nbytes for array in answer.outputs.values())
            slow = nbytes > _QUICK_TENSOR_BYTES or classified > _QUICK_BYTES
            with errors_of(request.id):
                message = await call(slow, encode_response, request, answer, info, regions)
            unsent.add(lease)
            return message, lease


def _sequence_of(request: bytes) -> bytes:
    """Return the encoded sequence id of a request; empty if it has none or cannot be parsed."""
    try:
        return sequence_of(request)
    except InvalidRequest:
        return b""


def _which(request: Any) -> tuple[str, str | None]:
    return request.name, request.version or None


def _message(written: Mapping[str, Any], message: Message) -> Message:
    """Fill a message from its JSON form, which has the same names; protobuf's own parser takes milliseconds."""
    for name, value in written.items():
        if isinstance(value, Mapping):
            _message(value, getattr(message, name))
        elif not isinstance(value, list | tuple):
            setattr(message, name, value)
        elif value and isinstance(value[0], Mapping):
            for item in value:
                _message(item, getattr(message, name).add())
        else:
            getattr(message, name).extend(value)
    return message


def _refuse_repository(request: Any) -> None:
    if request.repository_name:
        raise Refused(
            "Unsupported", "'repository_name' specification is not supported: this server has one repository"
        )
