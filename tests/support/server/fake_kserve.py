"""A KServe server without models: in-process for tests, or as a program in the place of `cohabit`."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web


@dataclass
class FakeKServe:
    """Every model takes x [-1, 4] FP32 and gives one row of one number, zero unless told."""

    models: tuple[str, ...] = ("a", "b")
    has_index: bool = True
    answer_after: int = 1
    """Hold every answer back until so many requests have arrived."""
    status_of: dict[str, int] = field(default_factory=dict)
    """Models that answer with this HTTP status."""
    latency_s: Callable[[int], float] = lambda n: 0.0
    """Seconds until the n-th request, from 0, is answered."""
    stall_s: tuple[float, float] | None = None
    """From the first request on, answers due in this span of seconds come at its end."""
    value_of: Callable[[int], float] = lambda n: 0.0
    """What the n-th request is answered with."""
    statistics: list[dict[str, Any]] = field(default_factory=list)
    metrics: str = ""
    authorizations: set[str | None] = field(default_factory=set)
    never_answers: tuple[str, ...] = ()
    hangs_up: tuple[str, ...] = ()
    arrived: list[str] = field(default_factory=list)
    received: list[bytes] = field(default_factory=list)
    has_shared_memory: bool = True
    regions: dict[str, bytes] = field(default_factory=dict)
    """Contents of the shared memory that was registered, by name, as they were then."""
    unregistered: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    """Of each answered request, as the server measures it."""
    first_s: float | None = None
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v2/health/ready", self.ready)
        app.router.add_post("/v2/models/{model}/infer", self.infer)
        app.router.add_get("/v2/models/stats", self.stats)
        app.router.add_get("/v2/models/{model}", self.metadata)
        app.router.add_get("/metrics", self.scrape)
        region = "/v2/systemsharedmemory/region/{region}"
        if self.has_shared_memory:
            app.router.add_post(f"{region}/register", self.register)
            app.router.add_post(f"{region}/unregister", self.unregister)
        if self.has_index:
            app.router.add_post("/v2/repository/index", self.index)
        return app

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response()

    async def index(self, request: web.Request) -> web.Response:
        unready = [{"name": "0_never_loaded"}, {"name": "0_broken", "state": "UNAVAILABLE"}]
        return web.json_response([{"name": m, "version": "1", "state": "READY"} for m in self.models] + unready)

    async def metadata(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name not in self.models:
            return web.json_response({"error": f"Request for unknown model: '{name}' is not found"}, status=404)
        x = {"name": "x", "datatype": "FP32", "shape": [-1, 4]}
        y = {"name": "y", "datatype": "FP32", "shape": [-1, 1]}
        return web.json_response({"name": name, "versions": ["1"], "platform": "", "inputs": [x], "outputs": [y]})

    async def stats(self, request: web.Request) -> web.Response:
        return web.json_response({"model_stats": self.statistics})

    async def scrape(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def register(self, request: web.Request) -> web.Response:
        asked = await request.json()
        content = (Path("/dev/shm") / asked["key"].lstrip("/")).read_bytes()
        self.regions[request.match_info["region"]] = content[: asked["byte_size"]]
        return web.Response()

    async def unregister(self, request: web.Request) -> web.Response:
        self.unregistered.append(request.match_info["region"])
        return web.Response()

    async def infer(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        loop, started_s = asyncio.get_running_loop(), time.perf_counter()
        self.first_s = self.first_s or loop.time()
        due_s = loop.time() + self.latency_s(len(self.arrived))
        if self.stall_s is not None and self.first_s + self.stall_s[0] <= due_s < self.first_s + self.stall_s[1]:
            due_s = self.first_s + self.stall_s[1]
        value = self.value_of(len(self.arrived))
        self.authorizations.add(request.headers.get("authorization"))
        self.arrived.append(name)
        self.received.append(await request.read())
        if len(self.arrived) >= self.answer_after:
            self.enough.set()
        await self.enough.wait()
        if name in self.never_answers:
            await self.stopping.wait()
        if name in self.hangs_up:
            assert request.transport is not None
            request.transport.close()
        if name in self.status_of:
            return web.json_response({"error": f"{name} is out of order"}, status=self.status_of[name])
        if due_s > loop.time():
            await asyncio.sleep(due_s - loop.time())
        self.took_s.append(time.perf_counter() - started_s)
        return self.constant(name, rows=1, value=value)

    @staticmethod
    def constant(model: str, rows: int, value: float) -> web.Response:
        raw = np.full((rows, 1), value, np.float32).tobytes()
        output: dict[str, Any] = {"name": "y", "datatype": "FP32", "shape": [rows, 1]}
        output["parameters"] = {"binary_data_size": len(raw)}
        head = web.json_response({"model_name": model, "model_version": "1", "outputs": [output]}).body
        assert isinstance(head, bytes)
        headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Type": "application/octet-stream"}
        return web.Response(body=head + raw, headers=headers)


@asynccontextmanager
async def serving(fake: FakeKServe) -> AsyncIterator[str]:
    """Serve on a free port and yield HOST:PORT."""
    async with serving_app(fake.app()) as address:
        try:
            yield address
        finally:
            fake.stopping.set()


@asynccontextmanager
async def serving_app(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"{host}:{port}"
    finally:
        await runner.cleanup()


async def _program(repository: Path, models: tuple[str, ...]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    (repository.parent / "started").touch()
    async with serving(FakeKServe(models=models)) as address:
        print("metrics: none", flush=True)
        print(f"http: http://{address}", flush=True)
        await stop.wait()
    (repository.parent / "stopped").write_text(" ".join(sys.argv[1:]))


if __name__ == "__main__":
    if os.environ.get("FAKE_FAILS"):
        sys.exit("InfeasibleBudget: 1.0 MiB is not enough")
    served = Path(sys.argv[2])
    asyncio.run(_program(served, tuple(p.name for p in served.iterdir())))
