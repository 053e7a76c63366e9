"""Executes ensembles: each step is a request to the engine, and its outputs are inputs of later ones where they lie.

A step's outputs are in a lease of its own, in the memory that the engine has mapped; messages name them by their
offsets. The lease ends with the last step that reads it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from cohabit.server.errors import (
    ModelNotFound,
    Overloaded,
    Refused,
    RequestError,
    RequestTimedOut,
)
from cohabit.server.frontend.engine_client import EngineClient, infer_or_succeed
from cohabit.server.frontend.memory import Lease, inputs_in
from cohabit.server.ipc.model import ENSEMBLE, Array, ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Parameters, Request, RequestedOutput, Timing
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import REJECTIONS, EngineReport, FailureReason, ModelCounters, ModelStatistics
from cohabit.server.observe.request_trace import CURRENT
from cohabit.server.protocol.matching import InputBody, RequestBody, fit
from cohabit.server.protocol.shared_memory import Regions, RegionUse, no_system
from cohabit.server.triton.ensembles import EnsembleStep, steps_of
from cohabit.server.triton.model_config import ModelConfig

_BINARY: Parameters = {"binary_data": True}
_FAILURES: Mapping[str, FailureReason] = {
    "RequestTimedOut": "REJECTED",
    "ExecutionFailed": "BACKEND",
    "EngineFailed": "BACKEND",
}
"""Reasons of failures, by `RequestError.kind`; those of others are OTHER."""
_NO_REGIONS = RegionUse(Regions(no_system))
"""Steps read and write no shared memory of clients."""


class Ensembles:
    """The ensembles of a front end, with their counters. Event loop's thread only."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._steps: dict[ModelKey, tuple[bytes, tuple[EnsembleStep, ...]]] = {}
        """Steps of each ensemble, and the configuration that they were read from."""
        self._statistics: dict[ModelKey, ModelStatistics] = {}

    def __contains__(self, model: ModelKey) -> bool:
        entry = self.client.catalog.get(*model)
        return entry is not None and entry.info is not None and entry.info.platform == ENSEMBLE

    def steps(self, model: ModelKey) -> tuple[EnsembleStep, ...]:
        """Return an ensemble's steps, in an executable order. Raises ModelNotFound if it is no longer served."""
        entry = self.client.catalog.get(*model)
        if entry is None or entry.info is None or entry.config is None:
            raise ModelNotFound(*model, reason="unloaded" if entry is None else entry.reason)
        read, steps = self._steps.get(model, (b"", ()))
        if read != entry.config:
            steps = steps_of(model.name, ModelConfig.FromString(entry.config))
            self._steps[model] = entry.config, steps
        return steps

    def own_steps(self, name: str) -> list[str]:
        """Return the models that are steps of this ensemble's READY versions, and of no other READY ensemble."""
        models = {
            entry.name: {step.model for step in self.steps(entry.key)}
            for entry in self.client.catalog
            if entry.is_ready and entry.key in self
        }
        others = {step for ensemble, steps in models.items() if ensemble != name for step in steps}
        return sorted(models.get(name, set()) - others)

    async def infer(self, request: Request, info: ModelInfo, lease: Lease, on_spans: OnSpans | None) -> Answer:
        """Execute a request whose inputs are in leased memory. The answer's arrays are valid as long as the lease.

        Its timing is the sum of its steps' timings. Raises RequestError, which names the step.
        """
        statistics, began_s = self._counted(request.model), time.monotonic()
        try:
            answer = await EnsembleRun(self, request, info, lease, on_spans).answer()
        except asyncio.CancelledError:
            statistics.cancelled()
            raise
        except RequestError as error:
            if (reason := REJECTIONS.get(error.kind)) is not None:
                statistics.rejected(reason)
            if not isinstance(error, Overloaded):
                statistics.failed(_FAILURES.get(error.kind, "OTHER"), time.monotonic() - began_s)
            raise
        statistics.executed([answer.timing], time.time())
        return answer

    def count_rejection(self, model: ModelKey, reason: str) -> None:
        self._counted(model).rejected(reason)

    def added_to(self, report: EngineReport) -> EngineReport:
        """Return the engine's report with the counters of the READY ensembles."""
        keys = [entry.key for entry in self.client.catalog if entry.is_ready and entry.key in self]
        if not keys:
            return report
        self._statistics = {key: self._counted(key) for key in keys}
        own = {key: ModelCounters(statistics) for key, statistics in self._statistics.items()}
        return EngineReport(report.models | own, report.device)

    def _counted(self, model: ModelKey) -> ModelStatistics:
        return self._statistics.setdefault(model, ModelStatistics())


class EnsembleRun:
    """One request of an ensemble."""

    def __init__(
        self,
        ensembles: Ensembles,
        request: Request,
        info: ModelInfo,
        lease: Lease,
        on_spans: OnSpans | None,
    ) -> None:
        """Raises ModelNotFound if the ensemble is no longer served."""
        steps = ensembles.steps(request.model)
        self._ensembles = ensembles
        self._request = request
        self._steps = steps
        self._lease = lease
        self._on_spans = on_spans
        self._writers = {tensor: step.number for step in steps for tensor in step.outputs.values()}
        self._leases = {step.number: lease.memory.lease() for step in steps}
        """Leases of the steps' outputs, by the number of the step."""
        self._held = set(self._leases)
        """Those among them that this run holds; the others last as long as a reader keeps them."""
        self._tensors = dict(request.inputs)
        """The ensemble's tensors that exist and will be read."""
        self._datatypes = {tensor.name: tensor.datatype for tensor in info.inputs}
        self._readers = Counter(tensor for step in steps for tensor in set(step.inputs.values()))
        """Number of steps that will read a tensor, and one more if it is in the answer."""
        self._readers.update(output.name for output in request.outputs)
        self._timings: list[Timing] = []

    async def answer(self) -> Answer:
        """Execute the steps, each as soon as its inputs exist."""
        answered = {self._writers[output.name] for output in self._request.outputs}
        tasks: dict[int, asyncio.Task[None]] = {}
        try:
            infos = [self._model_of(step) for step in self._steps]  # the versions that this request runs on
            for step in self._steps:
                for source in self._sources(step):
                    self._leases[step.number].keep(source)
            async with asyncio.TaskGroup() as group:
                for step, info in zip(self._steps, infos, strict=True):
                    before = [tasks[number] for number in self._before(step)]
                    work = self._execute(step, info, before, is_answer=step.number in answered)
                    tasks[step.number] = group.create_task(work)
            for number in answered:
                self._lease.keep(self._leases[number])
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for number in self._held:
                self._leases[number].release()
        outputs = {output.name: self._tensors[output.name] for output in self._request.outputs}
        return Answer(self._request.model, outputs, self._timing())

    def _before(self, step: EnsembleStep) -> set[int]:
        """Return the steps whose outputs a step reads, by number."""
        return {self._writers[tensor] for tensor in step.inputs.values() if tensor in self._writers}

    def _sources(self, step: EnsembleStep) -> list[Lease]:
        """Return the leases of a step's inputs."""
        return [self._lease, *(self._leases[number] for number in self._before(step))]

    def _model_of(self, step: EnsembleStep) -> ModelInfo:
        try:
            return self._ensembles.client.catalog.require(step.model, step.version)
        except RequestError as error:
            raise self._named(step, error) from error

    async def _execute(
        self, step: EnsembleStep, info: ModelInfo, before: Sequence[asyncio.Task[None]], *, is_answer: bool
    ) -> None:
        for task in before:
            await task
        lease, sources = self._leases[step.number], self._sources(step)
        try:
            request = self._request_of(step, info)
            if info.platform == ENSEMBLE:
                answer = await self._ensembles.infer(request, info, lease, self._on_spans)
            else:
                client = self._ensembles.client
                answer = await infer_or_succeed(client, request, info, lease, step.version, self._on_spans)
                if (trace := CURRENT.get()) is not None:
                    trace.steps.append((step.model, answer.timing))
        except RequestError as error:
            raise self._named(step, error) from error
        for source in sources:
            lease.drop(source)
        self._timings.append(answer.timing)
        for tensor in set(step.inputs.values()):
            self._readers[tensor] -= 1
            if not self._readers[tensor]:
                del self._tensors[tensor]
        for output in info.outputs:
            tensor = step.outputs.get(output.name, "")
            if self._readers[tensor]:
                self._tensors[tensor], self._datatypes[tensor] = answer.outputs[output.name], output.datatype
        if not is_answer:
            self._held.remove(step.number)
            lease.release()

    def _request_of(self, step: EnsembleStep, info: ModelInfo) -> Request:
        """Match the tensors with the step's model, as a client's. Raises RequestError."""
        now_s, left_s = time.monotonic(), self._request.timeout_s
        if left_s is not None and self._request.arrived_s is not None:
            left_s -= now_s - self._request.arrived_s
            if left_s <= 0:
                raise RequestTimedOut(step.model, self._request.timeout_s or 0.0)
        inputs: dict[str, Array] = {own: self._tensors[tensor] for own, tensor in step.inputs.items()}
        bodies = [
            InputBody(own, self._datatypes[tensor], list(inputs[own].shape)) for own, tensor in step.inputs.items()
        ]
        read = [own for own, tensor in step.outputs.items() if self._readers[tensor]] or list(step.outputs)
        message = RequestBody(bodies, self._request.id or "", [RequestedOutput(own, _BINARY) for own in read])

        def array_of(body: InputBody[list[int]]) -> Array:
            return inputs[body.name]

        matched = fit(message, info, _NO_REGIONS, array_of, binary=True)
        defaults = {own: array for own, array in matched.inputs.items() if own not in inputs}
        return replace(
            matched,
            inputs=inputs | inputs_in(self._leases[step.number], defaults),
            priority=self._request.priority,
            timeout_s=left_s,
            arrived_s=now_s,
        )

    def _named(self, step: EnsembleStep, error: RequestError) -> RequestError:
        """Name the step in an error. Without its model, the ensemble is known, but not ready."""
        if isinstance(error, ModelNotFound):
            error = Refused("ModelNotReady", str(error))
        error.args = (f"ensemble '{self._request.model.name}', {step}: {error}",)
        return error

    def _timing(self) -> Timing:
        """Return the sums of the steps' times."""
        timings = self._timings
        queued_s = min(timing.queued_s for timing in timings)
        return Timing(
            queued_s=queued_s,
            started_s=queued_s + sum(timing.started_s - timing.queued_s for timing in timings),
            busy_s=sum(timing.busy_s for timing in timings),
            compute_s=sum(timing.compute_s for timing in timings),
            stall_s=sum(timing.stall_s for timing in timings),
            output_s=sum(timing.output_s for timing in timings),
            swapped_bytes=sum(timing.swapped_bytes for timing in timings),
            rows=self._request.batch,
        )
