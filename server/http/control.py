"""HTTP's endpoints that change the server: models in and out, shared memory, trace and log settings."""

import base64
import binascii
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from server.errors import InvalidRequest, Unsupported
from server.frontend.dataplane import DataPlane
from server.http.answers import json_response, read_json
from server.http.message import Request, Response
from server.protocol import descriptions
from server.protocol.shared_memory import CudaRequest, SystemRequest
from server.protocol.wire import Parameters

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _ControlBody(msgspec.Struct):
    parameters: Parameters = {}


class _SystemBody(msgspec.Struct):
    key: str
    byte_size: _Count
    offset: _Count = 0


class _Handle(msgspec.Struct):
    b64: str


class _CudaBody(msgspec.Struct):
    raw_handle: _Handle
    device_id: _Count
    byte_size: _Count


class ControlApi:
    """Every method is a handler, on the event loop's thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def index(self, request: Request) -> Response:
        body = await read_json(request, _IndexBody)
        return json_response(descriptions.repository_index(self._plane.index(body.ready)))

    async def load(self, request: Request) -> Response:
        body = await read_json(request, _ControlBody)
        await self._plane.load(request.parameters["model"], body.parameters)
        return Response()

    async def unload(self, request: Request) -> Response:
        body = await read_json(request, _ControlBody)
        await self._plane.unload(request.parameters["model"], body.parameters)
        return Response()

    async def other_repository(self, request: Request) -> Response:
        raise Unsupported("'repository_name' specification is not supported: this server has one repository")

    async def system_status(self, request: Request) -> Response:
        regions = self._plane.regions.system(request.parameters.get("region"))
        return json_response(
            [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.nbytes} for r in regions]
        )

    async def system_register(self, request: Request) -> Response:
        body = await read_json(request, _SystemBody)
        region = SystemRequest(request.parameters["region"], body.key, body.offset, body.byte_size)
        self._plane.regions.register_system(region)
        return Response()

    async def system_unregister(self, request: Request) -> Response:
        self._plane.regions.unregister("system", request.parameters.get("region"))
        return Response()

    async def cuda_status(self, request: Request) -> Response:
        regions = self._plane.regions.cuda(request.parameters.get("region"))
        return json_response([{"name": r.name, "device_id": r.device, "byte_size": r.nbytes} for r in regions])

    async def cuda_register(self, request: Request) -> Response:
        body = await read_json(request, _CudaBody)
        try:
            handle = base64.b64decode(body.raw_handle.b64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"raw_handle of region '{request.parameters['region']}' is not base64") from error
        region = CudaRequest(request.parameters["region"], handle, body.device_id, body.byte_size)
        self._plane.regions.register_cuda(region)
        return Response()

    async def cuda_unregister(self, request: Request) -> Response:
        self._plane.regions.unregister("cuda", request.parameters.get("region"))
        return Response()

    async def trace_settings(self, request: Request) -> Response:
        """Change settings, if this is a POST, and return them all."""
        name = request.parameters.get("model")
        model = None if name is None else self._plane.traced_model(name)
        if request.method == b"POST":
            self._plane.traces.update(await read_json(request, dict[str, Any]), model)
        return json_response(self._plane.traces.to_wire(model))

    async def log_settings(self, request: Request) -> Response:
        """Change settings, if this is a POST, and return them all."""
        if request.method == b"POST":
            self._plane.change_log(await read_json(request, dict[str, Any]))
        return json_response(self._plane.log_settings.to_wire())
