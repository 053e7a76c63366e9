"""The HTTP surface: KServe v2 and Triton's extensions, as an aiohttp application."""

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from server import descriptions
from server.body import read_body
from server.codec import EncodedResponse, decode_request, encode_response, parse_header_length
from server.compression import chosen_encoding, compress
from server.engine import Engine
from server.errors import InvalidRequest, ModelNotFound, ShuttingDown
from server.http_errors import error_response, json_errors
from server.metrics import CONTENT_TYPE, render
from server.model import ModelInfo
from server.registry import Registry, State
from server.request import InferRequest, InferResponse, respond

_HEADER_LENGTH = "Inference-Header-Content-Length"
_QUICK_JSON_BYTES = 64 << 10
"""JSON up to this is handled on the event loop, well within a millisecond."""
_QUICK_BINARY_BYTES = 4 << 20
_SMALL_BODY_BYTES = 1 << 16


class _IndexBody(msgspec.Struct):
    ready: bool = False


class Api:
    """The endpoints; one instance serves one registry with one engine."""

    def __init__(self, registry: Registry, engine: Engine, max_body_bytes: int) -> None:
        self._registry = registry
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    async def live(self, request: web.Request) -> web.Response:
        return _json({"live": True})

    async def ready(self, request: web.Request) -> web.Response:
        if self._engine.draining:
            return error_response(400, "the server is shutting down")
        if not self._registry.ready:
            loading = [entry.name for entry in self._registry if entry.state is State.LOADING]
            return error_response(400, f"the server is not ready; still loading: {', '.join(loading) or 'nothing'}")
        return _json({"ready": True})

    async def server_metadata(self, request: web.Request) -> web.Response:
        return _json(descriptions.server_metadata())

    async def model_ready(self, request: web.Request) -> web.Response:
        name, version = _which(request)
        try:
            ready = self._registry.find(name, version).state is State.READY
        except ModelNotFound:
            ready = False
        if not ready or self._engine.draining:
            return error_response(400, "Model version not ready")
        return _json({"name": name, "ready": True})

    async def model_metadata(self, request: web.Request) -> web.Response:
        return _json(descriptions.model_metadata(self._registry.find(*_which(request)).info))

    async def model_config(self, request: web.Request) -> web.Response:
        from server.model_config import config_as_json, config_of

        entry = self._registry.find(*_which(request))
        return _json(config_as_json(config_of(entry.info, entry.config)))

    async def statistics(self, request: web.Request) -> web.Response:
        name, version = request.match_info.get("model"), request.match_info.get("version")
        return _json(descriptions.statistics(self._registry.listed(name, version)))

    async def index(self, request: web.Request) -> web.Response:
        body = await read_body(request, _SMALL_BODY_BYTES)
        try:
            only_ready = bool(body) and msgspec.json.decode(body, type=_IndexBody).ready
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"failed to parse the request JSON: {error}") from error
        entries = [e for e in self._registry if e.state is State.READY or not only_ready]
        return _json(descriptions.repository_index(entries))

    async def infer(self, request: web.Request) -> web.Response:
        """Refuse what can be refused before the body is read; the rest is decode, queue, execute, encode."""
        if self._engine.draining:
            raise ShuttingDown
        info = self._registry.find(*_which(request)).info
        header_length = parse_header_length(request.headers.get(_HEADER_LENGTH))
        body = await read_body(request, self._max_body_bytes)
        infer_request = await _decode(body, header_length, info)
        del body  # the tensors hold what they view
        execution = await self._engine.infer(infer_request)
        encoded = await _encode(respond(infer_request, info, execution.outputs))
        return await _infer_response(encoded, request.headers.get("Accept-Encoding"))


def make_app(api: Api) -> web.Application:
    app = web.Application(middlewares=[json_errors])
    for path, handler in (
        ("/v2", api.server_metadata),
        ("/v2/", api.server_metadata),
        ("/v2/health/live", api.live),
        ("/v2/health/ready", api.ready),
        ("/v2/models/stats", api.statistics),
        *_per_model("", api.model_metadata),
        *_per_model("/ready", api.model_ready),
        *_per_model("/config", api.model_config),
        *_per_model("/stats", api.statistics),
    ):
        app.router.add_get(path, handler, allow_head=False)
    app.router.add_post("/v2/repository/index", api.index)
    for path, handler in _per_model("/infer", api.infer):
        app.router.add_post(path, handler)
    return app


def make_metrics_app(registry: Registry, engine: Engine) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=render(registry, engine.pending), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application(middlewares=[json_errors])
    app.router.add_get("/metrics", metrics, allow_head=False)
    return app


def _per_model(suffix: str, handler: Any) -> tuple[tuple[str, Any], ...]:
    return (
        (f"/v2/models/{{model}}{suffix}", handler),
        (f"/v2/models/{{model}}/versions/{{version:[0-9]+}}{suffix}", handler),
    )


def _which(request: web.Request) -> tuple[str, str | None]:
    return request.match_info["model"], request.match_info.get("version")


def _json(body: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


async def _decode(body: memoryview, header_length: int | None, info: ModelInfo) -> InferRequest:
    json_bytes = len(body) if header_length is None else header_length
    if json_bytes <= _QUICK_JSON_BYTES:
        return decode_request(body, header_length, info)
    return await asyncio.to_thread(decode_request, body, header_length, info)


async def _encode(response: InferResponse) -> EncodedResponse:
    json_bytes = sum(8 * o.array.size for o in response.outputs if not o.binary)
    binary_bytes = sum(o.array.nbytes for o in response.outputs if o.binary)
    if json_bytes <= _QUICK_JSON_BYTES and binary_bytes <= _QUICK_BINARY_BYTES:
        return encode_response(response)
    return await asyncio.to_thread(encode_response, response)


async def _infer_response(encoded: EncodedResponse, accept_encoding: str | None) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if encoded.header_length is not None:
        headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(encoded.header_length)}
    body = encoded.body
    encoding = chosen_encoding(accept_encoding, len(body))
    if encoding is not None:
        body = await asyncio.to_thread(compress, body, encoding)
        headers["Content-Encoding"] = encoding
    return web.Response(body=body, headers=headers)
