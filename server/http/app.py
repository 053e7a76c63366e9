"""The aiohttp applications: KServe v2 with Triton's extensions, and the metrics page."""

import logging
import uuid
from collections.abc import Iterable, Iterator

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from server.errors import RequestError
from server.frontend.dataplane import DataPlane
from server.http.answers import json_response
from server.http.api import InferenceApi
from server.http.control import ControlApi
from server.http.errors import error_response, response_of
from server.http.openapi import document
from server.observe.access import OPEN, Access, Permission
from server.observe.prometheus import CONTENT_TYPE
from server.observe.tracing import Tracer
from server.protocol.descriptions import product_version
from server.protocol.request_trace import HEADER

Route = tuple[str, str, Handler]
"""Method, path and handler."""

_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}")
_log = logging.getLogger("cohabit.http")


def make_app(plane: DataPlane, max_body_bytes: int, access: Access = OPEN) -> web.Application:
    """Make the application of the HTTP port; a body may take `max_body_bytes`."""
    api, control = InferenceApi(plane, max_body_bytes), ControlApi(plane)
    app = web.Application(middlewares=[_traced(plane.tracer)])
    _add(app, access, Permission.INFERENCE, (*_inference(api), *_listings(control), _document(access)))
    _add(app, access, Permission.HEALTH, _health(api))
    _add(app, access, Permission.CONTROL, _control(control))
    return app


def make_metrics_app(plane: DataPlane, access: Access = OPEN) -> web.Application:
    """Make the application of the metrics port."""

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await plane.metrics(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    app = web.Application(middlewares=[_answered])
    _add(app, access, Permission.METRICS, [("GET", "/metrics", metrics)])
    return app


def _add(app: web.Application, access: Access, permission: Permission, routes: Iterable[Route]) -> None:
    for method, path, handler in routes:
        guarded = _guarded(handler, access, permission)
        app.router.add_route(method, path, guarded, expect_handler=_read_body_continues)


async def _read_body_continues(request: web.Request) -> None:
    """Leave 100 Continue to `read_body`, so that a request that is refused gets its answer instead."""


def _guarded(handler: Handler, access: Access, permission: Permission) -> Handler:
    """Check the caller's token before a handler runs."""
    if permission in access.open:
        return handler

    async def guard(request: web.Request) -> web.StreamResponse:
        access.require(request.headers.get(hdrs.AUTHORIZATION), permission)
        return await handler(request)

    return guard


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as `{"error": ...}`."""
    try:
        response = await handler(request)
    except RequestError as error:
        response = response_of(error)
    except web.HTTPException as error:
        allow: dict[str, str] | None = (
            {hdrs.ALLOW: error.headers[hdrs.ALLOW]} if hdrs.ALLOW in error.headers else None
        )
        response = error_response(error.status, error.reason, allow)
    except web.RequestPayloadError as error:
        response = error_response(400, f"the request body could not be read: {error}")
    except Exception:  # the log and the client get the same id for an unexpected error
        incident = uuid.uuid4().hex[:12]
        _log.exception("internal error", extra={"fields": {"incident": incident, "path": request.path}})
        response = error_response(500, f"internal error {incident}; the server's log has the details")
    if hdrs.EXPECT in request.headers and not request.content.is_eof():
        response.force_close()  # the client may or may not send the body after this answer
    return response


def _traced(tracer: Tracer) -> Middleware:
    """Continue the caller's trace, and answer its traceparent with ours."""

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        traceparent = request.headers.get(HEADER)
        if traceparent is None and not tracer.traces_all:
            return await _answered(request, handler)
        with tracer.request(traceparent) as trace:
            response = await _answered(request, handler)
        if traceparent is not None:
            response.headers[HEADER] = trace.context.header
        return response

    return traced


def _document(access: Access) -> Route:
    written = document(product_version(), access)

    async def answer(request: web.Request) -> web.Response:
        return json_response(written)

    return "GET", "/v2/openapi.json", answer


def _health(api: InferenceApi) -> Iterator[Route]:
    yield "GET", "/v2/health/live", api.live
    yield "GET", "/v2/health/ready", api.ready


def _inference(api: InferenceApi) -> Iterator[Route]:
    """Inference first: aiohttp tries the routes of a prefix in this order."""
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
