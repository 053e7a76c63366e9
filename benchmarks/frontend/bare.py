"""Handlers that read a request and answer with constants, which measure what the libraries cost.

`python -m benchmarks.frontend.bare HTTP_PORT GRPC_PORT` serves with aiohttp and grpc.aio until it is ended.
"""

import asyncio
import sys
from typing import Any

import grpc
import uvloop
from aiohttp import web
from tritonclient.grpc.service_pb2 import ModelInferResponse

from benchmarks.frontend.models import ITEM_BYTES, MODELS

_ANSWERS = {model.name: bytes(model.outputs * ITEM_BYTES) for model in MODELS}
_MOST_BYTES = 64 << 20


async def _http_infer(request: web.Request) -> web.Response:
    await request.read()
    return web.Response(body=_ANSWERS[request.match_info["model"]])


async def _grpc_infer(request: bytes, context: Any) -> Any:
    model = "tiny" if len(request) < 1000 else "image"
    return ModelInferResponse(model_name=model, raw_output_contents=[_ANSWERS[model]])


async def _ready(request: web.Request) -> web.Response:
    return web.Response()


async def serve(http_port: int, grpc_port: int) -> None:
    app = web.Application(client_max_size=_MOST_BYTES)
    app.router.add_post("/v2/models/{model}/infer", _http_infer)
    app.router.add_get("/v2/health/ready", _ready)
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _MOST_BYTES)])
    handler = grpc.unary_unary_rpc_method_handler(
        _grpc_infer, response_serializer=ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
    server.add_generic_rpc_handlers((service,))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", http_port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(*map(int, sys.argv[1:])))
