"""The server put together: it listens, loads in the background, answers, and drains when it is told to stop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from aiohttp import web

from server.app import make_app, make_metrics_app
from server.config import ServeConfig
from server.control import NoControl
from server.dataplane import DataPlane
from server.engine import Engine
from server.errors import ConfigError, NothingToServe
from server.grpc_server import GrpcServer
from server.model import Device, Footprint, Servable
from server.registry import Registry, State
from server.repository import ModelSource, Unloadable
from server.scheduler import Scheduler
from server.shared_memory import Regions
from server.shared_memory_files import open_region, shared_memory_is_off

_T = TypeVar("_T")
_log = logging.getLogger("cohabit.serve")
_ANSWERS_WRITTEN_S = 2.0
_DEVICE_ENDS_S = 1.0

OnProgress = Callable[[str, str], None]
"""Called by a loader, from its own thread, with a model's name and what is being done for it."""


class Loaded(Protocol):
    """What a loader returns."""

    @property
    def servables(self) -> Mapping[str, Servable]: ...
    @property
    def failures(self) -> Mapping[str, str]: ...
    @property
    def footprints(self) -> Mapping[str, Footprint]: ...
    @property
    def device(self) -> Device | None: ...
    @property
    def memory_map(self) -> str: ...
    def close(self) -> None: ...


Load = Callable[[Sequence[ModelSource], ServeConfig, OnProgress], Loaded]


class LoadCancelled(BaseException):
    """Raised out of `on_progress` when the server stops while it loads; no `except Exception` swallows it."""


class Server:
    """One HTTP port, one metrics port, one engine. All methods belong to the event loop's thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.registry = Registry()
        self.http_url = ""
        self.grpc_address: str | None = None
        self.metrics_url = ""
        self._config = config
        self._engine = Engine(Scheduler(config.queue_limit))
        regions = Regions(open_region if config.takes_client_shm else shared_memory_is_off)
        self.plane = DataPlane(self.registry, self._engine, NoControl(), regions)
        self._runners: list[web.AppRunner] = []
        self._grpc: GrpcServer | None = None
        self._loaded: Loaded | None = None
        self._stopping = False

    async def start(self) -> None:
        """Listen and start the engine. Raises ConfigError if a port cannot be had."""
        self._engine.start()
        app = make_app(self.plane, self._config.max_body_bytes)
        self.http_url = await self._listen(app, self._config.http_port, "--http-port")
        if self._config.grpc_port is not None:
            self._grpc = GrpcServer(self.plane, self._config.max_body_bytes)
            self.grpc_address = await self._grpc.start(self._config.host, self._config.grpc_port)
        metrics = make_metrics_app(self.registry, self._engine)
        url = await self._listen(metrics, self._config.metrics_port, "--metrics-port")
        self.metrics_url = f"{url}/metrics"

    async def load(self, models: Sequence[ModelSource | Unloadable], load: Load, on_progress: OnProgress) -> Loaded:
        """Load in a thread and serve what came of it. Raises NothingToServe if nothing did."""
        sources = [model for model in models if isinstance(model, ModelSource)]
        for model in models:
            match model:
                case ModelSource(name, version, _, config):
                    self.registry.loading(name, version, config)
                case Unloadable(name, reason):
                    self.registry.failed(name, reason)
        self._refuse_unknown_rates({model.name for model in models})

        def progress(model: str, stage: str) -> None:
            if self._stopping:
                raise LoadCancelled
            on_progress(model, stage)

        if sources:
            loaded = await _in_daemon_thread(lambda: load(sources, self._config, progress))
            self._adopt(loaded, sources)
        if self._loaded is None or not self._loaded.servables:
            reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in self.registry)
            raise NothingToServe(f"no model of {self._config.repository} could be loaded: {reasons}")
        return self._loaded

    async def stop(self) -> bool:
        """Answer what is in flight while refusing the rest, then close; False if something had to be abandoned."""
        self._stopping = True
        drained = await self._engine.drain(self._config.exit_timeout_s)
        ended = await self._engine.stop(_DEVICE_ENDS_S)
        if self._grpc is not None:
            await self._grpc.stop(_ANSWERS_WRITTEN_S)
        for runner in self._runners:
            await runner.cleanup()
        if ended and self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        return drained and ended

    def _adopt(self, loaded: Loaded, sources: Sequence[ModelSource]) -> None:
        self._loaded = loaded
        self._engine.use_device(loaded.device)
        for source in sources:
            name = source.name
            if name in loaded.servables:
                servable = loaded.servables[name]
                entry = self.registry.loaded(servable, loaded.footprints.get(name))
                self._engine.add(servable, entry.statistics, source.policy)
            else:
                self.registry.failed(name, loaded.failures.get(name, "the loader left it out"))
        for entry in self.registry:
            if entry.state is State.UNAVAILABLE:
                _log.warning("model not served", extra={"fields": {"model": entry.name, "reason": entry.reason}})

    def _refuse_unknown_rates(self, known: set[str]) -> None:
        for name in self._config.model_rates:
            if name not in known:
                raise ConfigError(f"--model-rate: there is no model '{name}' in {self._config.repository}")

    async def _listen(self, app: web.Application, port: int, flag: str) -> str:
        runner = web.AppRunner(
            app,
            access_log=None,
            auto_decompress=False,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=_ANSWERS_WRITTEN_S,
        )
        await runner.setup()
        self._runners.append(runner)
        try:
            await web.TCPSite(runner, self._config.host, port).start()
        except OSError as error:
            raise ConfigError(f"{flag}: cannot listen on {self._config.host} port {port}: {error}") from error
        host, actual_port = runner.addresses[0][:2]
        return f"http://[{host}]:{actual_port}" if ":" in host else f"http://{host}:{actual_port}"


async def _in_daemon_thread(function: Callable[[], _T]) -> _T:
    """Run a function that may take minutes; unlike a pool's, the thread does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def settle(result: _T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="loader", daemon=True).start()
    return await future
