"""Closed-loop clients, a process of their own: `python -m benchmarks.frontend.client PROTOCOL ADDRESS MODEL N SECONDS`.

Requests are made once and sent again and again; of an answer only its end is looked for. Prints what was measured as
JSON.
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


def http_request(model: Trivial) -> bytes:
    described = {
        "name": "x",
        "datatype": "FP32",
        "shape": [1, *model.shape],
        "parameters": {"binary_data_size": model.nbytes},
    }
    header = json.dumps({"inputs": [described], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/{model.name}/infer HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Length: {len(header) + model.nbytes}\r\nInference-Header-Content-Length: {len(header)}\r\n\r\n"
    )
    return head.encode() + header + bytes(model.nbytes)


def grpc_request(model: Trivial) -> bytes:
    from tritonclient.grpc.service_pb2 import ModelInferRequest

    message: Any = ModelInferRequest(model_name=model.name, raw_input_contents=[bytes(model.nbytes)])
    message.inputs.add(name="x", datatype="FP32", shape=[1, *model.shape])
    written: bytes = message.SerializeToString()
    return written


class _HttpLoop(asyncio.Protocol):
    """One connection that sends the next request when an answer is complete."""

    def __init__(self, request: bytes, end_s: float, times_s: list[float]) -> None:
        self._request, self._end_s, self._times_s = request, end_s, times_s
        self._received = bytearray()
        self._answer_bytes: int | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._answer_bytes is None and (head_end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:head_end]).lower()
            assert b" 200 " in head[:15], bytes(self._received)
            self._answer_bytes = head_end + 4 + int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        if self._answer_bytes is not None and len(self._received) >= self._answer_bytes:
            self._times_s.append(time.perf_counter() - self._sent_s)
            self._received.clear()
            self._answer_bytes = None
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        if self._sent_s < self._end_s:
            self._transport.write(self._request)
        else:
            self.done.set_result(None)
            self._transport.close()


async def run_http(address: str, model: Trivial, clients: int, seconds: float) -> list[float]:
    """Return the seconds that each request took."""
    host, _, port = address.rpartition(":")
    request, times_s = http_request(model), list[float]()
    end_s = time.perf_counter() + seconds
    loop = asyncio.get_running_loop()

    def protocol() -> _HttpLoop:
        return _HttpLoop(request, end_s, times_s)

    connections = [await loop.create_connection(protocol, host, int(port)) for _ in range(clients)]
    await asyncio.gather(*(connection.done for _, connection in connections))
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
