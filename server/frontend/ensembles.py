"""Executes ensembles: each step is a request to the engine, and its outputs are inputs of later ones where they lie.

A step's outputs are in a lease of its own, in the memory that the engine has mapped; messages name them by their
offsets. The lease ends with the last step that reads it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

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
from cohabit.server.frontend.tokenizer_entries import NO_LENGTHS, Lengths, TokenizerEntries
from cohabit.server.ipc.model import ENSEMBLE, TOKENIZER_BACKEND, Array, ModelInfo, ModelKey
from cohabit.server.ipc.request import Answer, Parameters, Request, RequestedOutput, Timing
from cohabit.server.ipc.spans import OnSpans
from cohabit.server.ipc.statistics import REJECTIONS, EngineReport, FailureReason, ModelCounters, ModelStatistics
from cohabit.server.observe.request_trace import CURRENT
from cohabit.server.protocol.embedding import lengths_of
from cohabit.server.protocol.matching import InputBody, RequestBody, fit
from cohabit.server.protocol.shared_memory import Regions, RegionUse, no_system
from cohabit.server.triton.config_fields import truncates
from cohabit.server.triton.ensembles import EnsembleStep, steps_of
from cohabit.server.triton.model_config import ModelConfig

_BINARY: Parameters = {"binary_data": True}
_FAILURES: Mapping[str, FailureReason] = {
    "RequestTimedOut": "REJECTED",
    "ExecutionFailed": "BACKEND",
    "EngineFailed": "BACKEND",
}
"""Reasons of failures, by `RequestError.kind`; those of others are OTHER."""
_NEWEST = 0.1
"""Weight of a step's newest time in its average."""
_NO_REGIONS = RegionUse(Regions(no_system))
"""Steps read and write no shared memory of clients."""


@dataclass(slots=True)
class StepActivity:
    """Requests of an ensemble in one of its steps."""

    model: str
    under_way: int = 0
    took_s: float | None = None
    """Moving average from the step's begin to its end; None before the first end."""
    fastest_s: dict[int, float] = field(default_factory=dict)
    """Least seconds of an execution, by rows of the request."""

    def ended(self, took_s: float, busy_s: float, rows: int) -> None:
        self.took_s = took_s if self.took_s is None else self.took_s + _NEWEST * (took_s - self.took_s)
        self.fastest_s[rows] = min(busy_s, self.fastest_s.get(rows, busy_s))


@dataclass(frozen=True, slots=True)
class EnsembleFlow:
    """Which steps of an ensemble read what which others write. Steps go by their numbers. A tokenizer has none."""

    config: bytes
    """The configuration that it was read from."""
    steps: tuple[EnsembleStep, ...]
    writers: Mapping[str, int]
    """By tensor; the ensemble's inputs have none."""
    sources: Mapping[int, Set[int]]
    """Steps whose outputs a step reads."""
    followers: Mapping[int, Sequence[EnsembleStep]]
    """Steps that read outputs of a step."""
    readers: Counter[str]
    """Number of steps that read a tensor."""
    activities: Mapping[int, StepActivity]
    truncates: bool
    """Whether a tokenizer cuts texts that are too long."""

    @classmethod
    def of(cls, name: str, config: bytes) -> "EnsembleFlow":
        parsed = ModelConfig.FromString(config)
        steps = steps_of(name, parsed)
        writers = {tensor: step.number for step in steps for tensor in step.outputs.values()}
        sources = {s.number: {writers[t] for t in s.inputs.values() if t in writers} for s in steps}
        followers = {step.number: [s for s in steps if step.number in sources[s.number]] for step in steps}
        readers = Counter(tensor for step in steps for tensor in set(step.inputs.values()))
        activities = {step.number: StepActivity(step.model) for step in steps}
        return cls(config, steps, writers, sources, followers, readers, activities, truncates(parsed))


class Ensembles:
    """The ensembles and tokenizers of a front end, with their counters. Event loop's thread only."""

    def __init__(self, client: EngineClient, tokenizers: TokenizerEntries) -> None:
        self.client = client
        self._tokenizers = tokenizers
        self._flows: dict[ModelKey, EnsembleFlow] = {}
        self._statistics: dict[ModelKey, ModelStatistics] = {}

    def __contains__(self, model: ModelKey) -> bool:
        entry = self.client.catalog.get(*model)
        return entry is not None and entry.info is not None and not entry.info.has_program

    def flow(self, model: ModelKey) -> EnsembleFlow:
        """Return an ensemble's steps, as they are configured now. Raises ModelNotFound if it is no longer served."""
        entry = self.client.catalog.get(*model)
        if entry is None or entry.info is None or entry.config is None:
            raise ModelNotFound(*model, reason="unloaded" if entry is None else entry.reason)
        flow = self._flows.get(model)
        if flow is None or flow.config != entry.config:
            flow = self._flows[model] = EnsembleFlow.of(model.name, entry.config)
        return flow

    def stages(self, ensemble: ModelKey) -> list[list[StepActivity]]:
        """Return what an ensemble's steps do, by the length of the longest path to them; none for other models."""
        if ensemble not in self:
            return []
        flow = self.flow(ensemble)
        depths: dict[int, int] = {}
        for step in flow.steps:
            depths[step.number] = max((1 + depths[source] for source in flow.sources[step.number]), default=0)
        return [
            [flow.activities[step.number] for step in flow.steps if depths[step.number] == depth]
            for depth in sorted(set(depths.values()))
        ]

    def least_after_s(self, flow: EnsembleFlow, rows: int) -> Mapping[int, float]:
        """Return the least seconds from the end of each step to that of the last one on the longest path after it."""
        after_s: dict[int, float] = {}
        for step in reversed(flow.steps):
            following = flow.followers[step.number]
            paths_s = (self._least_s(flow, one, rows) + after_s[one.number] for one in following)
            after_s[step.number] = max(paths_s, default=0.0)
        return after_s

    def _least_s(self, flow: EnsembleFlow, step: EnsembleStep, rows: int) -> float:
        """Return the least seconds that a step takes, as measured or predicted; 0 if unknown."""
        info = self.client.catalog.require(step.model, step.version)
        if info.platform == ENSEMBLE:
            inner = self.flow(info.key)
            after_s = self.least_after_s(inner, rows)
            return max(after_s[one.number] + self._least_s(inner, one, rows) for one in inner.steps)
        entry = self.client.catalog.get(*info.key)
        predicted = {} if entry is None else entry.footprint.predicted_s
        known_s = [seconds for bucket, seconds in predicted.items() if bucket.batch >= rows]
        measured_s = flow.activities[step.number].fastest_s
        return min([*known_s, *([measured_s[rows]] if rows in measured_s else [])], default=0.0)

    def own_steps(self, name: str) -> list[str]:
        """Return the models that are steps of this ensemble's READY versions, and of no other READY ensemble."""
        models = {
            entry.name: {step.model for step in self.flow(entry.key).steps}
            for entry in self.client.catalog
            if entry.is_ready and entry.key in self
        }
        others = {step for ensemble, steps in models.items() if ensemble != name for step in steps}
        return sorted(models.get(name, set()) - others)

    async def infer(
        self,
        request: Request,
        info: ModelInfo,
        lease: Lease,
        on_spans: OnSpans | None,
        lengths: Lengths = NO_LENGTHS,
    ) -> Answer:
        """Execute a request whose inputs are in leased memory. The answer's arrays are valid as long as the lease.

        Its timing is the sum of its steps' timings. `lengths` are those of a tokenizer's readers. Raises RequestError,
        which names the step.
        """
        statistics, began_s = self._counted(request.model), time.monotonic()
        try:
            if info.platform == TOKENIZER_BACKEND:
                cuts = self.flow(request.model).truncates
                answer = await self._tokenizers.infer(request, info, lease, lengths, truncates=cuts)
            else:
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
        if (statistics := self._statistics.get(model)) is None:
            statistics = self._statistics[model] = ModelStatistics()
        return statistics


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
        self._flow = flow = ensembles.flow(request.model)
        self._ensembles = ensembles
        self._request = request
        self._lease = lease
        self._on_spans = on_spans
        self._models: dict[int, ModelInfo] = {}
        """Versions that this request runs on, by step."""
        self._leases = {step.number: lease.memory.lease() for step in flow.steps}
        """Leases of the steps' outputs."""
        self._held = set(self._leases)
        """Those among them that this run holds; the others last as long as a reader keeps them."""
        self._tensors = dict(request.inputs)
        """The ensemble's tensors that exist and will be read."""
        self._datatypes = {tensor.name: tensor.datatype for tensor in info.inputs}
        self._readers = flow.readers.copy()
        """Number of steps that will read a tensor, and one more if it is in the answer."""
        self._readers.update(output.name for output in request.outputs)
        self._answered = {flow.writers[output.name] for output in request.outputs}
        """Steps that write outputs of the answer."""
        self._waits = {number: len(sources) for number, sources in flow.sources.items()}
        """Number of steps that have to be executed before a step."""
        self._timings: list[Timing] = []
        self._after_s: Mapping[int, float] = {}
        """Least seconds of what follows each step, if the request has a deadline."""

    async def answer(self) -> Answer:
        """Execute the steps, each as soon as its inputs exist."""
        try:
            for step in self._flow.steps:
                self._models[step.number] = self._model_of(step)
                for source in self._sources(step):
                    self._leases[step.number].keep(source)
            if self._request.timeout_s is not None:
                self._after_s = self._ensembles.least_after_s(self._flow, self._request.batch)
            async with asyncio.TaskGroup() as group:
                await self._follow([step for step in self._flow.steps if not self._waits[step.number]], group)
            for number in self._answered:
                self._lease.keep(self._leases[number])
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            for number in self._held:
                self._leases[number].release()
        outputs = {output.name: self._tensors[output.name] for output in self._request.outputs}
        return Answer(self._request.model, outputs, self._timing())

    async def _follow(self, ready: Sequence[EnsembleStep], group: asyncio.TaskGroup) -> None:
        """Execute steps, and those that they make ready: one after the other in this task, others in tasks."""
        while ready:
            step, *others = ready
            for other in others:
                group.create_task(self._follow([other], group))
            await self._execute(step)
            ready = []
            for follower in self._flow.followers[step.number]:
                self._waits[follower.number] -= 1
                if not self._waits[follower.number]:
                    ready.append(follower)

    def _sources(self, step: EnsembleStep) -> list[Lease]:
        """Return the leases of a step's inputs."""
        return [self._lease, *(self._leases[number] for number in self._flow.sources[step.number])]

    def _model_of(self, step: EnsembleStep) -> ModelInfo:
        try:
            return self._ensembles.client.catalog.require(step.model, step.version)
        except RequestError as error:
            raise self._named(step, error) from error

    async def _execute(self, step: EnsembleStep) -> None:
        info, lease = self._models[step.number], self._leases[step.number]
        activity, began_s = self._flow.activities[step.number], time.monotonic()
        activity.under_way += 1
        try:
            request = self._request_of(step, info)
            if info.has_program:
                client = self._ensembles.client
                answer = await infer_or_succeed(client, request, info, lease, step.version, self._on_spans)
            else:
                lengths = self._lengths(step)
                answer = await self._ensembles.infer(request, info, lease, self._on_spans, lengths)
            if info.platform != ENSEMBLE and (trace := CURRENT.get()) is not None:
                trace.steps.append((step.model, answer.timing))
        except RequestError as error:
            raise self._named(step, error) from error
        finally:
            activity.under_way -= 1
        activity.ended(time.monotonic() - began_s, answer.timing.busy_s, self._request.batch)
        for source in self._sources(step):
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
        if step.number not in self._answered:
            self._held.remove(step.number)
            lease.release()

    def _lengths(self, step: EnsembleStep) -> Lengths:
        """Return the token counts that the readers of a step's outputs take, if it is a tokenizer."""
        if self._models[step.number].platform != TOKENIZER_BACKEND:
            return NO_LENGTHS
        return {
            reader.model: lengths_of(self._models[reader.number], own)
            for reader in self._flow.followers[step.number]
            for own, tensor in reader.inputs.items()
            if tensor in step.outputs.values()
        }

    def _request_of(self, step: EnsembleStep, info: ModelInfo) -> Request:
        """Match the tensors with the step's model, as a client's. Raises RequestError."""
        now_s, left_s = time.monotonic(), self._request.timeout_s
        if left_s is not None and self._request.arrived_s is not None:
            left_s -= now_s - self._request.arrived_s + self._after_s[step.number]
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
        after_s = self._after_s.get(step.number, 0.0) if isinstance(error, RequestTimedOut) else 0.0
        following = f"; the steps after it take at least {after_s * 1e3:.3g} ms" if after_s else ""
        error.args = (f"ensemble '{self._request.model.name}', {step}: {error}{following}",)
        return error

    def _timing(self) -> Timing:
        """Return the sums of the steps' times."""
        queue_s = busy_s = compute_s = stall_s = output_s = 0.0
        swapped_bytes = 0
        for timing in self._timings:
            queue_s += timing.started_s - timing.queued_s
            busy_s += timing.busy_s
            compute_s += timing.compute_s
            stall_s += timing.stall_s
            output_s += timing.output_s
            swapped_bytes += timing.swapped_bytes
        began_s = self._timings[0].queued_s
        return Timing(
            began_s, began_s + queue_s, busy_s, compute_s, stall_s, output_s, swapped_bytes, self._request.batch
        )
