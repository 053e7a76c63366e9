"""The aiohttp applications: KServe v2 with Triton's extensions, and the metrics page."""

import asyncio
import logging
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from cohabit.server.errors import RequestError, Unauthenticated
from cohabit.server.frontend.access import OPEN, Access, Permission
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.sites import ANY_NAME, Sites
from cohabit.server.http.answers import JSON
from cohabit.server.http.endpoints import Endpoint, endpoints
from cohabit.server.http.errors import error_response, response_of
from cohabit.server.http.live_page import live_events, live_page_file
from cohabit.server.log import log_internal_error
from cohabit.server.observe.prometheus import CONTENT_TYPE
from cohabit.server.observe.request_trace import HEADER
from cohabit.server.observe.tracing import Tracer
from cohabit.server.protocol.descriptions import product_version
from cohabit.server.view.live import LiveFeed

_log = logging.getLogger("cohabit.http")


def make_app(
    plane: DataPlane,
    max_body_bytes: int,
    access: Access = OPEN,
    feed: LiveFeed | None = None,
    sites: Sites = ANY_NAME,
) -> web.Application:
    """Make the application of the HTTP port. Bodies have at most `max_body_bytes`. A feed is for the live page."""
    described = msgspec.json.encode(_described())

    async def openapi(request: web.Request) -> web.Response:
        return web.Response(body=described, content_type=JSON)

    async def end(app: web.Application) -> None:
        await plane.constraints.close()

    app = web.Application(middlewares=[_traced(plane.tracer)])
    app.on_cleanup.append(end)
    # This port's metrics need the same permission as statistics; scrapers without it use the metrics port.
    _add(
        app,
        access,
        [
            *endpoints(plane, max_body_bytes),
            Endpoint("GET", ("/v2/openapi.json",), openapi),
            _metrics(plane, Permission.INFERENCE),
        ],
        sites,
    )
    if feed is not None:
        _add(app, access, [live_events(feed)])
        # The page is public: it has no data of the server, and asks for the token.
        app.router.add_get("/", live_page_file)
    return app


def make_metrics_app(plane: DataPlane, access: Access = OPEN) -> web.Application:
    """Make the application of the metrics port. It also answers health, as inference cannot take its connections."""
    health = [e for e in endpoints(plane, 0) if e.permission is Permission.HEALTH]
    app = web.Application(middlewares=[_answered])
    _add(app, access, [*health, _metrics(plane, Permission.METRICS)])
    return app


def _described() -> dict[str, Any]:
    """Return the OpenAPI document, with the server's version."""
    document: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("openapi.json").read_bytes())
    document["info"]["version"] = product_version()
    return document


def _metrics(plane: DataPlane, permission: Permission) -> Endpoint:
    async def metrics(request: web.Request) -> web.Response:
        return web.Response(body=await plane.metrics(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})

    return Endpoint("GET", ("/metrics",), metrics, permission=permission)


def _add(app: web.Application, access: Access, served: Iterable[Endpoint], sites: Sites = ANY_NAME) -> None:
    for endpoint in served:
        handler = _guarded(endpoint.handler, access, endpoint.permission)
        if endpoint.changes_server:
            handler = _own(handler, sites)
        # Load balancers ask for health by HEAD, too.
        methods = (endpoint.method, "HEAD") if endpoint.permission is Permission.HEALTH else (endpoint.method,)
        for path in endpoint.paths:
            for method in methods:
                app.router.add_route(method, path, handler, expect_handler=_read_body_continues)


async def _read_body_continues(request: web.Request) -> None:
    """Leave 100 Continue to `read_body`, so that a refused request gets its answer instead."""


def _guarded(handler: Handler, access: Access, permission: Permission) -> Handler:
    """Check the caller's token before a handler runs."""
    if permission in access.open:
        return handler

    async def guard(request: web.Request) -> web.StreamResponse:
        await access.admit(request.headers.get(hdrs.AUTHORIZATION), permission, request.remote or "a Unix socket")
        return await handler(request)

    return guard


def _own(handler: Handler, sites: Sites) -> Handler:
    """Refuse calls of other sites' pages before a handler runs."""

    async def own(request: web.Request) -> web.StreamResponse:
        peer = request.transport and request.transport.get_extra_info("socket")
        sites.require_own(request.headers, by_name=not peer or peer.family != socket.AF_UNIX)
        return await handler(request)

    return own


@web.middleware
async def _answered(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error as JSON."""
    if request.protocol._messages:
        # Pipelined: from Python 3.12 on, aiohttp would answer requests that never wait in one turn of the event loop.
        await asyncio.sleep(0)
    try:
        response = await handler(request)
    except RequestError as error:
        response = response_of(error, request.path)
        if isinstance(error, Unauthenticated) and error.ends_connection:
            response.force_close()
    except web.HTTPException as error:
        allow: dict[str, str] = {name: error.headers[name] for name in (hdrs.ALLOW,) if name in error.headers}
        response = error_response(error.status, error.reason, allow, path=request.path)
    except web.RequestPayloadError as error:
        request.content.feed_eof()  # do not wait for the rest
        response = error_response(400, f"the request body could not be read: {error}", path=request.path)
    except Exception:
        response = error_response(500, log_internal_error(_log, path=request.path), path=request.path)
    response.headers[hdrs.SERVER] = "cohabit"
    expecting = hdrs.EXPECT in request.headers and not request.content.is_eof()
    if expecting or hdrs.TRANSFER_ENCODING in request.headers:
        # The client may or may not send the body now; and aiohttp 3.14 reads trailers as the next request's headers.
        response.force_close()
    return response


def _traced(tracer: Tracer) -> Middleware:
    """Continue the caller's trace, and return our traceparent."""

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        traceparent = request.headers.get(HEADER)
        if traceparent is None and not tracer.samples:
            return await _answered(request, handler)
        with tracer.request(traceparent) as trace:
            response = await _answered(request, handler)
        if traceparent is not None:
            response.headers[HEADER] = trace.context.header
        return response

    return traced
