"""Engine clients without ports around them: the fake engine of `fake_engine`, in a process or in this one."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from cohabit.server.config.config import ServeConfig, encode_config
from cohabit.server.frontend.engine_client import EngineClient
from cohabit.server.frontend.memory import Lease, RequestMemory, inputs_in
from cohabit.server.ipc.catalog import Catalog
from cohabit.server.ipc.model import Array, ModelInfo
from cohabit.server.ipc.request import Answer, Request, RequestedOutput
from cohabit.server.process.engine_connection import EngineConnection
from cohabit.server.process.in_process import InProcessEngine
from cohabit.server.process.supervisor import Supervisor
from tests.support.server import fake_engine
from tests.support.server.server_fakes import adder, config, identity, serving, write_repository

COMMAND = (sys.executable, "-m", "tests.support.server.fake_engine")
EMPTY = identity("empty", "FP32", (0,))
MODELS = serving(identity("double", "FP32"), identity("slow", "FP32"), EMPTY, adder(version=2), adder())


@dataclass
class FrontEnd:
    """A client with its request memory. Outputs are copied before their lease is left."""

    client: EngineClient
    memory: RequestMemory
    supervisor: Supervisor | None
    clock: Callable[[], float] = time.monotonic

    def request(self, lease: Lease, info: ModelInfo, timeout_s: float | None = None, **arrays: Array) -> Request:
        outputs = tuple(RequestedOutput(tensor.name, {"binary_data": True}) for tensor in info.outputs)
        batch, inputs = len(next(iter(arrays.values()))), inputs_in(lease, arrays)
        return Request(info.key, inputs, batch, outputs, timeout_s=timeout_s, arrived_s=self.clock())

    async def infer(
        self, model: str, timeout_s: float | None = None, version: str | None = None, **arrays: Array
    ) -> dict[str, Array]:
        return dict((await self.result(model, timeout_s, version, **arrays)).outputs)

    async def result(
        self, model: str, timeout_s: float | None = None, version: str | None = None, **arrays: Array
    ) -> Answer:
        info = self.client.catalog.require(model, version)
        with self.memory.lease() as lease:
            answer = await self.client.infer(self.request(lease, info, timeout_s, **arrays), info, lease)
            return replace(answer, outputs={name: array.copy() for name, array in answer.outputs.items()})

    async def all_released(self) -> None:
        """Wait until every block of request memory was released; fails if one never is."""
        async with asyncio.timeout(20):
            while self.memory.used_bytes:  # noqa: ASYNC110 - it changes with the engine's messages
                await asyncio.sleep(0.005)

    async def double(self, *values: float, timeout_s: float | None = None) -> Array:
        return (await self.infer("double", timeout_s, x=rows(*values)))["y"]


def rows(*values: float) -> Array:
    """One row of four elements for each value, which is the first of them."""
    return np.array([[value, 0.5, -1.0, 3.0] for value in values], np.float32)


async def until_entered(count: int = 1) -> None:
    """Wait until so many executions have come to the fake engine's gate."""
    while fake_engine.entered() < count:  # noqa: ASYNC110 - another process makes the files
        await asyncio.sleep(0.005)


def _config(folder: Path) -> ServeConfig:
    repository = folder / "repository"
    write_repository(repository, MODELS)
    return config(repository=repository)


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[FrontEnd]:
    catalog = Catalog()
    engine = fake_engine.make(_config(folder), publish=catalog.update)
    await engine.start()
    memory = RequestMemory(1 << 20)
    client = InProcessEngine(engine, catalog)
    try:
        yield FrontEnd(client, memory, None)
    finally:
        await client.close()
        memory.close()


@asynccontextmanager
async def process(folder: Path, watchdog_s: float = 0.0) -> AsyncIterator[FrontEnd]:
    memory = RequestMemory(1 << 20)
    client = EngineConnection(memory)
    supervisor = Supervisor(client, encode_config(_config(folder)), watchdog_s, COMMAND)
    try:
        await supervisor.start(lambda model, stage: None)
        yield FrontEnd(client, memory, supervisor)
    finally:
        await supervisor.close()
        memory.close()
