"""Data plane: the server's operations, independent of the protocol and shared by all ports."""

import asyncio
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from cohabit.server import log
from cohabit.server.config.config import ServeConfig
from cohabit.server.errors import (
    RETRY_S,
    InvalidRequest,
    LevelFull,
    ModelNotFound,
    QueueFull,
    Refused,
    RequestError,
    model_not_ready,
    shutting_down,
)
from cohabit.server.frontend.engine_client import EngineClient, infer_or_succeed, successor_of
from cohabit.server.frontend.ensembles import Ensembles
from cohabit.server.frontend.memory import Lease, RequestMemory, inputs_in
from cohabit.server.frontend.threads import call
from cohabit.server.frontend.tokenizer_entries import TokenizerEntries
from cohabit.server.frontend.tokenizers import Tokenizers
from cohabit.server.ipc.model import ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Request, SequenceId
from cohabit.server.ipc.statistics import INVALID, EngineReport
from cohabit.server.observe.machine import Machine
from cohabit.server.observe.metrics import FrontendTimes, metrics_page
from cohabit.server.observe.settings import LogSettings, log_changes
from cohabit.server.observe.tracing import Tracer
from cohabit.server.protocol import descriptions
from cohabit.server.protocol.shared_memory import Regions
from cohabit.server.triton.config_fields import pooling_of
from cohabit.server.triton.model_config import ModelConfig, config_of

_P = ParamSpec("_P")
_T = TypeVar("_T")

ControlParameters = Mapping[str, bool | int | float | str | bytes]
"""Parameters of a client's load or unload call."""

_MOST_CONTROL_PARAMETERS = 64
MOST_JSON_BYTES = 8 << 20
"""Maximum size of the description of a request and its tensors: JSON, or a gRPC message without raw contents.

Parsers hold the GIL throughout: 5 ms per MiB.
"""
_METRICS_S = 1.0
"""Seconds for which the text of the metrics is reused."""
_REPEATED_READING_S = 0.1
"""Delay in seconds for every reader of the same text after the first."""
_MOST_DELAYED_READERS = 16


class DataPlane:
    """One per front end. Event loop's thread only."""

    def __init__(
        self,
        config: ServeConfig,
        client: EngineClient,
        memory: RequestMemory,
        regions: Regions,
        tracer: Tracer | None = None,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.memory = memory
        self.regions = regions
        self.tokenizers = Tokenizers(config.repository)
        self.repository = config.repository
        self.tracer = tracer or Tracer()
        self.log_settings = LogSettings()
        self._config = config
        self._client = client
        self.ensembles = Ensembles(client, TokenizerEntries(self.tokenizers, self.decode))
        self._machine = machine
        self._clock = clock
        self._times: defaultdict[ModelKey, FrontendTimes] = defaultdict(FrontendTimes)
        self.on_answer: Callable[[ModelKey, float], None] = lambda model, latency_s: None
        """Receives the latency of every answered request."""
        self.on_token: Callable[[float, bool], None] = lambda waited_s, first: None
        """Receives each token's waiting time in seconds, and whether it is the first of its text."""
        self._metrics = b""
        self._metrics_s = -math.inf
        """Time at which `_metrics` was written."""
        self._writing_metrics = asyncio.Lock()
        self._delayed_readers = 0
        self._under_way: dict[ModelKey, int] = {}
        """Unanswered requests by model."""
        self._full: dict[ModelKey, QueueFull] = {}
        """Last QueueFull by model, until that model answers again."""
        self._texts = 0
        """Number of texts under way."""
        self._draining = False
        self._answered = asyncio.Event()
        self._decoding = asyncio.Lock()
        self.max_json_bytes = MOST_JSON_BYTES
        """Limit of a request's description, as `MOST_JSON_BYTES`; the raw contents of its tensors may be larger."""

    def server_metadata(self) -> dict[str, Any]:
        return descriptions.server_metadata(self.regions.refused)

    def not_ready(self) -> str | None:
        """Return why the server is not ready, or None."""
        if self._draining:
            return "the server is shutting down"
        reason = self._client.catalog.not_ready() or self._client.unavailable
        return None if reason is None else f"the server is not ready; {reason}"

    def is_ready(self, model: str, version: str | None) -> bool:
        if self._draining or self._client.unavailable:
            return False
        try:
            return self._client.catalog.find(model, version).is_ready
        except ModelNotFound:
            return False

    def describe(self, model: str, version: str | None = None) -> ModelInfo:
        """Return the description of a version, or of the highest READY one.

        Raises ModelNotFound, or Refused while it loads.
        """
        if (reason := self._client.unavailable) is not None and not self._client.catalog.versions(model):
            raise model_not_ready(model, reason)  # the engine has not read the repository yet
        return self._client.catalog.require(model, version)

    def ready_infos(self) -> list[ModelInfo]:
        """Return the descriptions of all READY versions, ascending."""
        return [entry.info for entry in self._client.catalog if entry.info is not None]

    def pooling(self, info: ModelInfo) -> str:
        """Return how the states of a text's tokens become its embedding, one of POOLINGS."""
        entry = self._client.catalog.get(*info.key)
        config = None if entry is None or entry.config is None else ModelConfig.FromString(entry.config)
        return pooling_of(config)

    def metadata(self, model: str, version: str | None) -> dict[str, Any]:
        """Return a model's metadata, with all READY versions. Raises as `describe` does."""
        info = self.describe(model, version)
        return descriptions.model_metadata(info, [entry.key.version for entry in self._client.catalog.ready(model)])

    def require_ready(self, model: str, version: str | None = None, request_id: str | None = None) -> ModelInfo:
        """Return a request's model, before its tensors are read.

        Raises Refused, ModelNotFound, or QueueFull. The queue counts as full once the requests under way fill both the
        queue and one execution. After the engine has refused a request for a full queue, requests are let through one
        at a time until the model answers again. This keeps most of an overload away from the engine.
        """
        self._refuse_if_draining()
        info = self.describe(model, version)
        queue_limit = self._config.queue_limit
        most = 1 if info.key in self._full else queue_limit + max(info.max_batch_size, 1)
        if self._under_way.get(info.key, 0) >= most:
            self._count_rejection(info.key, "queue_full")
            full = self._full.get(info.key) or QueueFull.of_model(model, queue_limit, RETRY_S)
            error = QueueFull(str(full), full.retry_after_s)
            error.of_request(request_id)
            raise error
        return info

    async def index(self, only_ready: bool) -> list[dict[str, str]]:
        """Return the repository index. With explicit control, it includes folders added since the start."""
        index = descriptions.repository_index(e for e in self._client.catalog if e.is_ready or not only_ready)
        if only_ready or self._config.model_control != "explicit":
            return index
        listed = {entry["name"] for entry in index}
        folders = await asyncio.to_thread(_folders, self._config.repository)
        return index + [{"name": name} for name in folders if name not in listed]

    async def config(self, model: str, version: str | None) -> ModelConfig:
        info = self._client.catalog.require(model, version)
        entry = self._client.catalog.find(model, version)
        report = (await self._client.report(info.key)).models.get(info.key)
        given = None if entry.config is None else ModelConfig.FromString(entry.config)
        return config_of(info, given, None if report is None else report.captures, self._config.device)

    async def statistics(self, model: str | None, version: str | None) -> dict[str, Any]:
        """Return the counters of all models, of one, or of one version, as Triton's JSON. Raises Refused if none."""
        entries = self._client.catalog.ready(model, version)
        if model is None or any(entry.key in self.ensembles for entry in entries):
            return descriptions.statistics(entries, (await self.report()).models)
        reports = [await self._client.report(entry.key) for entry in entries]
        counted = {key: counters for report in reports for key, counters in report.models.items()}
        return descriptions.statistics(entries, counted)

    async def report(self) -> EngineReport:
        """Return the engine's counters, and those of ensembles and tokenizers, which the front end counts."""
        return self.ensembles.added_to(await self._client.report())

    async def metrics(self) -> bytes:
        """Return all metrics in Prometheus' text format. Readers within a second get the same text after a delay.

        So scrapers in a loop leave the event loop to inference. The number of delayed readers is limited, because each
        keeps a connection. Further ones are answered at once.
        """
        async with self._writing_metrics:
            is_new = self._clock() - self._metrics_s >= _METRICS_S
            if is_new:
                report = await self.report()
                self._metrics_s = self._clock()
                self._metrics = await asyncio.to_thread(
                    metrics_page,
                    list(self._client.catalog),
                    report,
                    dict(self._times),
                    self._machine,
                    self._client.restarts,
                    self.memory.used_bytes,
                )
            text = self._metrics
        if not is_new and self._delayed_readers < _MOST_DELAYED_READERS:
            self._delayed_readers += 1
            try:
                await asyncio.sleep(_REPEATED_READING_S)
            finally:
                self._delayed_readers -= 1
        return text

    @contextmanager
    def answering(self, model: ModelKey) -> Iterator[None]:
        """Measure a request's latency: from its arrival, the start of this block, to its answer, the end."""
        arrived_s = self._clock()
        yield
        latency_s = self._clock() - arrived_s
        self._times[model].answer.add(latency_s)
        self.on_answer(model, latency_s)

    def generated(self, model: ModelKey, seconds: float, *, first: bool) -> None:
        """Measure a token's waiting time: since the prompt for the first one, else since the previous one."""
        times = self._times[model]
        (times.first_token if first else times.later_token).add(seconds)
        self.on_token(seconds, first)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count a text generated in this block: draining waits for it."""
        self._texts += 1
        try:
            yield
        finally:
            self._texts -= 1
            self._answered.set()

    @contextmanager
    def fitting(self, model: ModelKey) -> Iterator[None]:
        """Count a request that is refused in this block because it does not fit its model."""
        try:
            yield
        except InvalidRequest:
            self._count_rejection(model, INVALID)
            raise

    async def decode(self, slow: bool, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a decoder. Slow ones run on a thread, one at a time, so that their memory does not add up."""
        if not slow:
            return await call(False, function, *args, **kwargs)
        async with self._decoding:
            return await call(True, function, *args, **kwargs)

    async def infer(self, request: Request, info: ModelInfo, lease: Lease, version: str | None = None) -> Answer:
        """Execute a request. `version` is the one that the client named, or None.

        Copies input arrays into leased memory, unless they are there already. The answer's arrays are valid until the
        lease is left. Raises RequestError, prefixed with the client's request id.
        """
        on_spans = self.tracer.attach(request)
        model, full = request.model, None
        self._under_way[model] = self._under_way.get(model, 0) + 1
        try:
            request = replace(request, inputs=inputs_in(lease, request.inputs), arrived_s=time.monotonic())
            if not info.has_program:
                return await self.ensembles.infer(request, info, lease, on_spans)
            answer = await infer_or_succeed(self._client, request, info, lease, version, on_spans)
            self.tracer.executed(answer.timing)
            return answer
        except RequestError as error:
            if isinstance(error, QueueFull) and not isinstance(error, LevelFull):
                full = QueueFull(str(error), error.retry_after_s)
            self.tracer.failed(error)
            error.of_request(request.id)
            raise
        finally:
            self._under_way[model] -= 1
            if not self._under_way[model]:
                del self._under_way[model]  # models come and go
            self._answered.set()
            if full is None:
                self._full.pop(model, None)
            else:
                self._full[model] = full

    def successor(self, info: ModelInfo, version: str | None = None) -> ModelInfo | None:
        """Return the current load of `version`, or of the highest READY version if None, in place of another version.

        None if it takes other tensors. Raises as `Catalog.require` does.
        """
        return successor_of(self._client.catalog, info, version)

    def archive_of(self, model: ModelKey) -> str | None:
        """Return the fingerprint of a version's archive; None if the version is not served."""
        entry = self._client.catalog.get(*model)
        return None if entry is None or entry.info is None else entry.archive

    def end_sequence(self, model: ModelKey, sequence: SequenceId, *, spare: bool = False) -> None:
        """Forget a sequence that has no further requests; a `spare` one only once its memory is needed."""
        self._client.end_sequence(model, sequence, spare=spare)

    async def load(self, model: str, parameters: ControlParameters) -> None:
        """Load a model. Raises LoadFailed, InvalidRequest, or Refused (also for model files in the parameters)."""
        if len(parameters) > _MOST_CONTROL_PARAMETERS:
            raise InvalidRequest(
                f"the load request has {len(parameters)} parameters; the limit is {_MOST_CONTROL_PARAMETERS}"
            )
        for key in parameters:
            if key.startswith("file:"):
                raise Refused(
                    "Unsupported",
                    f"'{key[:80]}': load requests cannot contain model files; put them into the repository",
                )
            if key != "config":
                raise InvalidRequest(f"unrecognized parameter for load request: '{key[:80]}'")
        config = parameters.get("config")
        if config is not None and not isinstance(config, str):
            raise InvalidRequest(f"'config' must be a model configuration as a JSON string, got {str(config)[:40]}")
        self._refuse_if_draining()
        await self._client.load(model, config)

    async def unload(self, model: str, parameters: ControlParameters) -> None:
        """Unload a model; with `unload_dependents`, also the steps of an ensemble that no other ensemble has.

        Raises InvalidRequest or Refused.
        """
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidRequest(f"'unload_dependents' must be true or false, got {str(dependents)[:40]}")
        self._refuse_if_draining()
        steps = self.ensembles.own_steps(model) if dependents else []
        for name in (model, *steps):
            await self._client.unload(name)

    def change_log(self, changes: Mapping[str, object]) -> None:
        """Change the log settings of the front end and the engine. Raises InvalidRequest or Refused."""
        self.log_settings = log_changes(self.log_settings, changes)
        log.apply(self.log_settings)
        self._client.change_log(self.log_settings)

    def trace_settings(self, model: str | None, changes: Iterable[str]) -> dict[str, str | list[str]]:
        """Return the trace settings, which are the same for every model.

        Raises InvalidRequest for an unknown model, and Refused for changes.
        """
        try:
            if model:
                self._client.catalog.find(model)
        except ModelNotFound as error:
            raise InvalidRequest(f"trace settings: {error}") from error
        if changed := ", ".join(changes):
            raise Refused(
                "Unsupported",
                f"trace settings cannot be changed while the server runs ({changed[:200]});"
                " start it with --trace-config file=FILE --trace-config rate=N",
            )
        return self.tracer.settings.to_wire()

    def is_draining(self) -> bool:
        """Whether new requests are refused because the server is ending."""
        return self._draining

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait until the others are answered; False after a timeout."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                while self._is_answering:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            return not self._is_answering
        return True

    @property
    def _is_answering(self) -> bool:
        return self._texts > 0 or any(self._under_way.values())

    def _count_rejection(self, model: ModelKey, reason: str) -> None:
        if model in self.ensembles:
            self.ensembles.count_rejection(model, reason)
        else:
            self._client.count_rejection(model, reason)

    def _refuse_if_draining(self) -> None:
        if self._draining:
            raise shutting_down()


def _folders(repository: Path) -> list[str]:
    """Return the names of a repository's models; none if it is unreadable. Bytes that are not text are escaped."""
    try:
        found = [e.name for e in repository.iterdir() if e.is_dir() and not e.name.startswith(".")]
        return sorted(os.fsencode(name).decode(errors="backslashreplace") for name in found)
    except OSError:
        return []
