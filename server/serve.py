"""The server: ports, data plane, and a client of the engine."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cohabit.server.background import Background
from cohabit.server.config.config import ServeConfig, encode_config
from cohabit.server.config.machine import resident_bytes
from cohabit.server.frontend.access import Access, TokenFiles, open_access
from cohabit.server.frontend.dataplane import DataPlane
from cohabit.server.frontend.engine_client import EngineClient
from cohabit.server.frontend.listening import TlsFiles
from cohabit.server.frontend.memory import RequestMemory
from cohabit.server.frontend.sites import Sites
from cohabit.server.http.app import make_app, make_metrics_app
from cohabit.server.http.server import HttpServer
from cohabit.server.ipc.catalog import Catalog
from cohabit.server.observe.machine import Machine
from cohabit.server.observe.otlp import OtlpExporter
from cohabit.server.observe.settings import TraceSettings
from cohabit.server.observe.trace_file import TraceFile
from cohabit.server.observe.tracing import Tracer
from cohabit.server.process.engine_connection import EngineConnection
from cohabit.server.process.in_process import InProcessEngine
from cohabit.server.process.supervisor import COMMAND, Supervisor
from cohabit.server.protocol.shared_memory import Regions, no_system, open_region
from cohabit.server.view.live import LiveFeed

if TYPE_CHECKING:
    from cohabit.server.deploy.lifecycle import OpenPlacement
    from cohabit.server.grpc.server import GrpcServer
    from cohabit.server.process.engine import Engine, OnProgress

_log = logging.getLogger("cohabit.serve")
_ANSWERS_WRITTEN_S = 2.0


class Server:
    """One front end with its ports and its engine. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: ServeConfig,
        open_placement: "OpenPlacement | None" = None,
        engine_command: Sequence[str] = COMMAND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`open_placement` opens the device of an engine in this process, `engine_command` starts one in another.

        `clock` measures the age of the metrics' text, and the duration of requests.
        """
        self._engine_command = engine_command
        self._clock = clock
        self.http_url = ""
        self.grpc_address: str | None = None
        self.metrics_url = ""
        self._config = config
        self._memory = RequestMemory(config.queue_bytes)
        self._local: Engine | None = None
        self.supervisor: Supervisor | None = None
        self.client = self._make_client(open_placement)
        self._trace_file: TraceFile | None = None
        self._exporter: OtlpExporter | None = None
        self._access = open_access(config)
        self.tokens = TokenFiles(config, self._access)
        self._make_plane()
        self._ports: list[HttpServer] = []
        self._grpc: GrpcServer | None = None
        self._background = Background()

    def _make_client(self, open_placement: "OpenPlacement | None") -> EngineClient:
        config = self._config
        if config.engine == "process" and open_placement is None:
            return EngineConnection(self._memory, config.strict_readiness)
        from cohabit.server.deploy import lifecycle
        from cohabit.server.process.engine import Engine

        catalog = Catalog(config.strict_readiness)
        opened = open_placement or lifecycle.open_placement
        self._local = Engine(config, catalog.update, open_placement=opened)
        return InProcessEngine(self._local, catalog)

    def _make_plane(self) -> None:
        config = self._config
        if config.trace_file is not None:
            self._trace_file = TraceFile(config.trace_file, lanes=config.compute_lanes)
        if config.collector is not None:
            self._exporter = OtlpExporter(config.collector)
        path = "" if self._trace_file is None else str(config.trace_file)
        traced = TraceSettings(path, config.collector or "", config.trace_rate)
        opened = partial(open_region, any_user=config.client_shm == "any-user")
        regions = Regions(opened if config.takes_client_shm else no_system)
        tracer = Tracer(traced, self._trace_file, self._exporter)
        machine = Machine(self._access.refused)
        self.plane = DataPlane(config, self.client, self._memory, regions, tracer, machine, self._clock)
        self._feed: LiveFeed | None = None
        if config.ui == "on":
            self._feed = LiveFeed(config, self.plane.ensembles, tracer, self.plane.is_draining)
            self.plane.on_answer = self._feed.answered
            self.plane.on_token = self._feed.generated

    async def start(self) -> None:
        """Listen on every port. Raises ConfigError if a port or a file cannot be opened."""
        config, access = self._config, self._access
        self._warn_if_open(access)
        self._background.keep("watching token files", self.tokens.watch)
        tls = None
        if config.tls_cert is not None and config.tls_key is not None:
            tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca)
        unix, limit = config.unix_folder, config.max_connections
        app = make_app(self.plane, config.max_body_bytes, access, self._feed, Sites.of(config))
        http = HttpServer(app, max_connections=limit, tls=tls)
        self._ports.append(http)
        self.http_url = await http.start(
            config.addresses, config.http_port, None if unix is None else unix / "http.sock", "--http-port"
        )
        if config.grpc_port is not None:
            from cohabit.server.grpc.server import GrpcServer  # 13 MiB, which a server without the port saves

            self._grpc = GrpcServer(
                self.plane,
                access,
                max_body_bytes=config.max_body_bytes,
                max_connections=limit,
                tls=tls,
            )
            self.grpc_address = await self._grpc.start(
                config.addresses, config.grpc_port, None if unix is None else unix / "grpc.sock"
            )
        if config.metrics_port is not None:
            metrics = HttpServer(make_metrics_app(self.plane, access), max_connections=limit, tls=tls)
            self._ports.append(metrics)
            url = await metrics.start(config.addresses, config.metrics_port, None, "--metrics-port")
            self.metrics_url = f"{url}/metrics"

    async def load(self, on_progress: "OnProgress" = lambda model, stage: None) -> str:
        """Start the engine and load the repository; returns the memory map.

        Raises RepositoryError, ConfigError, InfeasibleBudget, or StartFailed if no model could be loaded.
        """
        if self._local is not None:
            return await self._local.start(on_progress)
        assert isinstance(self.client, EngineConnection)
        # Restarts of the engine get the same figure, because the same models must fit.
        encoded = encode_config(replace(self._config, frontend_bytes=resident_bytes()))
        self.supervisor = Supervisor(self.client, encoded, self._config.watchdog_s, self._engine_command)
        return await self.supervisor.start(on_progress)

    async def failed(self) -> None:
        """Wait until the engine is no longer supervised and the server must end. Otherwise never returns."""
        await (asyncio.Event() if self.supervisor is None else self.supervisor.failed).wait()

    async def stop(self) -> bool:
        """Answer the requests in flight, refuse new ones, and close. Returns False if anything was abandoned."""
        await self._background.close()
        drained = await self.plane.drain(self._config.exit_timeout_s)
        ended = await (self.client if self.supervisor is None else self.supervisor).close()
        if self._grpc is not None:
            await self._grpc.stop(_ANSWERS_WRITTEN_S)
        for port in self._ports:
            await port.stop(_ANSWERS_WRITTEN_S)
        if self._trace_file is not None:
            self._trace_file.close()  # after the engine, because its last spans are written too
            self._trace_file = None
        if self._exporter is not None:
            await asyncio.to_thread(self._exporter.close)
        self._memory.close()
        return drained and ended

    def _warn_if_open(self, access: Access) -> None:
        if not self._config.is_loopback and not access.tokens:
            _log.warning(
                "every client that reaches the ports may use them; consider --token-file and --tls-cert",
                extra={"fields": {"hosts": ", ".join(self._config.addresses)}},
            )
