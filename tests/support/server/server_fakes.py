"""Servables made of numpy functions, and a server around them in a thread of its own."""

import asyncio
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import uvloop

from cohabit.planner.shapes import Bucket
from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import FixedSize
from cohabit.server.engine.execution import Servable
from cohabit.server.errors import InvalidRequest, RefusalKind, Refused
from cohabit.server.ipc.model import (
    Array,
    DeviceUse,
    GraphCapture,
    Inputs,
    ModelFootprint,
    ModelInfo,
    ModelKey,
    TensorSpec,
)
from cohabit.server.ipc.request import Answer, Timing
from cohabit.server.process.engine import Engine
from cohabit.server.repository.sources import ModelSource

if TYPE_CHECKING:  # the fake engine's processes start without the front end, and without pytest
    from cohabit.server.serve import Server

Function = Callable[..., dict[str, Array]]


@contextmanager
def refused(kind: RefusalKind, match: str | None = None) -> Iterator[None]:
    """Expect a refusal of this kind, as `pytest.raises` expects an exception."""
    import pytest

    with pytest.raises(Refused, match=match) as caught:
        yield
    assert caught.value.kind == kind


@dataclass
class FakeServable:
    info: ModelInfo
    function: Function
    calls: list[int] = field(default_factory=list)
    foreseen: list[int] = field(default_factory=list)
    """Rows that were said to be executed next."""
    predicted_s: Mapping[Bucket, float] = field(default_factory=dict)
    recovery_s: float = 0.0
    lost: str | None = None
    captures: Mapping[Bucket, GraphCapture] = field(
        default_factory=lambda: {Bucket(1): GraphCapture(1, 4096, None)}
    )

    def foresee(self, inputs: Inputs, rows: int) -> None:
        self.foreseen.append(rows)

    def launches_ahead(self, inputs: Inputs, rows: int) -> bool:
        return False

    def begin(self, requests: Sequence[Inputs], rows: int, on_recording: Any = None) -> Answer:
        return self.execute(requests, rows, on_recording)

    def execute(self, requests: Sequence[Inputs], rows: int, on_recording: object = None) -> Answer:
        self.calls.append(rows)
        started_s = time.monotonic()
        outputs = self.function(**(requests[0] if len(requests) == 1 else joined(requests)))
        timing = Timing(compute_s=time.monotonic() - started_s, stall_s=0.25, swapped_bytes=1000)
        return Answer(self.info.key, outputs, timing)


def joined(requests: Sequence[Inputs]) -> Inputs:
    """The inputs of several requests, one behind the other along the batch."""
    return {name: np.concatenate([inputs[name] for inputs in requests]) for name in requests[0]}


def eventually(condition: Callable[[], bool], patience_s: float = 60.0) -> None:
    """Wait for something that will happen; fail if it does not."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.005)


class Gate:
    """A model's execution that waits until the test lets it go."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()

    def __call__(self, x: Array) -> dict[str, Array]:
        self.entered.set()
        assert self.open.wait(20)
        return {"y": x}


def tensors(*specs: tuple[str, str, tuple[int, ...]]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(*spec) for spec in specs)


def identity(name: str, datatype: str, shape: tuple[int, ...] = (4,), max_batch: int = 8) -> FakeServable:
    info = ModelInfo(name, 1, tensors(("x", datatype, shape)), tensors(("y", datatype, shape)), max_batch)
    return FakeServable(info, lambda x: {"y": np.array(x)})


def adder(version: int = 3) -> FakeServable:
    pair = (("a", "FP32", (4,)), ("b", "FP32", (4,)))
    info = ModelInfo("adder", version, tensors(*pair), tensors(("sum", "FP32", (4,)), ("diff", "FP32", (4,))), 8)
    return FakeServable(info, lambda a, b: {"diff": a - b, "sum": a + b})


def fixed() -> FakeServable:
    """A model without a batch dimension."""
    info = ModelInfo("fixed", 1, tensors(("x", "INT32", (2, 3))), tensors(("y", "INT32", (2, 3))))
    return FakeServable(info, lambda x: {"y": x * 2})


def broken() -> FakeServable:
    def fail(x: Array) -> dict[str, Array]:
        if x[0, 0] == 7:
            raise InvalidRequest("row 7 is outside the table")
        raise RuntimeError("the kernel caught fire")

    return FakeServable(identity("broken", "FP32").info, fail)


def image() -> FakeServable:
    """602,112 bytes in, 4,000 out."""
    shape = ((3, 224, 224), (1000,))
    info = ModelInfo(
        "image", 1, tensors(("x", "FP32", shape[0])), tensors(("y", "FP32", shape[1])), max_batch_size=1
    )
    answer = np.zeros((1, 1000), np.float32)
    return FakeServable(info, lambda x: {"y": answer})


def standard_models() -> list[FakeServable]:
    datatypes = ("BOOL", "UINT8", "INT32", "INT64", "UINT64", "FP16", "BF16", "FP64")
    return [
        adder(),
        fixed(),
        broken(),
        image(),
        identity("wide", "FP32", (4096,)),
        *(identity(f"id_{d.lower()}", d) for d in datatypes),
    ]


@dataclass
class PlacedFake:
    """Stands for a `Model` that is loaded."""

    source: ModelSource
    servable: Servable
    footprint: ModelFootprint
    sequences: None = None

    @property
    def lowered(self) -> SimpleNamespace:
        return SimpleNamespace(archive="", manifest=SimpleNamespace(archive=""))

    @property
    def lane(self) -> int:
        return self.footprint.lane

    @property
    def key(self) -> ModelKey:
        return self.source.key


async def nothing() -> None:
    pass


@dataclass
class FakeLoaded:
    """Stands for a `Placement`: what can be served is loaded already."""

    servables: Mapping[ModelKey, Servable]
    failures: Mapping[ModelKey, str] = field(default_factory=dict)
    footprints: Mapping[ModelKey, ModelFootprint] = field(default_factory=dict)
    memory_map: str = ""
    closed: bool = False
    workers: Any = field(default_factory=lambda: SimpleNamespace(inline=True, close=lambda: None))

    @property
    def opened(self) -> Any:
        """What opening the device returns: this placement, and nothing that finds better plans."""
        replanner = SimpleNamespace(measures_again=False, begin=lambda *_, **__: None, close=nothing, watch=nothing)
        return self, replanner

    async def prepare(
        self, sources: Sequence[ModelSource], on_progress: object
    ) -> tuple[list[PlacedFake], dict[ModelKey, str]]:
        models = [
            PlacedFake(source, self.servables[source.key], self.footprints.get(source.key, ModelFootprint()))
            for source in sources
            if source.key in self.servables
        ]
        left_out = {s.key: "the loader left it out" for s in sources if s.key not in self.servables}
        return models, left_out | {key: why for key, why in self.failures.items() if key in left_out}

    async def place(
        self, models: Sequence[PlacedFake], old: None, accept: Any, on_progress: object
    ) -> dict[ModelKey, str]:
        assert old is None
        for model in models:
            await accept(model)
        return {}

    def use(self) -> DeviceUse:
        return DeviceUse(workspace_bytes=100, partition_bytes=700, free_bytes=224, lane_busy_s={"swap_in": 1.5})

    def close(self) -> None:
        self.closed = True


def config(**changes: object) -> ServeConfig:
    defaults: dict[str, object] = {
        "repository": Path("fakes"),
        "memory": FixedSize(1 << 20),
        "http_port": 0,
        "grpc_port": 0,
        "metrics_port": 0,
        "exit_timeout_s": 5.0,
        "engine": "in-process",
    }
    return ServeConfig(**(defaults | changes))  # type: ignore[arg-type]


def write_repository(folder: Path, loaded: FakeLoaded) -> None:
    """Make the folders of a repository all of whose versions are served; the programs are empty files."""
    for key in (*loaded.servables, *loaded.failures):
        program = folder / key.name / str(key.version) / "model.pt2"
        program.parent.mkdir(parents=True)
        program.touch()
        if len(list((folder / key.name).iterdir())) == 2:
            (folder / key.name / "config.pbtxt").write_text("version_policy { all { } }")


@dataclass
class Running:
    """A server, and its engine, in another thread."""

    server: "Server"
    loop: asyncio.AbstractEventLoop
    _stopped: bool | None = None

    @property
    def address(self) -> str:
        return self.server.http_url.removeprefix("http://")

    @property
    def grpc(self) -> str:
        assert self.server.grpc_address is not None
        return self.server.grpc_address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def metrics_port(self) -> int:
        return int(self.server.metrics_url.removesuffix("/metrics").rpartition(":")[2])

    @property
    def engine(self) -> Engine:
        """The engine, which runs in the server's process."""
        assert self.server._local is not None
        return self.server._local

    def stop(self) -> bool:
        """Stop the server; a second call returns what the first one did."""
        if self._stopped is None:
            self._stopped = asyncio.run_coroutine_threadsafe(self.server.stop(), self.loop).result(20)
        return self._stopped


@contextmanager
def running(loaded: FakeLoaded, **changes: object) -> Iterator[Running]:
    from cohabit.server.serve import Server

    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start(repository: Path) -> Server:
        # On a clock by which every reading is later than the text of the metrics is good for.
        clock = itertools.count(step=2.0).__next__
        server = Server(
            config(**({"repository": repository} | changes)), open_placement=lambda *_: loaded.opened, clock=clock
        )
        await server.start()
        await server.load()
        return server

    handle: Running | None = None
    folder = tempfile.TemporaryDirectory()
    write_repository(Path(folder.name), loaded)
    try:
        server = asyncio.run_coroutine_threadsafe(start(Path(folder.name)), loop).result(20)
        handle = Running(server, loop)
        yield handle
    finally:
        if handle is not None:
            handle.stop()
        asyncio.run_coroutine_threadsafe(loop.shutdown_default_executor(), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
        folder.cleanup()


def serving(*servables: FakeServable) -> FakeLoaded:
    return FakeLoaded({s.info.key: s for s in servables})
