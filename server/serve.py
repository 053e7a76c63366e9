"""The server put together: it listens, loads in the background, answers, and drains when it is told to stop."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from server.config.config import ServeConfig
from server.engine.lanes import Lanes
from server.errors import ConfigError, StartFailed
from server.frontend.dataplane import DataPlane
from server.grpc.port import GrpcServer
from server.http.app import make_app, make_metrics_app
from server.http.connection import Answer
from server.http.port import HttpServer
from server.models.registry import Registry, State
from server.models.repository import ModelSource, Unloadable
from server.observe.access import Access, open_access
from server.observe.machine import Machine
from server.observe.metrics_page import Metrics
from server.observe.settings import TraceControl, TraceSettings
from server.observe.tokens import TokenFiles
from server.observe.trace_file import TraceFile
from server.observe.tracing import Tracer
from server.placement.lifecycle import Lifecycle
from server.placement.polling import Poller
from server.protocol.body_memory import BodyMemory
from server.protocol.model import DeviceUse, Footprint, Servable
from server.protocol.shared_memory import Regions, no_system
from server.protocol.shared_memory_files import open_region

if TYPE_CHECKING:
    from server.placement.device_memory import PlacedModel
    from server.placement.placement import Placement

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
    def memory_map(self) -> str: ...
    @property
    def placement(self) -> "Placement | None":
        """What models can be loaded into later; None where none are."""
        ...

    @property
    def placed_models(self) -> "Mapping[str, PlacedModel]": ...
    def use(self) -> DeviceUse:
        """What the device's memory is used for, and its lanes. Any thread."""
        ...

    def close(self) -> None: ...


Load = Callable[[Sequence[ModelSource], ServeConfig, OnProgress], Loaded]


class LoadCancelled(BaseException):
    """Raised out of `on_progress` when the server stops while it loads; no `except Exception` swallows it."""


class Server:
    """One HTTP port, one metrics port, an engine per compute lane. All methods belong to the event loop's thread."""

    def __init__(self, config: ServeConfig) -> None:
        self.registry = Registry(config.strict_readiness)
        self.http_url = ""
        self.grpc_address: str | None = None
        self.metrics_url = ""
        self._config = config
        bodies = BodyMemory(config.queue_bytes)
        self._lanes = Lanes(
            config.compute_lanes,
            config.queue_limit,
            config.queue_bytes,
            prefetch=config.prefetch,
            receives=lambda: bodies.is_receiving,
        )
        self._lifecycle = Lifecycle(config, self.registry, self._lanes)
        regions = Regions(open_region if config.takes_client_shm else no_system)
        self._trace_file: TraceFile | None = None
        if config.trace_file is not None:
            self._trace_file = TraceFile(config.trace_file, lanes=config.compute_lanes)
        tracer = Tracer(_trace_control(config), self._trace_file)
        self.plane = DataPlane(self.registry, self._lanes, self._lifecycle, regions, bodies, tracer)
        self._http: list[HttpServer] = []
        self._grpc: GrpcServer | None = None
        self._loaded: Loaded | None = None
        self._tokens: TokenFiles | None = None
        self._watching: list[asyncio.Task[None]] = []
        """What looks at files now and then: the repository's, and those of tokens."""
        self._stopping = False

    async def start(self) -> None:
        """Listen and start the engine. Raises ConfigError if a port cannot be had, or a token file not be read."""
        access = open_access(self._config)
        self._tokens = TokenFiles(self._config, access)
        self._watching.append(asyncio.create_task(self._tokens.follow()))
        self._warn_if_open(access)
        self._lanes.start()
        app = make_app(self.plane, self._config.max_body_bytes, access)
        self.http_url = await self._listen(app, self._config.http_port, "--http-port")
        if self._config.grpc_port is not None:
            self._grpc = GrpcServer(self.plane, self._config.max_body_bytes, access, self._config.max_connections)
            self.grpc_address = await self._grpc.start(self._config.host, self._config.grpc_port)
        metrics = Metrics(self.registry, self._lanes, Machine(self._use, access).families)
        url = await self._listen(make_metrics_app(metrics, access), self._config.metrics_port, "--metrics-port")
        self.metrics_url = f"{url}/metrics"

    async def load(self, models: Sequence[ModelSource | Unloadable], load: Load, on_progress: OnProgress) -> Loaded:
        """Load in a thread and serve what came of it. Raises StartFailed if nothing did."""
        self._refuse_unknown({model.name for model in models})
        wanted = [model for model in models if self._is_wanted(model.name)]
        sources = [model for model in wanted if isinstance(model, ModelSource)]
        for model in models:
            self.registry.absent(model.name)
        for model in wanted:
            match model:
                case ModelSource(name, version, _, config):
                    self.registry.loading(name, version, config)
                case Unloadable(name, reason):
                    self.registry.failed(name, reason)

        def progress(model: str, stage: str) -> None:
            if self._stopping:
                raise LoadCancelled
            on_progress(model, stage)

        loaded = await _in_daemon_thread(lambda: load(sources, self._config, progress))
        self._adopt(loaded, sources)
        if self._config.model_control == "poll":
            poller = Poller(self._config.repository, self._lifecycle, self.registry, models)
            self._watching.append(asyncio.create_task(poller.run(self._config.poll_interval_s)))
        failed = [entry for entry in self.registry if entry.state is State.UNAVAILABLE]
        nothing = not loaded.servables and self._config.model_control == "none"
        if nothing or (failed and self._config.exit_on_error):
            reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in failed)
            which = "no model" if nothing else "not every model"
            raise StartFailed(f"{which} of {self._config.repository} could be loaded: {reasons}")
        return loaded

    def prefetch(self, on: bool) -> None:
        """Let the next model's copies begin beside the execution before theirs, or not, from now on."""
        self._lanes.prefetch(on)

    async def reread_tokens(self) -> None:
        """Take the tokens that the token files have now; a file that cannot be used changes nothing."""
        if self._tokens is not None:
            await self._tokens.reread()

    async def stop(self) -> bool:
        """Answer what is in flight while refusing the rest, then close; False if something had to be abandoned."""
        self._stopping = True
        for task in self._watching:
            task.cancel()
        drained = await self._lanes.drain(self._config.exit_timeout_s)
        ended = await self._lanes.stop(_DEVICE_ENDS_S)
        await self._lifecycle.close()
        if self._grpc is not None:
            await self._grpc.stop(_ANSWERS_WRITTEN_S)
        for server in self._http:
            await server.stop()
        if ended and self._loaded is not None:
            self._loaded.close()
            self._loaded = None
        if self._trace_file is not None:
            self._trace_file.close()  # behind the lanes, whose last copies are to be seen in it
            self._trace_file = None
        return drained and ended

    def _adopt(self, loaded: Loaded, sources: Sequence[ModelSource]) -> None:
        self._loaded = loaded
        for source in sources:
            name = source.name
            if name in loaded.servables:
                servable = loaded.servables[name]
                entry = self.registry.loaded(servable, loaded.footprints.get(name))
                self._lanes.add(servable, entry.statistics, source.policy, entry.footprint.lane)
            else:
                self.registry.failed(name, loaded.failures.get(name, "the loader left it out"))
        for entry in self.registry:
            if entry.state is State.UNAVAILABLE:
                _log.warning("model not served", extra={"fields": {"model": entry.name, "reason": entry.reason}})

        if loaded.placement is not None:
            self._lifecycle.open(loaded.placement, loaded.placed_models)

    def _use(self) -> DeviceUse:
        use = DeviceUse() if self._loaded is None else self._loaded.use()
        return replace(use, lane_busy_s={**self._lanes.computed_s, **use.lane_busy_s})

    def _is_wanted(self, model: str) -> bool:
        """Whether a model is loaded at start."""
        wanted = self._config.load_models
        return self._config.model_control != "explicit" or "*" in wanted or model in wanted

    def _refuse_unknown(self, known: set[str]) -> None:
        for flag, names in (("--model-rate", self._config.model_rates), ("--load-model", self._config.load_models)):
            for name in names:
                if name not in known and name != "*":
                    raise ConfigError(f"{flag}: there is no model '{name}' in {self._config.repository}")

    def _warn_if_open(self, access: Access) -> None:
        if not self._config.is_loopback and not access.tokens:
            _log.warning(
                "whoever reaches the ports may use them; give --token-file, and a proxy that speaks TLS",
                extra={"fields": {"host": ", ".join(self._config.hosts)}},
            )

    async def _listen(self, app: Answer, port: int, flag: str) -> str:
        server = HttpServer(app, self._config.max_connections, self._config.max_body_bytes)
        self._http.append(server)
        return await server.start(self._config.host, port, flag)


def _trace_control(config: ServeConfig) -> TraceControl:
    if config.trace_file is None:
        return TraceControl()
    return TraceControl(str(config.trace_file), TraceSettings("TIMESTAMPS", config.trace_rate))


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
