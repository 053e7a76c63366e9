"""Translation validation: runs a lowered program and its archive's own on the same inputs, and compares their outputs.

Where they differ, rewrites are left out until they agree. This is the last line of defence against a wrong rewrite.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import gt
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.allowed_ops import draws, is_assertion
from cohabit.runtime.lowering.interaction import comparable, difference
from cohabit.runtime.lowering.model import Port
from cohabit.runtime.lowering.rewrites.precision import compute_in
from cohabit.runtime.options import Options

_INTEGERS = (1000, 100, 10, 2, 1)
"""Bounds of random integers, in the order tried: a model's indices must be valid."""
_LARGE = 1e3
"""Factor of every second row in one sample."""
_ROUNDING, _MOVED = 1e-6, 8.0
"""Where outputs differ, the archive's program runs again with inputs and weights perturbed by the first, as a fraction.
Outputs may then differ by up to the second times the change: some models amplify rounding, such as by sorting."""
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Errors that a model raises for inputs that it rejects."""

_NAMED = 4
"""Maximum number of replaced ops that a message names."""


class LeftOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rewrite that was left out of a model because outputs differ with it, or because it fails."""

    rewrite: str
    ops: tuple[str, ...]
    """Names of the program's ops that it replaces."""
    reason: str

    def __str__(self) -> str:
        more = f" and {len(self.ops) - _NAMED} more" if len(self.ops) > _NAMED else ""
        ops = f" of {', '.join(self.ops[:_NAMED])}{more}" if self.ops else ""
        return f"{self.rewrite}{ops}: {self.reason}"


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of comparing a lowered program with its archive's own."""

    runs: int
    """Number of input sets that both programs ran on; if 0, `unchecked` has the reason."""
    largest: float = 0.0
    """Largest difference, as a fraction of an output's largest element."""
    left_out: tuple[LeftOut, ...] = ()
    unchecked: str | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Inputs of one bucket, and the outputs of the archive's program for them."""

    bucket: Bucket
    inputs: list[torch.Tensor]
    expected: list[torch.Tensor]
    broken: bool = False
    """Whether the inputs contain a NaN or an infinity."""


class Rewritten(Protocol):
    """A program after its rewrites."""

    @property
    def applied(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the program's ops that each rewrite replaced, by the rewrite's name."""
        ...

    def run(self, bucket: Bucket, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


_R = TypeVar("_R", bound=Rewritten)


class Reference:
    """An archive's program as it was exported, run op by op. With a reduced dtype option, it computes in that type."""

    def __init__(self, program: ExportedProgram, options: Options) -> None:
        self._dtype: torch.dtype = getattr(torch, options.dtype)
        self._program, self._graph = program, fx.Graph()
        self._graph.output(self._graph.graph_copy(program.graph, {}))
        for node in self._graph.nodes:
            if self._dtype is not torch.float32:
                compute_in(node, self._dtype)
        self._last_use = {n: user for user in self._graph.nodes for n in user.all_input_nodes}

    @property
    def exact(self) -> bool:
        """Whether the program computes in the archive's own types."""
        return self._dtype is torch.float32

    @property
    def random_op(self) -> str | None:
        """Name of an op that draws random numbers; None if there is none."""
        calls = (node for node in self._graph.nodes if node.op == "call_function")
        return next((node.name for node in calls if draws(node.target, node.args, node.kwargs)), None)

    def run(self, inputs: Sequence[torch.Tensor], noise: torch.Generator | None = None) -> list[torch.Tensor]:
        """Return the outputs. With `noise`, inputs and weights are perturbed by rounding errors."""
        specs, given = iter(self._program.graph_signature.input_specs), iter(inputs)
        frame: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return frame[node]() if isinstance(frame[node], partial) else frame[node]

        with torch.inference_mode():
            for node in self._graph.nodes:
                if node.op == "placeholder":
                    frame[node] = self._entered(next(specs), given, noise)
                elif node.op == "get_attr":
                    frame[node] = getattr(self._program.graph_module, str(node.target))
                elif node.op == "call_function" and not (is_assertion(node.target) and not node.users):
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
                    frame[node] = cast(Any, node.target)(*args, **kwargs)
                elif node.op == "output":
                    leaves = pytree.tree_leaves(node.args[0])
                    kinds = [spec.kind for spec in self._program.graph_signature.output_specs]
                    own = [n for n, kind in zip(leaves, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
                    return [value(n) for n in own if isinstance(n, fx.Node)]
                for used in node.all_input_nodes:
                    if self._last_use[used] is node:
                        frame.pop(used, None)
        raise AssertionError("a program has an output")

    def _entered(self, spec: Any, given: Iterator[torch.Tensor], noise: torch.Generator | None) -> Any:
        """Return a placeholder's value. A weight is a partial, so that a converted copy lives only for one reader."""
        if spec.kind is InputKind.USER_INPUT:
            return self._own(next(given).clone(), noise) if isinstance(spec.arg, TensorArgument) else spec.arg.value
        weight = self._program.state_dict.get(spec.target, self._program.constants.get(spec.target))
        return partial(self._own, weight, noise)

    def _own(self, tensor: torch.Tensor, noise: torch.Generator | None) -> torch.Tensor:
        if tensor.dtype is torch.float32:
            tensor = tensor.to(self._dtype)
        if noise is None or not tensor.is_floating_point():
            return tensor.detach()
        step = max(_ROUNDING, torch.finfo(tensor.dtype).eps)
        return tensor.detach() * (1 + step * torch.randn(tensor.shape, generator=noise)).to(tensor.dtype)


def samples_of(
    reference: Reference,
    ports: Sequence[Port],
    buckets: Sequence[Bucket],
    symbols: Mapping[Bucket, Mapping[str, int]],
) -> list[Sample]:
    """Return seeded inputs of the smallest bucket and one more, with the archive's outputs. Empty if all are rejected.

    Floats have both signs. One sample has every second row a thousand times larger, one a NaN, one an infinity; a
    reduced type has none of these three. Integers are below the largest bound that the program accepts.
    """

    def sample(bucket: Bucket, bound: int, *, large: bool = False, broken: float | None = None) -> Sample | None:
        generator = torch.Generator().manual_seed(bound)
        shapes = [port.at(bucket.batch, symbols[bucket]) for port in ports]
        inputs = [_random(p.dtype, s, bound, generator) for p, s in zip(ports, shapes, strict=True)]
        for tensor in inputs:
            if tensor.is_floating_point() and large and tensor.dim():
                (tensor[1::2] if len(tensor) > 1 else tensor).mul_(_LARGE)
            elif tensor.is_floating_point() and broken is not None and tensor.numel() > 1:
                tensor.view(-1)[tensor.numel() // 2] = broken
        try:
            return Sample(bucket, inputs, reference.run(inputs), broken is not None)
        except _REFUSALS:
            return None

    # Find the largest bound of integers with finite outputs: indices must be valid.
    first, found = min(buckets), list[tuple[float, int, Sample]]()
    for bound in _INTEGERS if any(not p.dtype.is_floating_point for p in ports) else _INTEGERS[:1]:
        if (own := sample(first, bound)) is not None:
            found.append((_finite(own.expected), bound, own))
            if found[-1][0] == 1:
                break
    if not found:
        return []
    _, bound, ordinary = max(found, key=lambda item: item[:2])
    if reference.exact:  # a reduced type has its own NaN and infinities
        more = [sample(_another(buckets), bound, large=True)]
        more += [sample(first, bound, broken=value) for value in (torch.nan, torch.inf)]
    else:
        more = [sample(_another(buckets), bound)]
    return [ordinary, *(own for own in more if own is not None)]


def _another(buckets: Sequence[Bucket]) -> Bucket:
    """Return the smallest bucket with a larger batch than the smallest, and larger in all other sizes if there is one.

    If all buckets have the same batch, only the other sizes count.
    """
    first, largest = min(buckets), max(buckets)
    larger = [b for b in buckets if b.batch > first.batch or first.batch == largest.batch]
    return min((b for b in larger if all(map(gt, b.sizes, first.sizes))), default=min(larger))


def _random(dtype: torch.dtype, shape: tuple[int, ...], bound: int, generator: torch.Generator) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator).to(dtype)
    most = min(bound, 2) if dtype is torch.bool else min(bound, torch.iinfo(dtype).max)
    return torch.randint(0, most, shape, generator=generator).to(dtype)


def _finite(outputs: Sequence[torch.Tensor]) -> float:
    """Return the fraction of finite elements in the output with the fewest."""
    return min((float(t.isfinite().double().mean()) for t in outputs if t.numel()), default=1.0)


def validated(
    reference: Reference,
    samples: Sequence[Sample],
    ports: Sequence[Port],
    limit: float,
    program: _R,
    make: Callable[[frozenset[str]], _R],
) -> tuple[_R, Validation]:
    """Return a program that agrees with the archive's, `program` itself or one from `make`, and the result.

    If outputs differ, leaves out all rewrites, and restores one after the other those that do no harm. Raises
    UnsupportedModel if outputs differ without any rewrite.
    """
    compare = partial(_compare, reference, samples, ports, limit)
    largest, first = compare(program)
    if first is None:
        return program, Validation(len(samples), largest)
    applied = program.applied
    left_out = frozenset(applied)
    largest, difference = compare(make(left_out))
    if difference is not None:
        raise UnsupportedModel(
            f"its lowered program is not the archive's, with and without rewrites: {first}; without, {difference}"
        )
    for name in applied:
        own, difference = compare(make(left_out - {name}))
        if difference is None:
            left_out, largest = left_out - {name}, own
    named = tuple(LeftOut(name, applied[name], first) for name in applied if name in left_out)
    return make(left_out), Validation(len(samples), largest, named)


def _compare(
    reference: Reference, samples: Sequence[Sample], ports: Sequence[Port], limit: float, program: Rewritten
) -> tuple[float, str | None]:
    """Return the largest difference as a fraction of an output's largest element, and a description of any excess."""
    largest = 0.0
    for sample in samples:
        try:
            found = program.run(sample.bucket, [t.clone() for t in sample.inputs])
        except _REFUSALS as error:
            reason = str(error).split("\n", 1)[0][:200]
            return largest, f"it fails at batch {sample.bucket}: {type(error).__name__}: {reason}"
        shares = _shares(sample, found)
        largest = max([largest, *filter(math.isfinite, shares)])
        moved = _moved(reference, sample) if max(shares, default=0.0) > limit else shares
        for port, share, own in zip(ports, shares, moved, strict=True):
            if share > max(limit, _MOVED * own):
                return largest, f"output {port.name} at batch {sample.bucket} {_how(share, limit)}"
    return largest, None


def _how(share: float, limit: float) -> str:
    if math.isinf(share):
        return "has another form, or numbers where the archive's program has NaN or infinities"
    return f"differs by {share:.2g} of its largest element, or of its integers, and the limit is {limit:.0e}"


def _moved(reference: Reference, sample: Sample) -> list[float]:
    """Return how much the archive's own outputs change when inputs and weights are perturbed by rounding errors."""
    return _shares(sample, reference.run(sample.inputs, torch.Generator().manual_seed(0)))


def _shares(sample: Sample, found: Sequence[torch.Tensor]) -> list[float]:
    """Return each output's largest difference, as a fraction of its largest element among rows of the same scale."""
    return [
        max(
            (_share(sample, own[k::2], other[k::2]) for k in range(2))
            if other.dim()
            else [_share(sample, own, other)]
        )
        if own.shape == other.shape and own.dtype == other.dtype
        else math.inf
        for own, other in ((comparable(a), comparable(b)) for a, b in zip(found, sample.expected, strict=True))
    ]


def _share(sample: Sample, own: torch.Tensor, expected: torch.Tensor) -> float:
    """Return an output's difference; infinite for another number in place of the archive's NaN or infinity.

    In a broken sample, NaN in place of a number is accepted: kernels may multiply infinities by zero. So is infinity in
    place of NaN in any sample: PyTorch's own gelu of infinity returns either, depending on the number of elements.
    """
    if own.is_floating_point():
        same = own.isinf() & expected.isnan() | (own == expected)
        kept = expected.isfinite() | own.isnan() | same
        if not bool(kept.all()):
            return math.inf
        if sample.broken:
            own = torch.where(expected.isfinite() & ~own.isnan(), own, expected)
    return difference(own, expected, expected)
