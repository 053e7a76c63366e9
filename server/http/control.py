"""HTTP's endpoints for model control, shared memory, trace settings and log settings."""

import base64
import binascii
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from server.errors import InvalidRequest, Unsupported
from server.frontend.dataplane import DataPlane
from server.http.answers import json_response, read_json
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
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def index(self, request: web.Request) -> web.Response:
        body = await read_json(request, _IndexBody)
        return json_response(descriptions.repository_index(self._plane.index(body.ready)))

    async def load(self, request: web.Request) -> web.Response:
        body = await read_json(request, _ControlBody)
        await self._plane.load(request.match_info["model"], body.parameters)
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        body = await read_json(request, _ControlBody)
        await self._plane.unload(request.match_info["model"], body.parameters)
        return web.Response()

    async def other_repository(self, request: web.Request) -> web.Response:
        raise Unsupported("'repository_name' specification is not supported: this server has one repository")

    async def system_status(self, request: web.Request) -> web.Response:
        regions = self._plane.regions.system(request.match_info.get("region"))
        return json_response(
            [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.nbytes} for r in regions]
        )

    async def system_register(self, request: web.Request) -> web.Response:
        body = await read_json(request, _SystemBody)
        region = SystemRequest(request.match_info["region"], body.key, body.offset, body.byte_size)
        self._plane.regions.register_system(region)
        return web.Response()

    async def system_unregister(self, request: web.Request) -> web.Response:
        self._plane.regions.unregister("system", request.match_info.get("region"))
        return web.Response()

    async def cuda_status(self, request: web.Request) -> web.Response:
        regions = self._plane.regions.cuda(request.match_info.get("region"))
        return json_response([{"name": r.name, "device_id": r.device, "byte_size": r.nbytes} for r in regions])

    async def cuda_register(self, request: web.Request) -> web.Response:
        body = await read_json(request, _CudaBody)
        try:
            handle = base64.b64decode(body.raw_handle.b64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidRequest(f"raw_handle of region '{request.match_info['region']}' is not base64") from error
        region = CudaRequest(request.match_info["region"], handle, body.device_id, body.byte_size)
        self._plane.regions.register_cuda(region)
        return web.Response()

    async def cuda_unregister(self, request: web.Request) -> web.Response:
        self._plane.regions.unregister("cuda", request.match_info.get("region"))
        return web.Response()

    async def trace_settings(self, request: web.Request) -> web.Response:
        """Return all settings; a POST changes some first."""
        name = request.match_info.get("model")
        model = None if name is None else self._plane.traced_model(name)
        if request.method == "POST":
            self._plane.traces.update(await read_json(request, dict[str, Any]), model)
        return json_response(self._plane.traces.to_wire(model))

    async def log_settings(self, request: web.Request) -> web.Response:
        """Return all settings; a POST changes some first."""
        if request.method == "POST":
            self._plane.change_log(await read_json(request, dict[str, Any]))
        return json_response(self._plane.log_settings.to_wire())
