"""The HTTP surface: KServe v2 and Triton's extensions, as an aiohttp application."""

from collections.abc import Awaitable, Callable, Iterable, Iterator

from aiohttp import web

from server.dataplane import DataPlane
from server.engine import Engine
from server.http_api import InferenceApi
from server.http_control import ControlApi
from server.http_errors import json_errors
from server.metrics import CONTENT_TYPE, render
from server.registry import Registry

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Route = tuple[str, str, Handler]


def make_app(plane: DataPlane, max_body_bytes: int) -> web.Application:
    return _application((*_inference(InferenceApi(plane, max_body_bytes)), *_control(ControlApi(plane))))


def make_metrics_app(registry: Registry, engine: Engine) -> web.Application:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=render(registry, engine.pending), headers={"Content-Type": CONTENT_TYPE})

    return _application([("GET", "/metrics", metrics)])


def _application(routes: Iterable[Route]) -> web.Application:
    app = web.Application(middlewares=[json_errors])
    for method, path, handler in routes:
        app.router.add_route(method, path, handler)
    return app


def _inference(api: InferenceApi) -> Iterator[Route]:
    yield "GET", "/v2", api.server_metadata
    yield "GET", "/v2/", api.server_metadata
    yield "GET", "/v2/openapi.json", api.openapi
    yield "GET", "/v2/health/live", api.live
    yield "GET", "/v2/health/ready", api.ready
    yield "GET", "/v2/models/stats", api.statistics
    for model in ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}"):
        yield "GET", model, api.model_metadata
        yield "GET", f"{model}/ready", api.model_ready
        yield "GET", f"{model}/config", api.model_config
        yield "GET", f"{model}/stats", api.statistics
        yield "POST", f"{model}/infer", api.infer
        yield "POST", f"{model}/generate", api.generate
        yield "POST", f"{model}/generate_stream", api.generate_stream


def _control(api: ControlApi) -> Iterator[Route]:
    yield "POST", "/v2/repository/index", api.index
    yield "POST", "/v2/repository/models/{model}/load", api.load
    yield "POST", "/v2/repository/models/{model}/unload", api.unload
    yield "POST", "/v2/repository/{repository}/models/{model}/{order:(un)?load}", api.other_repository
    for path, status, register, unregister in (
        ("/v2/systemsharedmemory", api.system_status, api.system_register, api.system_unregister),
        ("/v2/cudasharedmemory", api.cuda_status, api.cuda_register, api.cuda_unregister),
    ):
        for regions in (path, f"{path}/region/{{region}}"):
            yield "GET", f"{regions}/status", status
            yield "POST", f"{regions}/unregister", unregister
        yield "POST", f"{path}/region/{{region}}/register", register
    for method in ("GET", "POST"):
        yield method, "/v2/trace/setting", api.trace_settings
        yield method, "/v2/models/{model}/trace/setting", api.trace_settings
        yield method, "/v2/logging", api.log_settings
