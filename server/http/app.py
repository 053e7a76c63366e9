"""The HTTP surface: KServe v2 and Triton's extensions, and how every request is answered."""

import logging
import uuid
from collections.abc import Awaitable, Iterable, Iterator

from server.errors import RequestError
from server.frontend.dataplane import DataPlane
from server.http.answers import json_response
from server.http.api import InferenceApi
from server.http.connection import Answer
from server.http.control import ControlApi
from server.http.errors import error_response, response_of
from server.http.guard import guarded
from server.http.message import Request, Response
from server.http.openapi import document
from server.http.routes import Route, Routes
from server.observe.access import OPEN, Access, Permission
from server.observe.metrics_page import Metrics
from server.observe.prometheus import CONTENT_TYPE
from server.observe.tracing import Tracer
from server.protocol.descriptions import product_version
from server.protocol.request_trace import HEADER

_MODELS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:[0-9]+}")
_TRACEPARENT = HEADER.encode()

_log = logging.getLogger("cohabit.http")


def make_app(plane: DataPlane, max_body_bytes: int, access: Access = OPEN) -> Answer:
    """Make what answers the port's requests; a body may take `max_body_bytes`."""
    return _following(_answering(routes(plane, max_body_bytes, access)), plane.tracer)


def routes(plane: DataPlane, max_body_bytes: int, access: Access = OPEN) -> list[Route]:
    """List what can be asked of the port. Each handler asks for the token that it needs."""
    api, control = InferenceApi(plane, max_body_bytes), ControlApi(plane)
    return [
        *_guarded((*_inference(api), *_listings(control), _described(access)), access, Permission.INFERENCE),
        *_guarded(_health(api), access, Permission.HEALTH),
        *_guarded(_control(control), access, Permission.CONTROL),
    ]


def make_metrics_app(metrics: Metrics, access: Access = OPEN) -> Answer:
    async def answer(request: Request) -> Response:
        return Response(await metrics.text(), content_type=CONTENT_TYPE)

    return _answering(_guarded([("GET", "/metrics", answer)], access, Permission.METRICS))


def _guarded(routes: Iterable[Route], access: Access, permission: Permission) -> Iterator[Route]:
    for method, path, handler in routes:
        yield method, path, guarded(handler, access, permission)


def _answering(routes: Iterable[Route]) -> Answer:
    """Route requests, and answer every error as `{"error": ...}`."""
    found = Routes(routes)

    async def answer(request: Request) -> Response:
        try:
            target = found.find(request.method, request.target)
            request.parameters = target.parameters
            return await target.handler(request)
        except RequestError as error:
            return response_of(error)
        except Exception:  # what nobody foresaw is logged under an id that the client gets
            incident = uuid.uuid4().hex[:12]
            fields = {"incident": incident, "path": request.target.decode("latin-1")}
            _log.exception("internal error", extra={"fields": fields})
            return error_response(500, f"internal error {incident}; the server's log has the details")

    return answer


def _following(answer: Answer, tracer: Tracer) -> Answer:
    """Read the caller's traceparent and answer with ours. Nothing else is done for others."""

    async def follow(request: Request) -> Response:
        traceparent = request.header(_TRACEPARENT)
        with tracer.request(traceparent) as trace:
            response = await answer(request)
        if traceparent is not None:
            response.headers = {**response.headers, HEADER: trace.context.header}
        return response

    def choose(request: Request) -> Awaitable[Response]:
        return follow(request) if _TRACEPARENT in request.headers or tracer.follows_all else answer(request)

    return choose


def _described(access: Access) -> Route:
    written = document(product_version(), access)

    async def answer(request: Request) -> Response:
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
