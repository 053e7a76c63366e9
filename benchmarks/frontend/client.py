"""Closed-loop clients, a process of their own: `python -m benchmarks.frontend.client PROTOCOL ADDRESS MODEL N SECONDS`.

Requests are made once and sent again and again. Prints what was measured as JSON.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.frontend.models import MODELS, Trivial

_WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """`served` counts the requests before the measurement as well."""

    requests: int
    served: int
    seconds: float
    p50_s: float
    p99_s: float

    @property
    def per_s(self) -> float:
        return self.requests / self.seconds


def http_request(model: Trivial) -> tuple[dict[str, str], bytes]:
    """Return the headers and the body of a request."""
    described = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, *model.shape],
        "parameters": {"binary_data_size": model.nbytes},
    }
    header = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    return {"Inference-Header-Content-Length": str(len(header))}, header + bytes(model.nbytes)


def grpc_request(model: Trivial) -> bytes:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    message: Any = ModelInferRequest(model_name=model.name, raw_input_contents=[bytes(model.nbytes)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, *model.shape])
    written: bytes = message.SerializeToString()
    return written


async def run_http(address: str, model: Trivial, clients: int, seconds: float) -> list[float]:
    """Return the seconds that each request took; every client has a connection of its own."""
    import aiohttp

    url, (headers, body), times_s = (
        f"http://{address}/v2/models/{model.name}/infer",
        http_request(model),
        list[float](),
    )
    end_s = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while (sent_s := time.perf_counter()) < end_s:
            async with session.post(url, headers=headers, data=body) as answer:
                answer.raise_for_status()
                await answer.read()
            times_s.append(time.perf_counter() - sent_s)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=clients)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return times_s


async def run_grpc(address: str, model: Trivial, clients: int, seconds: float) -> list[float]:
    """Return the seconds that each call took; every client has a connection of its own."""
    import grpc

    request, times_s = grpc_request(model), list[float]()
    end_s = time.perf_counter() + seconds

    async def client() -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(address, options=options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            await call(request)
            while (sent_s := time.perf_counter()) < end_s:
                await call(request)
                times_s.append(time.perf_counter() - sent_s)

    await asyncio.gather(*(client() for _ in range(clients)))
    return times_s


_PROTOCOLS: dict[str, Callable[[str, Trivial, int, float], Coroutine[Any, Any, list[float]]]] = {
    "http": run_http,
    "grpc": run_grpc,
}


def measure(protocol: str, address: str, model: Trivial, clients: int, seconds: float) -> Measured:
    import uvloop

    runner = uvloop.run if protocol == "http" else asyncio.run
    before = len(runner(_PROTOCOLS[protocol](address, model, clients, _WARM_UP_S)))
    times_s = runner(_PROTOCOLS[protocol](address, model, clients, seconds))
    percentiles = statistics.quantiles(times_s, n=100)
    return Measured(len(times_s), before + len(times_s), seconds, percentiles[49], percentiles[98])


def main() -> None:
    protocol, address, name, clients, seconds = sys.argv[1:]
    (model,) = (model for model in MODELS if model.name == name)
    print(json.dumps(asdict(measure(protocol, address, model, int(clients), float(seconds)))))


if __name__ == "__main__":
    main()
