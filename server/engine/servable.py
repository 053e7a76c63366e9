"""A loaded model: converts the protocol's arrays to tensors, and runs the program of their bucket."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import ge

import numpy as np
import torch

from cohabit.planner.shapes import Bucket, DynamicShape
from cohabit.runtime.backend import Result, Runner
from cohabit.runtime.binding.program import Program
from cohabit.runtime.errors import DeviceError, UnsupportedModel
from cohabit.runtime.lowering.indices import indexed_values
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.model import Port
from cohabit.runtime.recording import OnRecording
from cohabit.server.errors import InvalidRequest
from cohabit.server.ipc.model import Array, GraphCapture, Inputs, ModelInfo, TensorSpec
from cohabit.server.ipc.request import Answer, Timing
from cohabit.server.protocol.datatypes import BF16, DTYPES

DATATYPES: Mapping[torch.dtype, str] = {
    torch.bfloat16 if name == BF16 else torch.from_numpy(np.empty(0, dtype)).dtype: name
    for name, dtype in DTYPES.items()
}
"""KServe's names."""


def describe(
    lowered: Lowered, version: int, max_batch: int, labels: Mapping[str, tuple[str, ...]] | None = None
) -> ModelInfo:
    """Return the model's description for clients, with the outputs' labels.

    Raises UnsupportedModel for a dtype without a KServe datatype.
    """
    labels = labels or {}
    return ModelInfo(
        name=lowered.name,
        version=version,
        inputs=tuple(
            _spec(lowered, port, rows=rows)
            for port, rows in zip(lowered.inputs, _indexed_rows(lowered), strict=True)
        ),
        outputs=tuple(_spec(lowered, port, labels.get(port.name, ())) for port in lowered.outputs),
        max_batch_size=max_batch if lowered.batched else 0,
        only_batches=tuple(b for b in lowered.batches if b <= max_batch) if lowered.interaction else (),
        dynamic=lowered.dynamic,
    )


def _spec(lowered: Lowered, port: Port, labels: tuple[str, ...] = (), rows: int | None = None) -> TensorSpec:
    if port.dtype not in DATATYPES:
        raise UnsupportedModel(f"{lowered.name}: {port.name} is {port.dtype}, which KServe v2 has no datatype for")
    shape = port.shape[1:] if lowered.batched else port.shape
    sizes = tuple(d for d in shape if d is not None)
    fixed = tuple(-1 if isinstance(d, str) else d for d in sizes)
    return TensorSpec(port.name, DATATYPES[port.dtype], fixed, labels, sizes if -1 in fixed else (), rows=rows)


def _indexed_rows(lowered: Lowered) -> list[int | None]:
    """Return, for each input, the row count of the smallest table that all of its values index; None without one."""
    found: list[int | None] = [None] * len(lowered.inputs)
    for values in indexed_values(lowered, min(lowered.traces)):
        if values.are_all and values.least == 0:
            rows = values.most + 1
            found[values.input] = min(found[values.input] or rows, rows)
    return found


@dataclass(slots=True)
class ProgramServable:
    """Runs the smallest planned batch that holds the requests; padding rows repeat the last one."""

    info: ModelInfo
    programs: Mapping[Bucket, Program]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    dynamic: DynamicShape
    """The program's dynamic sizes. `info` lacks those that clients do not see."""
    executor: Runner
    _borrowed: frozenset[str] = field(init=False)
    """Inputs that are growing states and that no program changes. They arrive as one array for all rows, and are used
    without a copy."""

    def __post_init__(self) -> None:
        seen = {tensor.name for tensor in self.info.inputs}
        hidden = [port for port in self.inputs if port.name not in seen]
        growing = {port.name for port in hidden if any(isinstance(size, str) for size in port.shape)}
        self._borrowed = frozenset(growing - self._changed()) if growing else frozenset()

    def _changed(self) -> set[str]:
        """Return the inputs that a program changes in place."""
        graphs = [program.draft.graph for program in self.programs.values()]
        return {
            self.inputs[graph.inputs.index(i)].name
            for graph in graphs
            for op in graph.ops
            for i in op.mutates
            if i in graph.inputs
        }

    @property
    def predicted_s(self) -> Mapping[Bucket, float]:
        """Predicted seconds of an inference by bucket: the plan's latency, plus the host time of a discrete device.

        A model without a batch dimension has batch 1. Buckets that differ only in sizes that clients do not see count
        as one, with the minimum of their times.
        """
        most, seen = self.info.max_batch_size, {tensor.name for tensor in self.info.inputs}
        shown = [n for n, d in enumerate(self.dynamic.dimensions) if self.inputs[d.input].name in seen]
        predicted: dict[Bucket, float] = {}
        for bucket, program in self.programs.items():
            plan, profile = program.plan.provenance, program.draft.profile
            if plan is not None and (not most or bucket.batch <= most):
                host_s = 0.0 if profile is None else profile.host_s
                key = Bucket(bucket.batch if most else 1, tuple(bucket.sizes[n] for n in shown))
                predicted[key] = min(plan.latency_s + host_s, predicted.get(key, math.inf))
        return predicted

    @property
    def recovery_s(self) -> float:
        """Seconds lost by an inference directly after another one of this model, in its smallest bucket."""
        about = self.programs[min(self.programs)].plan.provenance
        return 0.0 if about is None else max(about.period_s - about.latency_s, 0.0)

    @property
    def lost(self) -> str | None:
        return self.executor.lost

    @property
    def captures(self) -> Mapping[Bucket, GraphCapture]:
        found = {bucket: self.executor.capture(program) for bucket, program in self.programs.items()}
        return {b: GraphCapture(c.graphs, c.graph_bytes, c.refused) for b, c in found.items() if c is not None}

    def foresee(self, inputs: Inputs, rows: int) -> None:
        """Tell the device which program is expected to run after the next one, unless that depends on states."""
        if all(self.inputs[d.input].name in inputs for d in self.dynamic.dimensions):
            buckets = self._holding(min(rows, max(self.programs).batch), self._sizes(inputs))
            if buckets:
                self.executor.foresee(self.programs[min(buckets)])

    def launches_ahead(self, inputs: Inputs, rows: int) -> bool:
        buckets = self._holding(rows, self._sizes(inputs))
        return bool(buckets) and self.executor.launches_ahead(self.programs[min(buckets)])

    def begin(
        self, requests: Sequence[Inputs], rows: int, on_recording: OnRecording | None = None
    ) -> Answer | Callable[[], Answer]:
        """Begin one execution, or run several in turn if there are more rows than planned. Compute lane's thread."""
        most = max(self.programs).batch
        if self.info.max_batch_size and rows > most:
            return self._in_parts(requests, most, on_recording)
        sizes = self._sizes(requests[0])
        program = self._planned(rows, sizes)
        planned, symbols = program.bucket.batch, self.dynamic.symbols(sizes)
        self._check(symbols)
        tensors = [
            self._tensor([inputs[p.name] for inputs in requests], p, rows, p.at(planned, symbols))
            for p in self.inputs
        ]
        with self._explaining(requests):
            begun = self.executor.begin(program, tensors, on_recording=on_recording)
        if isinstance(begun, Result):
            return self._answer(begun, rows, tensors)
        wait = begun

        def finish() -> Answer:
            with self._explaining(requests):
                result = wait()
            return self._answer(result, rows, tensors)

        return finish

    def execute(self, requests: Sequence[Inputs], rows: int, on_recording: OnRecording | None = None) -> Answer:
        begun = self.begin(requests, rows, on_recording)
        return begun if isinstance(begun, Answer) else begun()

    @contextmanager
    def _explaining(self, requests: Sequence[Inputs]) -> Iterator[None]:
        """Turn the device's error for a value out of range into the client's."""
        try:
            yield
        except DeviceError as error:
            if (reason := self._out_of_range(requests)) is not None:
                raise InvalidRequest(reason) from error
            raise

    def _answer(self, result: Result, rows: int, tensors: Sequence[torch.Tensor]) -> Answer:
        start_s = time.perf_counter()
        own = rows if self.info.max_batch_size else None
        outputs = {
            p.name: self._own(array_of(t, own), tensors) for p, t in zip(self.outputs, result.outputs, strict=True)
        }
        timing = Timing(
            compute_s=result.latency_s,
            stall_s=result.stall_s,
            swapped_bytes=result.link_bytes,
            output_s=time.perf_counter() - start_s,
        )
        return Answer(self.info.key, outputs, timing)

    def _in_parts(self, requests: Sequence[Inputs], most: int, on_recording: OnRecording | None) -> Answer:
        """Run the rows of requests in several executions of at most `most` rows each."""
        rows = {port.name: _joined([inputs[port.name] for inputs in requests]) for port in self.inputs}
        count = len(next(iter(rows.values())))
        answers = [
            self.execute([{name: array[start : start + most] for name, array in rows.items()}], own, on_recording)
            for start in range(0, count, most)
            for own in [min(most, count - start)]
        ]
        outputs = {
            port.name: np.concatenate([answer.outputs[port.name] for answer in answers]) for port in self.outputs
        }
        timings = [answer.timing for answer in answers]
        together = Timing(
            compute_s=sum(timing.compute_s for timing in timings),
            stall_s=sum(timing.stall_s for timing in timings),
            swapped_bytes=sum(timing.swapped_bytes for timing in timings),
            output_s=sum(timing.output_s for timing in timings),
        )
        return Answer(self.info.key, outputs, together)

    def _out_of_range(self, requests: Sequence[Inputs]) -> str | None:
        """Return a message about an input value outside the table that it indexes; None if there are none."""
        for spec in self.info.inputs:
            if spec.rows is None:
                continue
            for inputs in requests:
                values = inputs[spec.name]
                if (wrong := values[(values < 0) | (values >= spec.rows)]).size:
                    return (
                        f"input '{spec.name}' of model '{self.info.name}' has the value {wrong[0]}, which is out of"
                        f" range: its values are indices from 0 to {spec.rows - 1}"
                    )
        return None

    def switch(self, programs: Mapping[Bucket, Program]) -> None:
        """Replace the programs. The residents of the new ones must be in place. Compute lane's thread."""
        self.programs = programs

    def _sizes(self, inputs: Inputs) -> tuple[int, ...]:
        """Return the sizes of an execution, including those that clients do not see."""
        return tuple(inputs[self.inputs[d.input].name].shape[d.axis] for d in self.dynamic.dimensions)

    def _tensor(self, arrays: Sequence[Array], port: Port, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Return an input, padded to the planned batch: a copy that the execution owns, unless it is borrowed."""
        if port.name not in self._borrowed:
            return _tensor(arrays, port, rows, shape)
        (whole,) = arrays
        if whole.shape != shape:
            return _tensor([whole[:rows]], port, rows, shape)
        tensor = torch.from_numpy(whole)
        return tensor.view(port.dtype) if port.dtype is torch.bfloat16 else tensor

    def _own(self, output: Array, tensors: Sequence[torch.Tensor]) -> Array:
        """Return an output that no later execution overwrites."""
        borrowed = (t for t, port in zip(tensors, self.inputs, strict=True) if port.name in self._borrowed)
        shares = any(np.may_share_memory(output, array_of(tensor)) for tensor in borrowed)
        return output.copy() if shares else output

    def _check(self, symbols: Mapping[str, int]) -> None:
        """Raise InvalidRequest for sizes that violate the program's export conditions.

        Conditions on clients' inputs are already checked.
        """
        if len(self.dynamic.constraints) == len(self.info.dynamic.constraints):
            return
        if (broken := self.dynamic.broken_constraint(symbols)) is not None:
            raise InvalidRequest(
                f"model '{self.info.name}' was exported under the condition {broken}, where"
                f" {', '.join(f'{symbol} is {value}' for symbol, value in symbols.items())}"
            )

    def _planned(self, rows: int, sizes: tuple[int, ...]) -> Program:
        """Return the program of the smallest bucket that holds rows of these sizes."""
        return self.programs[min(self._holding(rows, sizes))]

    def _holding(self, rows: int, sizes: tuple[int, ...]) -> list[Bucket]:
        """Return the buckets that hold rows of these sizes."""
        least = rows if self.info.max_batch_size else 0
        return [b for b in self.programs if b.batch >= least and all(map(ge, b.sizes, sizes))]


def _tensor(arrays: Sequence[Array], port: Port, rows: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a concatenated copy that the execution owns, padded to the planned batch with the last row."""
    if len(arrays) == 1 and arrays[0].shape == shape:
        own = arrays[0].copy()
    else:
        own = np.empty(shape, arrays[0].dtype)
        np.concatenate(arrays, out=own[:rows])
        own[rows:] = own[rows - 1]
    tensor = torch.from_numpy(own)
    return tensor.view(port.dtype) if port.dtype is torch.bfloat16 else tensor


def _joined(arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def array_of(tensor: torch.Tensor, rows: int | None = None) -> Array:
    """Return the first `rows` of a tensor as an array, bfloat16 as its bits; None for all rows."""
    own = tensor.contiguous()
    array: Array = own.view(torch.uint16).numpy() if own.dtype is torch.bfloat16 else own.numpy()
    return array if rows is None else array[:rows]
