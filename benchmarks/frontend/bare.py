"""Handlers that read a request and answer with constants, which measure what the libraries cost.

`python -m benchmarks.frontend.bare` prints the addresses of an aiohttp and a grpc.aio server, and serves until it is
ended.
"""

import asyncio
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


async def serve() -> None:
    app = web.Application(client_max_size=_MOST_BYTES)
    app.router.add_post("/v2/models/{model}/infer", _http_infer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _MOST_BYTES)])
    handler = grpc.unary_unary_rpc_method_handler(
        _grpc_infer, response_serializer=ModelInferResponse.SerializeToString
    )
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelInfer": handler})
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"http: 127.0.0.1:{runner.addresses[0][1]}")
    print(f"grpc: 127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve())
