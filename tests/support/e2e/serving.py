"""The real server around real models: in this process, to look inside, or as the command, to see it as others do."""

import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar
from unittest.mock import patch

import psutil
import tritonclient.http as triton
import uvloop
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from cohabit.server.config.config import ServeConfig
from cohabit.server.config.sizes import parse_memory
from cohabit.server.deploy import worker
from cohabit.server.deploy.lifecycle import open_placement
from cohabit.server.deploy.place import ModelPlacement
from cohabit.server.deploy.replan import Replanner
from cohabit.server.deploy.worker import WorkerProcesses, _WorkerProcess
from cohabit.server.engine.compute_lane import ComputeLane
from cohabit.server.process.engine import Engine
from cohabit.server.repository.sources import ModelSource
from cohabit.server.serve import Server

READY_S = 600.0
"""Patience with a busy machine; only failures wait for it."""
QUICK_SEARCH = "genetic"
"""The searcher of servers whose tests do not depend on how good plans are; activations have to fit."""

Arrays = Mapping[str, NDArray[Any]]


def eventually(condition: Callable[[], bool], patience_s: float = READY_S) -> None:
    """Wait for something that will happen; fail if it does not."""
    deadline_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.05)


def infer(address: str, model: str, inputs: Arrays, version: str = "") -> dict[str, NDArray[Any]]:
    """Ask through the unchanged tritonclient, and return every output."""
    with triton.InferenceServerClient(address, network_timeout=READY_S) as client:
        result = client.infer(model, [_tensor(name, array) for name, array in inputs.items()], version)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def _tensor(name: str, array: NDArray[Any]) -> triton.InferInput:
    tensor = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def ask(address: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """One JSON request on a connection of its own: status and decoded answer."""
    connection = http.client.HTTPConnection(address, timeout=READY_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body).encode())
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def repository_index(address: str) -> dict[str, dict[str, str]]:
    status, entries = ask(address, "POST", "/v2/repository/index")
    assert status == 200
    return {entry["name"]: entry for entry in entries}


def metric(address: str, name: str, model: str) -> float:
    """A model's value of a metric that has one sample per model."""
    connection = http.client.HTTPConnection(address, timeout=READY_S)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    (line,) = (t for t in text.splitlines() if t.startswith(f'{name}{{model="{model}"'))
    return float(line.rpartition(" ")[2])


class KeptProcesses(WorkerProcesses):
    """Takes over what the servers before have left idle: a new process takes seconds to import torch."""

    kept: ClassVar[list[_WorkerProcess]] = []
    most_kept = 2
    """Of each priority: a process takes over 200 MiB."""
    waiting: ClassVar[Any] = multiprocessing.get_context("spawn").RawArray("b", 16)
    """Which lanes have requests, for all servers: low-priority processes keep the array that they began with."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting = self.waiting
        for lane in range(len(self.waiting)):
            self.waiting[lane] = 0

    def _new_process(self, low_priority: bool, modules: Sequence[str] = ()) -> _WorkerProcess:
        for process in [process for process in self.kept if process.low_priority is low_priority]:
            self.kept.remove(process)
            if process._process.is_alive():
                return process
        return super()._new_process(low_priority, modules)

    def release(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            alike = [kept for kept in self.kept if kept.low_priority is process.low_priority]
            if len(alike) < self.most_kept:
                self.kept.append(process)
            else:
                process.end()


@dataclass(frozen=True)
class Running:
    """A server in this process, with what it has loaded."""

    address: str
    metrics_address: str
    placement: ModelPlacement
    stages: Sequence[tuple[str, str]]
    """Models and what was done for them while loading."""
    engine: Engine
    loop: asyncio.AbstractEventLoop
    grpc_address: str | None = None

    @property
    def replanner(self) -> Replanner:
        assert self.engine.lifecycle.replanner is not None
        return self.engine.lifecycle.replanner

    def on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(600)

    def until_planned(self) -> None:
        """Wait until the searches for better plans have ended, and the plans that they found are in use."""
        eventually(lambda: not self.replanner.is_busy)


@contextmanager
def serving(repository: Path, memory: str, cache: Path, **changes: Any) -> Iterator[Running]:
    """Serve a repository in this process. Raises what loading raises, such as InfeasibleBudget."""
    settings = {
        "http_port": 0,
        "grpc_port": None,
        "metrics_port": 0,
        "exit_timeout_s": 10.0,
        "engine": "in-process",
        "search": QUICK_SEARCH,
    }
    config = ServeConfig(repository, parse_memory(memory), cache=cache, **(settings | changes))
    stages: list[tuple[str, str]] = []
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def on_loop(coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(600)

    async def make() -> Server:
        # On a clock by which every reading is later than the text of the metrics is good for.
        return Server(config, open_placement=opened, clock=itertools.count(step=2.0).__next__)

    placements: list[ModelPlacement] = []

    def opened(
        sources: Sequence[ModelSource], config: ServeConfig, lanes: Sequence[ComputeLane]
    ) -> tuple[ModelPlacement, Replanner]:
        with patch.object(worker, "WorkerProcesses", KeptProcesses):
            placement, replanner = open_placement(sources, config, lanes)
        placements.append(placement)
        return placement, replanner

    server: Server = on_loop(make())
    try:
        on_loop(server.start())
        on_loop(server.load(lambda *stage: stages.append(stage)))
        http_address, metrics_url = (url.removeprefix("http://") for url in (server.http_url, server.metrics_url))
        assert server._local is not None
        metrics_address = metrics_url.removesuffix("/metrics")
        yield Running(
            http_address, metrics_address, placements[0], stages, server._local, loop, server.grpc_address
        )
    finally:
        stopped = on_loop(server.stop())
        on_loop(loop.shutdown_default_executor())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()
    assert stopped


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = (text for text in status.splitlines() if text.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class Process:
    """A server that runs as a process of its own, in a session of its own."""

    popen: subprocess.Popen[str]
    address: str
    metrics_address: str
    log: IO[str]
    grpc_address: str = ""

    def peak_bytes(self) -> int:
        """The most memory that the front end and the engine had, each at once, as the kernel counts it."""
        front_end = psutil.Process(self.popen.pid)
        return sum(_peak_bytes(process.pid) for process in (front_end, *front_end.children()))

    def engine(self) -> psutil.Process:
        children = psutil.Process(self.popen.pid).children()
        (engine,) = (child for child in children if "cohabit.server.process.engine_process" in child.cmdline())
        return engine

    def is_anything_left(self) -> bool:
        """Whether any process of its session lives."""
        try:
            os.killpg(self.popen.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.popen.poll() is None, self.log_text()
            return ask(self.address, "GET", "/v2/health/ready")[0] == 200

        eventually(is_ready)

    def log_text(self) -> str:
        self.log.seek(0)
        return self.log.read()


@contextmanager
def process(
    repository: Path, memory: str, cache: Path, *flags: str, cgroup: Path | None = None
) -> Iterator[Process]:
    """Start `cohabit serve`, perhaps in a cgroup; whatever is left of it in the end is killed."""
    with tempfile.TemporaryFile("w+") as log, _start(repository, memory, cache, flags, log, cgroup) as popen:
        try:
            assert popen.stdout is not None
            addresses = [popen.stdout.readline().strip().partition(": ")[2] for _ in range(3)]
            http, metrics, grpc = (address.removeprefix("http://") for address in addresses)
            yield Process(popen, http, metrics.removesuffix("/metrics"), log, grpc)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)


def refused_start(repository: Path, memory: str, cache: Path, *flags: str) -> tuple[int, str]:
    """Start `cohabit serve` where it cannot work: exit status and what it says on stderr."""
    with tempfile.TemporaryFile("w+") as log, _start(repository, memory, cache, flags, log) as popen:
        try:
            status = popen.wait(READY_S)
        finally:
            popen.kill()
        log.seek(0)
        return status, log.read()


def _start(
    repository: Path,
    memory: str,
    cache: Path,
    flags: Sequence[str],
    log: IO[str],
    cgroup: Path | None = None,
) -> subprocess.Popen[str]:
    entering = [] if cgroup is None else ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh"]
    command = [*entering, sys.executable, "-m", "cohabit.server.cli", "serve", str(repository), "--memory", memory]
    command += ["--cache", str(cache), "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    command += ["--search", QUICK_SEARCH, *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
