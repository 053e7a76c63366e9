"""Both ports in a thread of their own, over the data plane and an engine made of numpy functions."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.errors import ExecutionFailed, InvalidRequest, RequestError
from cohabit.server.frontend.access import OPEN, Access
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.memory import Lease, RequestMemory
from cohabit.server.frontend.sites import ANY_NAME, Sites
from cohabit.server.grpc.server import GrpcServer
from cohabit.server.http.app import make_app
from cohabit.server.http.server import HttpServer
from cohabit.server.ipc.catalog import Catalog, ModelEntry, ModelState
from cohabit.server.ipc.model import Array, ModelInfo, ModelKey, TensorSpec
from cohabit.server.ipc.request import Answer, Request, SequenceId, Timing
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import EngineReport, ModelCounters, ModelStatistics
from cohabit.server.observe.settings import LogSettings
from cohabit.server.protocol.datatypes import float32_of_bf16
from cohabit.server.protocol.shared_memory import Regions, no_system, open_region

MIB = 1 << 20


class Gate:
    """Holds a model's requests until the test opens it."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        """One for each request that has come."""
        self.cancelled = threading.Semaphore(0)
        self._opened: Future[None] = Future()

    def open(self) -> None:
        self._opened.set_result(None)

    async def wait(self) -> None:
        self.entered.release()
        try:
            await asyncio.shield(asyncio.wrap_future(self._opened))
        except asyncio.CancelledError:
            self.cancelled.release()
            raise


@dataclass
class FakeModel:
    info: ModelInfo
    function: Callable[..., dict[str, Array]]
    gate: Gate | None = None
    requests: list[Request] = field(default_factory=list)


class FakeEngine:
    """An engine client that answers at once, from the caller's thread."""

    unavailable: str | None = None
    restarts = 0

    def __init__(self, *models: FakeModel) -> None:
        self.models = {model.info.key: model for model in models}
        self.catalog = Catalog(strict_readiness=False)
        for model in models:
            self.catalog.update(ModelEntry(model.info.name, model.info.version, ModelState.READY, info=model.info))
        self.catalog.update(ModelEntry("damaged", 1, ModelState.UNAVAILABLE, "model.pt2 is truncated"))
        self.ended: list[tuple[ModelKey, SequenceId]] = []
        """Sequences that have no further requests."""
        self._statistics = {key: ModelStatistics() for key in self.models}

    async def infer(
        self, request: Request, info: ModelInfo, lease: Lease, on_spans: OnSpans | None = None
    ) -> Answer:
        model = self.models[request.model]
        model.requests.append(request)
        arrived_s = time.monotonic()
        if model.gate is not None:
            await model.gate.wait()
        try:
            outputs = model.function(**request.inputs)
        except RequestError:
            raise
        except Exception as error:
            raise ExecutionFailed(model.info.name, str(error)) from error
        busy_s = time.monotonic() - arrived_s
        timing = Timing(arrived_s, arrived_s, busy_s, busy_s, rows=request.batch)
        self._statistics[request.model].executed([timing], time.time())
        return Answer(request.model, {name: _leased(array, lease) for name, array in outputs.items()}, timing)

    async def load(self, model: str, config: str | None) -> None: ...

    async def unload(self, model: str) -> None: ...

    async def report(self, model: ModelKey | None = None) -> EngineReport:
        return EngineReport({key: ModelCounters(statistics) for key, statistics in self._statistics.items()})

    def count_rejection(self, model: ModelKey, reason: str) -> None: ...

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        self.ended.append((model, sequence))

    def change_log(self, settings: LogSettings) -> None: ...

    async def close(self) -> bool:
        return True


def _leased(array: Array, lease: Lease) -> Array:
    own = np.ndarray(array.shape, array.dtype, lease.allocate(array.nbytes))
    own[...] = array
    return own


def tensors(*specs: tuple[str, str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(*spec) for spec in specs)


def identity(
    name: str, datatype: str = "FP32", shape: tuple[int, ...] = (4,), max_batch: int = 8, gate: Gate | None = None
) -> FakeModel:
    info = ModelInfo(name, 1, tensors(("x", datatype, shape)), tensors(("y", datatype, shape)), max_batch)
    return FakeModel(info, lambda x: {"y": x}, gate)


def standard_models() -> list[FakeModel]:
    def broken(x: Array) -> dict[str, Array]:
        if x[0, 0] == 7:
            raise InvalidRequest("row 7 is outside the table")
        raise RuntimeError("the kernel caught fire")

    def with_optional(x: Array, scale: Array, shift: Array) -> dict[str, Array]:
        return {"y": x * float32_of_bf16(scale) + shift}

    pair = tensors(("a", "FP32", (4,)), ("b", "FP32", (4,)))
    optional = (
        TensorSpec("x", "FP32", (4,)),
        TensorSpec("scale", "BF16", (1,), default=2.5),
        TensorSpec("shift", "INT64", (4,), default=-1.0),
    )
    sums = tensors(("sum", "FP32", (4,)), ("diff", "FP32", (4,)))
    whole = tensors(("x", "INT32", (2, 3))), tensors(("y", "INT32", (2, 3)))
    datatypes = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "BF16", "FP64")
    return [
        FakeModel(ModelInfo("adder", 3, pair, sums, 8), lambda a, b: {"diff": a - b, "sum": a + b}),
        FakeModel(ModelInfo("fixed", 1, *whole), lambda x: {"y": x * 2}),
        FakeModel(identity("broken").info, broken),
        identity("wide", shape=(4096,)),
        FakeModel(ModelInfo("optional", 1, optional, tensors(("y", "FP32", (4,))), 8), with_optional),
        *(identity(f"id_{d.lower()}", d) for d in datatypes),
    ]


@dataclass
class Ports:
    """Both ports, and the loop of their thread."""

    plane: DataPlane
    engine: FakeEngine
    http: HttpServer
    grpc_server: GrpcServer
    loop: asyncio.AbstractEventLoop
    url: str = ""
    grpc: str = ""

    @property
    def address(self) -> str:
        return self.url.partition("://")[2]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the ports' thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def stop(self) -> None:
        drained = await self.plane.drain(10)
        await self.grpc_server.stop(1)
        await self.http.stop(1)
        assert drained
        assert self.plane.memory.used_bytes == 0, "a request has left its memory taken"


@contextmanager
def running(
    *models: FakeModel,
    access: Access = OPEN,
    max_body_bytes: int = MIB,
    max_connections: int = 1024,
    queue_bytes: int = 64 * MIB,
    client_shm: bool = True,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    unix: tuple[Path, Path] | None = None,
    grpc_options: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    repository: Path = Path("fakes"),
    sites: Sites = ANY_NAME,
    **options: Any,
) -> Iterator[Ports]:
    """Serve models on free ports; `unix` has a socket for HTTP and one for gRPC, `options` are both servers'."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Ports:
        engine = FakeEngine(*models)
        config = ServeConfig(repository=repository, memory=FixedSize(MIB))
        memory = RequestMemory(queue_bytes)
        plane = DataPlane(config, engine, memory, Regions(open_region if client_shm else no_system), clock=clock)
        both = {"max_connections": max_connections, **options}
        http = HttpServer(make_app(plane, max_body_bytes, access, sites=sites), **both)
        grpc = GrpcServer(plane, access, max_body_bytes=max_body_bytes, **both, **(grpc_options or {}))
        ports = Ports(plane, engine, http, grpc, loop)
        http_path, grpc_path = unix or (None, None)
        ports.url = await http.start(hosts, 0, http_path, "--http-port")
        ports.grpc = await grpc.start(hosts, 0, grpc_path)
        return ports

    async def stop(ports: Ports) -> None:
        await ports.stop()
        await loop.shutdown_default_executor()

    try:
        ports = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
        try:
            yield ports
        finally:
            ports.run(stop(ports))
            ports.plane.memory.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
