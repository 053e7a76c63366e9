"""The HTTP surface: KServe v2 and Triton's extensions, as an aiohttp application."""

from collections.abc import Iterable, Iterator, Mapping

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from server.dataplane import DataPlane
from server.descriptions import product_version
from server.http.answers import json_response
from server.http.api import InferenceApi
from server.http.control import ControlApi
from server.http.errors import json_errors
from server.http.guard import guarded
from server.http.openapi import document
from server.metrics.page import Metrics
from server.metrics.prometheus import CONTENT_TYPE
from server.operate.access import OPEN, Access, Permission
from server.operate.tracing import following

Route = tuple[str, str, Handler]

_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}")


def make_app(plane: DataPlane, max_body_bytes: int, access: Access = OPEN) -> web.Application:
    """Make the application; a body may take `max_body_bytes`."""
    api, control = InferenceApi(plane, max_body_bytes), ControlApi(plane)
    routes = {
        Permission.INFERENCE: (*_inference(api), *_listings(control), _described(access)),
        Permission.HEALTH: _health(api),
        Permission.CONTROL: _control(control),
    }
    return _application(routes, access, following(plane.tracer))


def make_metrics_app(metrics: Metrics, access: Access = OPEN) -> web.Application:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=await metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return _application({Permission.METRICS: [("GET", "/metrics", answer)]}, access)


def _application(
    routes: Mapping[Permission, Iterable[Route]], access: Access, *around: Middleware
) -> web.Application:
    app = web.Application(middlewares=[*around, json_errors])
    for permission, permitted in routes.items():
        for method, path, handler in permitted:
            app.router.add_route(method, path, guarded(handler, access, permission))
    return app


def _described(access: Access) -> Route:
    written = document(product_version(), access)

    async def answer(request: web.Request) -> web.Response:
        return json_response(written)

    return "GET", "/v2/openapi.json", answer


def _health(api: InferenceApi) -> Iterator[Route]:
    yield "GET", "/v2/health/live", api.live
    yield "GET", "/v2/health/ready", api.ready


def _inference(api: InferenceApi) -> Iterator[Route]:
    """What comes first is found first."""
    for model in _MODELS:
        yield "POST", f"{model}/infer", api.infer
    yield "GET", "/v2", api.server_metadata
    yield "GET", "/v2/", api.server_metadata
    yield "GET", "/v2/models/stats", api.statistics
    for model in _MODELS:
        yield "GET", model, api.model_metadata
        yield "GET", f"{model}/ready", api.model_ready
        yield "GET", f"{model}/config", api.model_config
        yield "GET", f"{model}/stats", api.statistics
        yield "POST", f"{model}/generate", api.generate
        yield "POST", f"{model}/generate_stream", api.generate_stream


def _listings(api: ControlApi) -> Iterator[Route]:
    yield "POST", "/v2/repository/index", api.index
    for path, status in (
        ("/v2/systemsharedmemory", api.system_status),
        ("/v2/cudasharedmemory", api.cuda_status),
    ):
        yield "GET", f"{path}/status", status
        yield "GET", f"{path}/region/{{region}}/status", status


def _control(api: ControlApi) -> Iterator[Route]:
    yield "POST", "/v2/repository/models/{model}/load", api.load
    yield "POST", "/v2/repository/models/{model}/unload", api.unload
    yield "POST", "/v2/repository/{repository}/models/{model}/{order:(un)?load}", api.other_repository
    for path, register, unregister in (
        ("/v2/systemsharedmemory", api.system_register, api.system_unregister),
        ("/v2/cudasharedmemory", api.cuda_register, api.cuda_unregister),
    ):
        for regions in (path, f"{path}/region/{{region}}"):
            yield "POST", f"{regions}/unregister", unregister
        yield "POST", f"{path}/region/{{region}}/register", register
    for method in ("GET", "POST"):
        yield method, "/v2/trace/setting", api.trace_settings
        yield method, "/v2/models/{model}/trace/setting", api.trace_settings
        yield method, "/v2/logging", api.log_settings
