"""HTTP endpoints for model control, shared memory, trace settings and log settings."""

from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from cohabit.server.errors import Refused
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.http.answers import json_response, read_json
from cohabit.server.ipc.request import Parameters
from cohabit.server.protocol.shared_memory import SystemRequest, refuse_cuda, require_no_cuda

_MOST_CONFIG_BYTES = 1 << 20
"""Maximum size of a load request, which may contain a model's configuration."""

_Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class _IndexBody(msgspec.Struct):
    ready: bool = False


class _ControlBody(msgspec.Struct):
    parameters: Parameters = {}


class _SystemBody(msgspec.Struct):
    key: str
    byte_size: _Count
    offset: _Count = 0


class ControlApi:
    """Every public method handles one endpoint, on the event loop's thread."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def index(self, request: web.Request) -> web.Response:
        body = await read_json(request, _IndexBody)
        return json_response(await self._plane.index(body.ready))

    async def load(self, request: web.Request) -> web.Response:
        body = await read_json(request, _ControlBody, _MOST_CONFIG_BYTES)
        await self._plane.load(request.match_info["model"], body.parameters)
        return web.Response()

    async def unload(self, request: web.Request) -> web.Response:
        body = await read_json(request, _ControlBody)
        await self._plane.unload(request.match_info["model"], body.parameters)
        return web.Response()

    async def other_repository(self, request: web.Request) -> web.Response:
        raise Refused(
            "Unsupported", "'repository_name' specification is not supported: this server has one repository"
        )

    async def system_status(self, request: web.Request) -> web.Response:
        regions = self._plane.regions.listed(request.match_info.get("region"))
        return json_response(
            [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.nbytes} for r in regions]
        )

    async def system_register(self, request: web.Request) -> web.Response:
        name = request.match_info.get("region", "")
        body = await read_json(request, _SystemBody)
        region = SystemRequest(name, body.key, body.offset, body.byte_size)
        self._plane.regions.register(region)
        return web.Response()

    async def system_unregister(self, request: web.Request) -> web.Response:
        self._plane.regions.unregister(request.match_info.get("region"))
        return web.Response()

    async def cuda_status(self, request: web.Request) -> web.Response:
        require_no_cuda(request.match_info.get("region"))
        return json_response([])

    async def cuda_register(self, request: web.Request) -> web.Response:
        refuse_cuda(request.match_info.get("region", ""))

    async def cuda_unregister(self, request: web.Request) -> web.Response:
        return web.Response()

    async def trace_settings(self, request: web.Request) -> web.Response:
        """Return all settings; a POST that would change any is refused."""
        changes = await read_json(request, dict[str, Any]) if request.method == "POST" else {}
        return json_response(self._plane.trace_settings(request.match_info.get("model"), changes))

    async def log_settings(self, request: web.Request) -> web.Response:
        """Return all settings; a POST changes some first."""
        if request.method == "POST":
            self._plane.change_log(await read_json(request, dict[str, Any]))
        return json_response(self._plane.log_settings.to_wire())
