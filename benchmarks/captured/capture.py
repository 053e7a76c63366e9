"""Captures a whole training step: forward, backward, and the user's own optimizer.

The step is traced with `make_fx` on fake tensors, so that it takes no memory, and is not functionalised: updates in
place stay as they are and become `Op.mutates` on state. Learning rates, which schedulers change, are inputs.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from benchmarks.captured.state import RNG, TrainingState
from benchmarks.captured.updates import updates_early
from cohabit.planner.shapes import Bucket
from cohabit.runtime.errors import UnsupportedModel
from cohabit.runtime.lowering.lower import Lowered
from cohabit.runtime.lowering.model import FxModel, Port
from cohabit.runtime.lowering.packing import storage_key
from cohabit.runtime.lowering.trace import OpTracer, Storage

Loss = Callable[..., torch.Tensor]
"""`loss(model, *batch)`, a 0-d tensor that is minimised."""

BUCKET = Bucket(1)
"""A step has one shape, whatever its batch is."""

_DECOMPOSITIONS = {torch.ops.aten.native_batch_norm.default: torch.ops.aten._native_batch_norm_legit.default}
"""Operators whose schema does not say what they change, and the same kernels under a schema that does."""
_RANDOM = Storage("weight", 0, 8, RNG)


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What surrounds the user's loss in a step."""

    clip_norm: float | None = None
    """The largest norm of all gradients together."""
    micro_batches: int = 1
    """Parts of a batch, along dimension 0 of each of its tensors, whose gradients are added."""
    autocast: torch.dtype | None = None
    """Operators that allow it run in this precision (`torch.autocast`)."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op's target and its arguments, with fake tensors: what its time and scratch are measured with."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    batch: Sequence[torch.Tensor],
    state: TrainingState,
    options: StepOptions,
    device: torch.device,
) -> tuple[Lowered, list[OpCall]]:
    """Trace a step as it runs on a device. Its inputs are the batch, then a learning rate per parameter group.

    Its output is the loss. Returns the call of each op beside it. Raises UnsupportedModel where the step depends on
    values of tensors.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)
    rates = [torch.zeros((), dtype=torch.float64) for _ in optimizer.param_groups]
    with mode:
        weights = {
            name: torch.empty_strided(t.shape, t.stride, dtype=t.dtype, device=device)
            for name, t in state.tensors.items()
            if name != RNG
        }
        inputs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in (*batch, *rates)]
    step = _Step(model, optimizer, loss, state, options, device)
    try:
        with _without_library_layers(), torch.autograd.set_multithreading_enabled(False):
            traced = make_fx(step, _DECOMPOSITIONS, tracing_mode="fake")(weights, *inputs)
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedModel(
            f"the step depends on the values of tensors: {reason}. It must be the same for every batch, so keep"
            " values in tensors: no branches on .item(), no boolean indexing"
        ) from error
    graph = traced.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    names = {n.name: name for n, name in zip(placeholders, weights, strict=False)}
    fakes = {n.name: weights[name] for n, name in zip(placeholders, weights, strict=False)}
    first_update = _remove_marks(graph)
    with mode, torch.no_grad():
        tracer = StepTracer(FxModel("step", traced, graph, fakes, (), (), None), names, inputs)
        ordered = updates_early(graph, tracer.run().ops, first_update)
        tracer = StepTracer(FxModel("step", traced, ordered, fakes, (), (), None), names, inputs)
        trace = tracer.run()
    ports = [Port(f"input{n}", t.dtype, tuple(t.shape)) for n, t in enumerate(inputs)]
    (output,) = (n for n in graph.nodes if n.op == "output")
    result = Port("loss", output.args[0][0].meta["val"].dtype, ())
    traces = {BUCKET: trace}
    lowered = Lowered("training", tuple(ports), (result,), False, traces, state.manifest(), Path())
    return lowered, tracer.calls


class StepTracer(OpTracer):
    """Traces a step on fake tensors. Any operator is allowed."""

    def __init__(self, model: FxModel, names: Mapping[str, str], inputs: Sequence[torch.Tensor]) -> None:
        """`names` has the state's name of each placeholder."""
        super().__init__(model, model.weights, BUCKET, inputs)
        self._names = names
        self.calls: list[OpCall] = []

    def require_allowed(self, target: Any) -> None:
        """Allow everything: the program is the user's own, in the user's own process."""

    def _enter(self, node: fx.Node) -> None:
        super()._enter(node)
        if node.name in self._names:
            tensor = self.weights[node.name]
            nbytes = tensor.untyped_storage().nbytes()
            self.storages[storage_key(tensor)] = Storage("weight", 0, nbytes, self._names[node.name])

    def _scalar(self, node: fx.Node, inputs: Any) -> None:
        """Arithmetic on numbers that were read out of tensors costs nothing: it is issued like a view."""
        if isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
            super()._scalar(node, inputs)
        else:
            self._issue(node, None)

    def _op(self, node: fx.Node, inputs: Any, outputs: Sequence[torch.Tensor], mutated: Sequence[Storage]) -> int:
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, torch.Tensor) and storage_key(leaf) not in self.storages:
                raise UnsupportedModel(
                    f"{node.name} reads a tensor {leaf.dtype} {list(leaf.shape)} that is neither a parameter, nor a"
                    " buffer, nor of the batch: register it as a buffer, or pass it with the batch"
                )
        index = super()._op(node, inputs, outputs, mutated)
        assert callable(node.target)
        self.calls.append(OpCall(node.target, *inputs))
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            op = self.ops[index]
            self.ops[index] = msgspec.structs.replace(
                op, reads=(*op.reads, _RANDOM), mutates=(*op.mutates, _RANDOM)
            )
        return index


class _Step:
    """The function that is traced."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        state: TrainingState,
        options: StepOptions,
        device: torch.device,
    ) -> None:
        self._holder = _Holder(model, loss)
        self._device = device
        self._optimizer = optimizer
        self._state = state
        self._options = options

    def __call__(self, weights: Mapping[str, torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
        groups = len(self._optimizer.param_groups)
        batch, rates = inputs[:-groups], [rate.item() for rate in inputs[-groups:]]
        trained = {name: weights[name].requires_grad_() for name in self._state.trained}
        module = {f"model.{name}": weights[name] for name in self._state.of_module}
        count, precision = self._options.micro_batches, self._options.autocast
        total: torch.Tensor | None = None
        for part in zip(*(torch.tensor_split(t, count) for t in batch), strict=True):
            with torch.autocast(self._device.type, dtype=precision, enabled=precision is not None):
                loss = functional_call(self._holder, module, part)
            _require_loss(loss)
            loss = loss if count == 1 else loss / count
            _add_gradients(loss, trained)
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        with torch.no_grad():
            if self._options.clip_norm is not None:
                nn.utils.clip_grad_norm_(trained.values(), self._options.clip_norm, foreach=False)
            self._update(trained, weights, rates)
        return [total]

    def _update(
        self, trained: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor], rates: Sequence[float]
    ) -> None:
        """Run the optimizer's own step on the traced parameters, with the traced state."""
        optimizer = copy.copy(self._optimizer)
        optimizer.param_groups = []
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            names = [self._state.name_of(p) for p in group["params"] if p.requires_grad]
            one_by_one: dict[str, Any] = {key: False for key in ("foreach", "fused", "capturable") if key in group}
            traced = {**group, **one_by_one, "params": [trained[n] for n in names], "lr": rate}
            optimizer.param_groups.append(traced)
        optimizer.state = self._state.optimizer_state(self._optimizer, trained, weights)
        optimizer.step()


class _Holder(nn.Module):
    """Calls the user's loss with the model as it is, so that `functional_call` can put weights into it."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        before = dict(self.model.named_buffers())
        loss = self._loss(self.model, *batch)
        for name, buffer in self.model.named_buffers():
            if buffer is not before.get(name):
                raise UnsupportedModel(
                    f"the step gives buffer {name} another tensor, which would be lost; change the buffer in place:"
                    f" self.{name}.copy_(...)"
                )
        return loss


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        found = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise UnsupportedModel(f"the loss must be one 0-d tensor, as of .mean() or .sum(), and is {found}")
    if not loss.requires_grad:
        raise UnsupportedModel(
            "the loss depends on no parameter that the optimizer has and that requires a gradient"
        )


def _add_gradients(loss: torch.Tensor, trained: Mapping[str, torch.Tensor]) -> None:
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedModel(
                f"the gradient of {name} is sparse, which has no size before the step; make its embedding with"
                " sparse=False"
            )
        if gradient is not None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


@contextmanager
def _without_library_layers() -> Iterator[None]:
    """Trace an LSTM op by op, and batch norms as torch's own: what a library's layers change is not in their schema.

    OneDNN's LSTM keeps what its backward needs only while torch records gradients. Which library computes a convolution
    is decided when it runs.
    """
    before = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch._C._set_cudnn_enabled(before[1])


def _remove_marks(graph: fx.Graph) -> str:
    """Remove what torch notes for its profiler, and calls without users; return the update's first node."""
    first, marks = "", []
    for node in graph.nodes:
        if str(node.target).startswith("profiler."):
            marks.append(node)
            if not first and str(node.args[0]).startswith("Optimizer.step"):
                first = node.next.name
    for node in reversed(marks):
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.target is torch.ops.aten.empty.memory_format and not node.users:
            graph.erase_node(node)
    return first
