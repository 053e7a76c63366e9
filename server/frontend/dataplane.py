"""What every protocol asks of the server, in the server's own terms: one object behind all ports."""

import asyncio
from collections.abc import Iterable, Mapping

from server import log
from server.engine.lanes import Lanes
from server.errors import InvalidRequest, ModelNotFound, RequestError, ShuttingDown, Unsupported
from server.models.registry import Entry, Registry, State
from server.observe.settings import LogSettings, TraceControl, log_changes
from server.observe.tracing import Tracer
from server.placement.control import Control
from server.protocol.body_memory import BodyMemory
from server.protocol.descriptions import extensions
from server.protocol.model import ModelInfo
from server.protocol.model_config import ModelConfig, config_of
from server.protocol.request import InferRequest, InferResponse, respond
from server.protocol.shared_memory import Regions

ControlParameters = Mapping[str, bool | int | float | str | bytes]
"""What a client adds to an order to load or unload."""

_QUICK_CLASSIFICATION_BYTES = 64 << 10


class DataPlane:
    """One per server, whatever ports it listens on. Belongs to the event loop's thread."""

    def __init__(
        self,
        registry: Registry,
        lanes: Lanes,
        control: Control,
        regions: Regions,
        bodies: BodyMemory,
        tracer: Tracer | None = None,
    ) -> None:
        self.registry = registry
        self.regions = regions
        self.bodies = bodies
        """What requests of both protocols take until they are in a queue."""
        self.tracer = tracer or Tracer(TraceControl())
        self.log_settings = LogSettings()
        self._lanes = lanes
        self.control = control

    @property
    def traces(self) -> TraceControl:
        return self.tracer.control

    def not_ready(self) -> str | None:
        """Say why the server is not ready, or None if it is."""
        if self._lanes.draining:
            return "the server is shutting down"
        if self._lanes.lost is not None:
            return f"the device is lost: {self._lanes.lost}"
        reason = self.registry.not_ready()
        return None if reason is None else f"the server is not ready; {reason}"

    def is_ready(self, model: str, version: str | None) -> bool:
        if self._lanes.draining:
            return False
        try:
            return self.registry.find(model, version).state is State.READY
        except ModelNotFound:
            return False

    @property
    def extensions(self) -> list[str]:
        return extensions(without=self.regions.refused)

    def index(self, only_ready: bool) -> Iterable[Entry]:
        return [entry for entry in self.registry if entry.state is State.READY or not only_ready]

    def config(self, model: str, version: str | None) -> ModelConfig:
        entry = self.registry.find(model, version)
        return config_of(entry.info, entry.config, entry.require().captures)

    def servable(self, model: str, version: str | None) -> ModelInfo:
        """Find what a request for inference is for, before its tensors are read.

        Raises ShuttingDown, ModelNotFound, ModelNotReady, or QueueFull if it would have no place in the queue.
        """
        if self._lanes.draining:
            raise ShuttingDown
        entry = self.registry.find(model, version)
        info = entry.info
        try:
            self._lanes.require_room(model)
        except RequestError as error:
            entry.statistics.rejected(error)
            raise
        return info

    async def infer(self, request: InferRequest, info: ModelInfo) -> InferResponse:
        """Queue and execute a request. Raises RequestError, with the client's id in front."""
        request = self.tracer.attach(request)
        try:
            outputs = (await self._lanes.infer(request)).outputs
            classified_bytes = 0
            for wanted in request.outputs:
                if wanted.classes:
                    classified_bytes += outputs[wanted.tensor.name].nbytes
            if classified_bytes > _QUICK_CLASSIFICATION_BYTES:
                return await asyncio.to_thread(respond, request, info, outputs)
            return respond(request, info, outputs)
        except RequestError as error:
            self.registry.rejected(request.model, error)
            if request.trace is not None:
                request.trace.error = type(error).__name__
            error.of_request(request.id)
            raise

    async def load(self, model: str, parameters: ControlParameters) -> None:
        """Raises what Control.load does, and Unsupported for files sent along."""
        for key in parameters:
            if key.startswith("file:"):
                raise Unsupported(
                    f"'{key[:80]}': model files are not taken from requests; put them into the repository"
                )
            if key != "config":
                raise InvalidRequest(f"unrecognized parameter for load request: '{key[:80]}'")
        config = parameters.get("config")
        if config is not None and not isinstance(config, str):
            raise InvalidRequest(f"'config' must be a model configuration as a JSON string, got {str(config)[:40]}")
        await self.control.load(model, config)

    async def unload(self, model: str, parameters: ControlParameters) -> None:
        """Raises what Control.unload does."""
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(f"'unload_dependents' must be true or false, got {str(dependents)[:40]}")
        await self.control.unload(model, dependents)

    def change_log(self, changes: Mapping[str, object]) -> None:
        """Change what is logged. Raises InvalidRequest or Unsupported."""
        self.log_settings = log_changes(self.log_settings, changes)
        log.apply(self.log_settings)

    def traced_model(self, model: str) -> str:
        """Return a name whose trace settings may be read or changed. Raises InvalidRequest for an unknown model."""
        try:
            return self.registry.find(model).name
        except ModelNotFound as error:
            raise InvalidRequest(f"trace settings: {error}") from error
