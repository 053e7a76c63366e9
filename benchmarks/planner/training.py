"""Training graphs: forward, backward and update of one step, as autograd orders them.

The networks are SwapAdvisor's (section 6.1). The joint graph of forward and backward is functional, so
every activation is written once; a weight is state that its update (SGD: one op per weight) changes in place as soon
as its gradient is there and nothing reads it any more. Batch norms use the batch's statistics and keep no others.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses import FakeTensorMode
from transformers.initialization import no_init_weights

from benchmarks.planner.cache import DEFAULT_CACHE, cached
from benchmarks.planner.capture import Call, Captured, Storage, Work, captured, trace
from benchmarks.planner.inception import inception_v4
from benchmarks.planner.models import resnet
from benchmarks.planner.nasnet import NasNetA
from benchmarks.planner.recurrent import BidirectionalLstm, Lstm
from cohabit.planner.graph import Graph, TensorKind
from cohabit.planner.lifetimes import peak_activation_bytes


class Training(NamedTuple):
    """A network with its loss, one step's examples, and their number."""

    build: Callable[[], nn.Module]
    examples: Callable[[int], tuple[torch.Tensor, ...]]
    batch: int


class Classified(nn.Module):
    """Cross entropy of a classifier's logits."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
        found = self.classifier(image)
        return (nn.functional.cross_entropy(found["logits"] if isinstance(found, dict) else found, labels),)


class Scored(nn.Module):
    """Sum over all steps of the mean of what a network says: a loss that costs nothing."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *sequence: torch.Tensor) -> tuple[torch.Tensor]:
        return (sum(hidden.mean() for hidden in self.network(*sequence)),)


def _labelled(side: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: (torch.empty(batch, 3, side, side), torch.empty(batch, dtype=torch.int64))


def _sequence(steps: int, width: int) -> Callable[[int], tuple[torch.Tensor, ...]]:
    return lambda batch: tuple(torch.empty(batch, width) for _ in range(steps))


def _wide_resnet(scale: int, batch: int) -> Training:
    return Training(lambda: Classified(resnet(scale)), _labelled(224), batch)


def _wide_inception(scale: int, batch: int) -> Training:
    return Training(lambda: Classified(inception_v4(scale)), _labelled(299), batch)


def _rnn(layers: int, width: int, steps: int, batch: int) -> Training:
    return Training(lambda: Scored(Lstm(layers, width)), _sequence(steps, width), batch)


def _brnn(layers: int, width: int, steps: int, batch: int) -> Training:
    network = lambda: Scored(BidirectionalLstm(layers, width))  # noqa: E731
    return Training(network, _sequence(steps, width), batch)


TRAININGS: Mapping[str, Training] = {
    "wresnet152_4": _wide_resnet(4, 64),
    "inception_4": _wide_inception(4, 64),
    "rnn_8_2k": _rnn(8, 2048, 32, 4096),
    "brnn_4_2k": _brnn(4, 2048, 32, 4096),
    "wresnet152_10": _wide_resnet(10, 64),
    "nasnet_25": Training(lambda: Classified(NasNetA(repeats=25)), _labelled(224), 64),
    "rnn_8_8k": _rnn(8, 8192, 32, 256),
    "brnn_4_8k": _brnn(4, 8192, 32, 128),
}
"""The last four, and `inception_4`, are SwapAdvisor's Table 1. The paper says neither how many time steps its recurrent
networks have, nor how wide its NasNet is: 32 here, and the width of NasNet-A Large."""


def training_graph(name: str, batch: int | None = None, cache: Path | None = DEFAULT_CACHE) -> Captured:
    """The graph of one step of one of `TRAININGS`, at its own batch size unless told, and the work of its ops."""
    training = TRAININGS[name] if batch is None else TRAININGS[name]._replace(batch=batch)
    return cached(f"{name}-b{training.batch}", cache, lambda: capture_training(name, training))


def capture_training(name: str, training: Training) -> Captured:
    """Trace forward and backward on fake tensors, and put the updates in."""
    mode = FakeTensorMode()
    with mode, no_init_weights():
        module = training.build().train()
        _forget_statistics(module)
        examples = training.examples(training.batch)
        joint, signature = aot_export_module(module, examples, trace_joint=True, output_loss_index=0)
    assert isinstance(joint, torch.fx.GraphModule)
    weights = dict(module.named_parameters())
    held, inputs = signature.inputs_to_parameters, dict(zip(signature.user_inputs, examples, strict=True))
    values: dict[str, tuple[TensorKind, torch.Tensor]] = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            of_weight = node.name in held
            values[node.name] = (
                ("state", weights[held[node.name]].detach()) if of_weight else ("input", inputs[node.name])
            )
    found = trace(joint.graph, values, {})
    # What the joint graph returns: the loss, then a gradient per weight, in the order in which weights come in.
    assert len(found.results) == 1 + len(held)
    loss, *gradients = found.results
    assert loss is not None
    states = found.entered[: len(held)]
    found.calls = with_updates(found.calls, dict(zip(states, gradients, strict=True)))
    return captured(name, training.batch, found, [loss])


def with_updates(calls: Sequence[Call], gradients: Mapping[Storage, Storage | None]) -> list[Call]:
    """Put each weight's update after the last op that needs the weight or makes its gradient."""
    last: dict[Storage, int] = {}
    for k, call in enumerate(calls):
        for storage in (*call.reads, *call.writes):
            if storage.kind == "state" or storage in call.writes:
                last[storage] = k
    due: dict[int, list[Call]] = {}
    for weight, gradient in gradients.items():
        if gradient is not None:
            elements = weight.nbytes // weight.tensor.element_size()
            work = Work(2 * elements, 3 * weight.nbytes)
            update = Call(f"{weight.name}.update", "sgd", [weight, gradient], [], [weight], work)
            due.setdefault(max(last[weight], last[gradient]), []).append(update)
    return [each for k, call in enumerate(calls) for each in (call, *due.get(k, ()))]


def _forget_statistics(module: nn.Module) -> None:
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.track_running_stats = False
            part.running_mean = part.running_var = part.num_batches_tracked = None


def peak_bytes(graph: Graph) -> int:
    """Memory in which nothing ever moves: all weights stay, activations live from their op to their last reader."""
    states = {i for i, t in enumerate(graph.tensors) if t.kind == "state"}
    as_parameters = [
        msgspec.structs.replace(t, kind="parameter") if t.kind == "state" else t for t in graph.tensors
    ]
    resident = sum(graph.tensors[i].nbytes for i in states)
    return resident + peak_activation_bytes(msgspec.structs.replace(graph, tensors=tuple(as_parameters)))
